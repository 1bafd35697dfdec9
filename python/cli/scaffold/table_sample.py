"""Samples of the rows of folders and tables, for `headrace init`: the first rows of some files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa

from headrace.cli.scaffold.file_rows import FileFormat, file_rows
from headrace.cli.scaffold.stored_names import StoredNames
from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.protocol import check_listable
from headrace.lake.tables.iceberg_metadata import newest_metadata, snapshot_files
from headrace.storage import Location

#: Rows that are looked at, and the files that they are from.
SAMPLE_ROWS, SAMPLE_FILES = 200_000, 8
_DELETED = "Rows that are deleted are among those looked at, and among none that are read."


@dataclass(frozen=True)
class TableSample:
    """Sample of a table's rows, and what was seen of the rest."""

    rows: pa.Table
    #: All rows there are, and whether `rows` are these.
    total: int
    is_complete: bool
    #: Names of partition columns.
    partitions: tuple[str, ...]
    #: What a person should know.
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _File:
    path: Location
    format: FileFormat
    partition: Mapping[str, str | None]


def folder_rows(files: Sequence[Location], root: Location, format_: FileFormat) -> TableSample:
    """Sample the rows of a folder of data files; `key=value` folders are columns of text.

    Raises:
        UserError: a file cannot be read in this format.
    """
    return _rows([_File(f, format_, _hive(PurePosixPath(f.below(root)).parent)) for f in files])


def delta_rows(folder: Location) -> TableSample:
    """Sample the rows of the newest version of a Delta table, from its log's files.

    Raises:
        UserError: a table that headrace does not read, or an empty one.
    """
    log = DeltaLog(folder)
    version = log.version
    state = None if version is None else log.state(version)
    if state is None or not state.adds:
        raise UserError(f"{folder}: its newest version has no files to look at")
    check_listable(folder, state.protocol)
    names = StoredNames.of_delta(json.loads(state.metadata["schemaString"]))
    files = state.data_files(folder)
    entries = [
        _File(
            f.path, "parquet", {names.columns[k].name if k in names.columns else k: v for k, v in f.partition.items()}
        )
        for f in files
    ]
    is_mapped = state.configuration.get("delta.columnMapping.mode", "none") != "none"
    sampled = _rows(sorted(entries, key=_partition_order), names.rename if is_mapped else None)
    return _with_deleted(sampled, sum(f.deleted for f in files))


def iceberg_rows(folder: Location) -> TableSample:
    """Sample the rows of the newest snapshot of an Iceberg table, from its manifests' files.

    Raises:
        UserError: a table that headrace does not read, one that its catalog alone knows, or an empty one.
    """
    metadata = newest_metadata(folder / "metadata")
    files = [] if metadata.current is None else snapshot_files(metadata, metadata.current)
    if metadata.current is None or not files:
        raise UserError(f"{folder}: its newest snapshot has no files to look at")
    schema = metadata.schema(metadata.current)
    of_id = {int(f["id"]): f["name"] for f in schema["fields"]}
    entries = []
    for f in files:
        partition = {of_id[k]: None if v is None else str(v) for k, v in f.partition.items() if k in of_id}
        entries.append(_File(f.path, f.format, partition))  # type: ignore[arg-type]
    sampled = _rows(sorted(entries, key=_partition_order), StoredNames.of_iceberg(schema).rename)
    return _with_deleted(sampled, None if any(f.deletes for f in files) else 0)


def _partition_order(file: _File) -> list[tuple[str, bool, str]]:
    """Sort key of files by their partition's values, null first."""
    return sorted((name, value is not None, value or "") for name, value in file.partition.items())


def _with_deleted(sampled: TableSample, deleted: int | None) -> TableSample:
    """Return the rows of a table with some marked as deleted; None: their number is unknown."""
    if deleted == 0:
        return sampled
    total = sampled.total - (deleted or 0)
    return TableSample(sampled.rows, total, False, sampled.partitions, (*sampled.notes, _DELETED))


def _rows(files: Sequence[_File], rename: Callable[[pa.Table], pa.Table] | None = None) -> TableSample:
    names = list(dict.fromkeys(k for f in files for k in f.partition))
    chosen = list(files)
    if len(files) > SAMPLE_FILES:
        step = (len(files) - 1) / (SAMPLE_FILES - 1)
        chosen = [files[round(i * step)] for i in range(SAMPLE_FILES)]
    tables, total = [], 0
    for file in chosen:
        table, rows_of_file = file_rows(file.path, file.format, SAMPLE_ROWS // len(chosen))
        total += rows_of_file
        if rename is not None:
            table = rename(table)
        # Iceberg's files have their partition columns.
        for name in (n for n in names if n not in table.column_names):
            table = table.append_column(name, pa.array([file.partition.get(name)] * table.num_rows, pa.string()))
        tables.append(table)
    try:
        # Of a table the types of files may be narrower than today's.
        rows = pa.concat_tables(tables, promote_options="default" if rename is None else "permissive")
    except pa.ArrowException as e:
        raise UserError(f"the files' columns do not fit each other: {' '.join(str(e).split())[:200]}") from None
    if not rows.num_rows:
        raise UserError("no rows to look at")
    is_complete = len(chosen) == len(files) and rows.num_rows == total
    return TableSample(rows, round(total * len(files) / len(chosen)), is_complete, tuple(names))


def _hive(folder: PurePosixPath) -> dict[str, str | None]:
    pairs: list[Any] = [part.split("=", 1) for part in folder.parts if "=" in part]
    return {key: None if value == "__HIVE_DEFAULT_PARTITION__" else value for key, value in pairs}
