"""Samples of folders and tables for `headrace init`: the first rows of some of their files."""

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
from headrace.lake.delta.log import DeltaLog, check_listable
from headrace.lake.tables.iceberg_metadata import newest_metadata, snapshot_files
from headrace.storage import Location

#: Most rows of a sample, and most files that it reads.
SAMPLE_ROWS, SAMPLE_FILES = 200_000, 8
_DELETED_NOTE = "Rows that are deleted are among those looked at, and among none that are read."


@dataclass(frozen=True)
class TableSample:
    """Sample of a table's rows, and the table's size and partitions."""

    rows: pa.Table
    #: Number of rows in the table, estimated where not all files were read; and whether `rows` are all of them.
    total: int
    is_complete: bool
    #: Names of partition columns.
    partitions: tuple[str, ...]
    #: Notes for the user.
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
    return _sample_files([_File(f, format_, _hive(PurePosixPath(f.below(root)).parent)) for f in files])


def delta_rows(folder: Location) -> TableSample:
    """Sample the rows of the newest version of a Delta table, from its log's files.

    Raises:
        UserError: headrace cannot read the table, or it is empty.
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
    sample = _sample_files(sorted(entries, key=_partition_order), names.rename if is_mapped else None)
    return _with_deleted(sample, sum(f.deleted for f in files))


def iceberg_rows(folder: Location) -> TableSample:
    """Sample the rows of the newest snapshot of an Iceberg table, from its manifests' files.

    Raises:
        UserError: headrace cannot read the table, only its catalog knows it, or it is empty.
    """
    metadata = newest_metadata(folder / "metadata")
    files = [] if metadata.current is None else snapshot_files(metadata, metadata.current)
    if metadata.current is None or not files:
        raise UserError(f"{folder}: its newest snapshot has no files to look at")
    schema = metadata.schema(metadata.current)
    name_by_id = {int(f["id"]): f["name"] for f in schema["fields"]}
    entries = []
    for f in files:
        partition = {name_by_id[k]: None if v is None else str(v) for k, v in f.partition.items() if k in name_by_id}
        entries.append(_File(f.path, f.format, partition))  # type: ignore[arg-type]
    sample = _sample_files(sorted(entries, key=_partition_order), StoredNames.of_iceberg(schema).rename)
    return _with_deleted(sample, None if any(f.deletes for f in files) else 0)


def _partition_order(file: _File) -> list[tuple[str, bool, str]]:
    """Sort key of files by their partition's values, null first."""
    return sorted((name, value is not None, value or "") for name, value in file.partition.items())


def _with_deleted(sample: TableSample, deleted: int | None) -> TableSample:
    """Return the sample with `deleted` rows subtracted from the total and a note; None: their number is unknown."""
    if deleted == 0:
        return sample
    total = sample.total - (deleted or 0)
    return TableSample(sample.rows, total, False, sample.partitions, (*sample.notes, _DELETED_NOTE))


def _sample_files(files: Sequence[_File], rename: Callable[[pa.Table], pa.Table] | None = None) -> TableSample:
    names = list(dict.fromkeys(k for f in files for k in f.partition))
    sampled_files = list(files)
    if len(files) > SAMPLE_FILES:
        step = (len(files) - 1) / (SAMPLE_FILES - 1)
        sampled_files = [files[round(i * step)] for i in range(SAMPLE_FILES)]
    tables, total = [], 0
    for file in sampled_files:
        table, rows_of_file = file_rows(file.path, file.format, SAMPLE_ROWS // len(sampled_files))
        total += rows_of_file
        if rename is not None:
            table = rename(table)
        # Files of Iceberg already have their partition columns; those of Delta and Hive do not.
        for name in (n for n in names if n not in table.column_names):
            table = table.append_column(name, pa.array([file.partition.get(name)] * table.num_rows, pa.string()))
        tables.append(table)
    try:
        # Older files of a table may have narrower types than the table has today.
        rows = pa.concat_tables(tables, promote_options="default" if rename is None else "permissive")
    except pa.ArrowException as e:
        raise UserError(f"the files' columns do not fit each other: {' '.join(str(e).split())[:200]}") from None
    if not rows.num_rows:
        raise UserError("no rows to look at")
    is_complete = len(sampled_files) == len(files) and rows.num_rows == total
    return TableSample(rows, round(total * len(files) / len(sampled_files)), is_complete, tuple(names))


def _hive(folder: PurePosixPath) -> dict[str, str | None]:
    pairs: list[Any] = [part.split("=", 1) for part in folder.parts if "=" in part]
    return {key: None if value == "__HIVE_DEFAULT_PARTITION__" else value for key, value in pairs}
