"""Small files of a Delta table: which partitions have many, and the commit that joins them and changes no row.

The commits of Delta's OPTIMIZE carry no token of a lease, and an overwrite by Spark brings back rows that others delete
between its read and its commit. So files are read and written without Spark, in bounded memory: row group by row group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.lake.delta.data_files import rewritten_file, schema_of
from headrace.lake.delta.deletion_vectors import live_row_groups
from headrace.lake.delta.log import DeltaLog, TableState, check_files, file_path
from headrace.lake.delta.transaction import Transaction, TransactionOvertaken
from headrace.storage import Fence, LeaseLost, Location

#: Target size of a compacted file, in bytes: that of Delta's OPTIMIZE.
_FILE_BYTES = 1 << 30
#: Target size of its row groups, in bytes.
_GROUP_BYTES = 128 << 20
#: Column name that Delta reserves for its change data feed.
_CHANGE_TYPE = "_change_type"
#: Most tries, where other writers change the day's files meanwhile.
_ATTEMPTS = 10


def join_files(table: Location, days: Sequence[str | None], size: float, fence: Fence | None) -> None:
    """Join the small files of some days, one commit a day. Rows stay the same, and so do older versions of the table.

    Rows that deletion vectors hide are in none of the new files. A file whose columns no other one's are stays as it
    is. Where others remove a file or mark rows of it meanwhile, the day is joined again from the newest version.

    Args:
        table: its folder.
        days: partitions `ds`; None: the whole table.
        size: bytes; files with as many stay.
        fence: of the holder of the lease under which the table is written.

    Raises:
        UserError: the table uses features that headrace does not write, a file is damaged, or other writers change
            these files again and again.
        LeaseLost: a later holder has committed; nothing was committed since.
    """
    for day in days:
        for attempt in range(_ATTEMPTS):
            try:
                _join_day(table, day, size, fence)
                break
            except TransactionOvertaken:
                if attempt == _ATTEMPTS - 1:
                    raise


def _join_day(table: Location, day: str | None, size: float, fence: Fence | None) -> None:
    transaction = Transaction(table, fence=fence)
    small = [add for add in transaction.adds if add["size"] < size and day in (None, _day(add))]
    check_files(table, TableState(small, {}, {}).data_files(table))
    joined: list[Mapping[str, Any]] = []
    replaced: list[str] = []
    try:
        for files in _alike(table, small):
            joined.append(_joined(table, files))
            replaced += [str(file["path"]) for file in files]
        if replaced:
            transaction.join(replaced, joined)
    except (TransactionOvertaken, LeaseLost):
        # No commit names the new files.
        for add in joined:
            file_path(table, str(add["path"])).remove()
        raise


def _alike(table: Location, adds: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Files that can be one: of the same partition and columns, in order, at least two, not too large together."""
    groups: list[tuple[dict[str, Any], pa.Schema, list[Mapping[str, Any]]]] = []
    for add in sorted(adds, key=lambda add: (add["modificationTime"], str(add["path"]))):
        partition, schema = dict(add["partitionValues"] or {}), _joined_schema(_opened(table, add))
        for values, columns, files in groups:
            joined_size = sum(file["size"] for file in files) + add["size"]
            if values == partition and columns.equals(schema) and joined_size <= _FILE_BYTES:
                files.append(add)
                break
        else:
            groups.append((partition, schema, [add]))
    yield from (files for _, _, files in groups if len(files) > 1)


def _joined(table: Location, adds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write the rows of some files into one, beside the first. No commit names it yet. Return its `add` action."""
    first = _opened(table, adds[0])
    schema = _joined_schema(first)
    with rewritten_file(table, adds[0], first, schema) as out:
        for rows in _large_groups(table, adds, schema):
            out.write(rows)
    return out.add_action(dict(adds[0]["partitionValues"] or {}), data_change=False)


def _large_groups(table: Location, adds: Sequence[Mapping[str, Any]], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows of files in the schema of all (see `_joined_schema`), several small row groups at once."""
    some: list[pa.Table] = []
    for add in adds:
        for rows in live_row_groups(table, add, _opened(table, add)):
            # Arrow reads 96-bit times without a zone: cast them, so that they fit those of 64 bits.
            if rows.num_rows:
                some.append(rows.select(schema.names).cast(schema))
            if sum(rows.nbytes for rows in some) >= _GROUP_BYTES:
                yield pa.concat_tables(some)
                some = []
    if some:
        yield pa.concat_tables(some)


def _opened(table: Location, add: Mapping[str, Any]) -> pq.ParquetFile:
    return pq.ParquetFile(file_path(table, str(add["path"])).local_path(), coerce_int96_timestamp_unit="us")


def _joined_schema(parquet: pq.ParquetFile) -> pa.Schema:
    """Return a file's columns, all of which may be null, without the one that Spark adds when it records changes.

    A file that DELETE has rewritten has that column, which is null in each row, and forgets which columns never are.
    """
    return pa.schema([c.with_nullable(True) for c in schema_of(parquet) if c.name != _CHANGE_TYPE])


def _day(add: Mapping[str, Any]) -> str | None:
    return dict(add["partitionValues"] or {}).get("ds")


def crowded(table: Location, files: int, size: float) -> tuple[list[str | None], int]:
    """Return the partitions `ds` with at least so many files that are smaller than a size; and the bytes of these
    files.

    Args:
        table: its folder.
        files: how many.
        size: bytes.

    Returns:
        Days, [None] of a table without partitions; empty where there is no such partition, or the table has others.
    """
    log = DeltaLog(table)
    version = log.version
    state = log.state(version) if version is not None else None
    partitioned = list((state.metadata.get("partitionColumns") if state else None) or [])
    if state is None or partitioned not in ([], ["ds"]):
        return [], 0
    sizes_of_day: dict[str | None, list[int]] = {}
    for add in state.adds:
        if add["size"] < size:
            sizes_of_day.setdefault(_day(add), []).append(add["size"])
    many = {ds: sizes for ds, sizes in sizes_of_day.items() if len(sizes) >= files}
    return sorted(many, key=str), sum(sum(sizes) for sizes in many.values())
