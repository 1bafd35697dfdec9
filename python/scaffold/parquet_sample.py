"""Rows of Parquet files and of Delta tables: the first of some row groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog
from headrace.storage import local

#: Rows that are looked at, and the files that they are from.
SAMPLE_ROWS, SAMPLE_FILES = 200_000, 8

#: (rows, all rows there are, whether these are all, names of partition columns).
Found = tuple[pa.Table, int, bool, list[str]]


def parquet_rows(files: Sequence[Path], root: Path) -> Found:
    """Rows of a folder of Parquet files; `key=value` folders are columns of text.

    Raises:
        UserError: a file is none.
    """
    partitions = {f: _hive(f.relative_to(root).parent) for f in files}
    return _rows([(f, partitions[f]) for f in files])


def delta_rows(folder: Path) -> Found:
    """Rows of the newest version of a Delta table, from its log's files.

    Raises:
        UserError: a table that headrace does not read, or an empty one.
    """
    log = DeltaLog(local(folder))
    version = log.version
    files = log.files(version) if version is not None else None
    if not files:
        raise UserError(f"{folder}: its newest version has no files to look at")
    given = [(f.path.local_path(), f.partition) for f in sorted(files, key=lambda f: sorted(f.partition.items()))]
    return _rows(given)


def _rows(files: Sequence[tuple[Path, Mapping[str, str | None]]]) -> Found:
    names = list(dict.fromkeys(k for _, partition in files for k in partition))
    chosen = list(files)
    if len(files) > SAMPLE_FILES:
        step = (len(files) - 1) / (SAMPLE_FILES - 1)
        chosen = [files[round(i * step)] for i in range(SAMPLE_FILES)]
    tables, total = [], 0
    try:
        for path, partition in chosen:
            with pq.ParquetFile(path) as file:
                total += file.metadata.num_rows
                table = pa.Table.from_batches(_some(file, SAMPLE_ROWS // len(chosen)), file.schema_arrow)
            for name in names:
                table = table.append_column(name, pa.array([partition.get(name)] * table.num_rows, pa.string()))
            tables.append(table)
        rows = pa.concat_tables(tables, promote_options="default")
    except (OSError, pa.ArrowException) as e:
        raise UserError(f"cannot be read as Parquet: {' '.join(str(e).split())[:200]}") from None
    if not rows.num_rows:
        raise UserError("no rows to look at")
    whole = len(chosen) == len(files) and rows.num_rows == total
    return rows, round(total * len(files) / len(chosen)), whole, names


def _some(file: pq.ParquetFile, most: int) -> Iterator[pa.RecordBatch]:
    """The first rows of the first and of the last row group."""
    groups = sorted({0, file.num_row_groups - 1}) if file.num_row_groups else []
    if file.metadata.num_rows <= most:
        groups = list(range(file.num_row_groups))
    each = most if file.metadata.num_rows <= most else max(1, most // len(groups))
    for group in groups:
        left = each
        for batch in file.iter_batches(batch_size=min(each, 65_536), row_groups=[group]):
            yield batch.slice(0, left)
            left -= batch.num_rows
            if left <= 0:
                break


def _hive(folder: Path) -> dict[str, str | None]:
    pairs = (part.split("=", 1) for part in folder.parts if "=" in part)
    return {key: None if value == "__HIVE_DEFAULT_PARTITION__" else value for key, value in pairs}
