"""Rows that go from a Delta table for good: from its newest version, from older ones, from its log.

    erase(table, change, redact, request)

Each data file that has such rows, of whatever version, is written again without them; a record says which file is in
whose place (headrace.lake.delta.log_files), one commit makes the newest version of them, and the old files are removed.
A process may be killed between any two of these: called again, it goes on. Without Spark, and in bounded memory: a file
is read row group by row group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.errors import UserError
from headrace.lake.delta.data_files import rewritten_file, row_groups, schema_of
from headrace.lake.delta.deletion_vectors import live_row_groups
from headrace.lake.delta.log import DeltaLog, file_path
from headrace.lake.delta.log_files import (
    Replacement,
    complete_checkpoints,
    erasure_text,
    replacements,
    save_replacements,
)
from headrace.lake.delta.redact import remove_checksum
from headrace.lake.delta.transaction import Transaction, TransactionOvertaken, claim
from headrace.storage import Fence, LeaseLost, Location

_LOG = "_delta_log"
#: Most tries, where other writers change the table meanwhile.
_ATTEMPTS = 10


@dataclass(frozen=True)
class Change:
    """A function of the rows of a table that removes or changes some of them."""

    #: The columns that it reads; a file without any of them keeps all rows.
    columns: tuple[str, ...]
    #: Returns rows of a file without those to erase, and the number of erased or changed ones. Also takes the columns
    #: alone.
    apply: Callable[[pa.Table], tuple[pa.Table, int]]


@dataclass
class Erased:
    """Counts of the rows and files that were erased from a table."""

    #: Rows of the newest version that were erased or changed.
    rows: int = 0
    #: Files of the newest version that were rewritten.
    rewritten: int = 0
    #: Removed files, of the newest and of older versions.
    removed: int = 0
    #: Bytes of the removed files.
    size: int = 0
    #: Messages: work that could not be done, and how to do it.
    left: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rows or self.rewritten or self.removed or self.left)


def erase(table: Location, change: Change, request: str, delete: bool, fence: Fence | None = None) -> Erased:
    """Take rows from a table and from all of its history that is on the disk.

    The commit rests on the version whose files were read: where another writer has added rows, removed a file or
    marked rows of it since, all is looked at again from the newest version.

    Args:
        table: its folder.
        change: what becomes of rows; applied to its own result it changes nothing.
        request: noted in the commit.
        delete: do it; else what would be done is counted.
        fence: of the holder of the lease under which the table is written.

    Raises:
        UserError: a table that headrace does not read or write, or that another writer changes again and again.
        LeaseLost: a later holder has committed, or rewrites files now; nothing was removed.
    """
    if delete:
        # Files that no commit names are removed, too: after the claim, no earlier holder can commit them.
        claim(table, fence)
    counts: dict[Location, tuple[int, int]] = {}
    for attempt in range(_ATTEMPTS):
        try:
            return _erase(table, change, request, delete, fence, counts)
        except TransactionOvertaken:
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("every attempt returns or raises")


def _erase(
    table: Location,
    change: Change,
    request: str,
    delete: bool,
    fence: Fence | None,
    counts: dict[Location, tuple[int, int]],
) -> Erased:
    """Erase at one version, as `erase` does. `counts`: rows to remove of files that an earlier attempt has read (see
    `_touched`).
    """
    log, result = DeltaLog(table), Erased()
    newest = log.version
    state = log.state(newest, current=False) if newest is not None else None
    if newest is None or state is None:
        return result
    log.check()
    instead = replacements(table)
    recorded = dict(instead)
    known = {**_known_adds(log, newest), **{str(r.add["path"]): r.add for r in instead.values()}}
    live = {str(add["path"]): add for add in state.adds}
    changed: list[str] = []
    old: list[Location] = []
    path_of = {file_path(table, path): path for path in known}
    for file in table.files():
        if file.below(table).split("/", 1)[0] == _LOG or file.suffix != ".parquet":
            continue
        path = path_of.get(file)
        done = instead.get(path) if path is not None else None
        add = live.get(path) if path is not None else None
        try:
            if file not in counts or (add is not None and add.get("deletionVector")):
                counts[file] = _touched(table, file, {} if add is None else add, change)
        except pa.ArrowInvalid:
            result.left.append(f"{file} cannot be read: restore it, or remove it where no version of the table has it")
            continue
        rows, live_rows = counts[file]
        if done is None and not rows:
            continue
        if delete and done is None and path is not None:
            done = instead[path] = _written(table, file, _without_vector(known[path]), change)
        old.append(file)
        result.size += file.size()
        result.removed += 1
        if add is not None:
            result.rewritten += 1
            result.rows += live_rows
            assert path is not None
            changed.append(path)
    if delete and old:
        # After a kill before the commit, a replacement may itself have rows to erase.
        instead = _flattened(instead)
        save_replacements(table, instead, recorded)
        if changed:
            _commit(table, newest, live, {path: instead[path].add for path in changed}, change, request, old, fence)
        for file in old:
            remove_checksum(file)
            file.remove()
    return result


def _commit(
    table: Location,
    version: int,
    live: Mapping[str, Mapping[str, Any]],
    new: Mapping[str, Mapping[str, Any]],
    change: Change,
    request: str,
    old: Collection[Location],
    fence: Fence | None,
) -> None:
    """Make the next version after the one that was read, of files that were written again.

    `new`: by the path of the live file that each replaces. Of one with a deletion vector the record's file, which is
    for versions before the vector, has rows that the vector hides: the newest version gets another one.
    """
    transaction = Transaction(table, version, fence)
    newest_files: dict[str, Mapping[str, Any]] = {}
    try:
        for path in new:
            if live[path].get("deletionVector"):
                newest_files[path] = _written(table, file_path(table, path), live[path], change).add
        by_day: dict[str, int] = {}
        swaps = {path: newest_files.get(path, add) for path, add in new.items()}
        for path, add in swaps.items():
            day = str(dict(live[path]["partitionValues"] or {}).get("ds"))
            by_day[day] = by_day.get(day, 0) + _rows_of(live[path]) - _rows_of(add)
        rows = {path: add if _rows_of(add) else None for path, add in swaps.items()}
        transaction.rewrite(rows, erasure_text(request, by_day), old)
    except (TransactionOvertaken, LeaseLost):
        # No commit names the new files.
        for add in newest_files.values():
            file_path(table, str(add["path"])).remove()
        raise


def _without_vector(add: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in add.items() if key != "deletionVector"}


def _known_adds(log: DeltaLog, newest: int) -> dict[str, Mapping[str, Any]]:
    """Return by path the `add` actions of all versions that the log has."""
    adds: dict[str, Mapping[str, Any]] = {}
    versions = log.versions()
    if len(versions) != newest + 1:
        # A checkpoint still names files of commits that were cleaned up, even files that a later commit removed.
        for checkpoint in complete_checkpoints(log.folder / _LOG):
            adds |= {str(action["add"]["path"]): action["add"] for action in checkpoint.actions("add")}
    for version in sorted(versions):
        for action in log.actions(version):
            if "add" in action:
                adds[str(action["add"]["path"])] = action["add"]
    state = log.state(newest, current=False)
    return {**adds, **{str(add["path"]): add for add in (state.adds if state else ())}}


def _touched(table: Location, file: Location, add: Mapping[str, Any], change: Change) -> tuple[int, int]:
    """Rows of a file that go or change: all, and those that the deletion vector of its `add` action does not hide."""
    parquet = _opened(file)
    columns = [c for c in change.columns if c in parquet.schema_arrow.names]
    if not columns:
        return 0, 0
    rows = sum(change.apply(rows)[1] for rows in row_groups(parquet, columns))
    if not rows or not add.get("deletionVector"):
        return rows, rows
    return rows, sum(change.apply(rows)[1] for rows in live_row_groups(table, add, parquet, columns))


def _opened(file: Location) -> pq.ParquetFile:
    return pq.ParquetFile(file.local_path(), coerce_int96_timestamp_unit="us")


def _written(table: Location, file: Location, add: Mapping[str, Any], change: Change) -> Replacement:
    """Write the live rows of a file again, beside the old one. Nothing names the new one yet."""
    parquet = _opened(file)
    schema, removed = schema_of(parquet), 0
    with rewritten_file(table, add, parquet, schema) as out:
        for rows in live_row_groups(table, add, parquet):
            changed, _ = change.apply(rows)
            removed += rows.num_rows - changed.num_rows
            if changed.num_rows:
                out.write(changed.cast(schema))
    return Replacement(out.add_action(dict(add["partitionValues"] or {})), removed)


def _rows_of(add: Mapping[str, Any]) -> int:
    """Live rows by the statistics, which all files have that headrace or Spark has written."""

    stats = json.loads(add["stats"]) if add.get("stats") else {}
    if "numRecords" not in stats:
        raise UserError(f"{add['path']} has no statistics in the table's log: run OPTIMIZE on the table first")
    return int(stats["numRecords"]) - int((add.get("deletionVector") or {}).get("cardinality") or 0)


def _flattened(record: Mapping[str, Replacement]) -> dict[str, Replacement]:
    """Return the record with chains shortened: a file that was replaced twice names its last replacement."""
    flat = dict(record)
    for path, replacement in record.items():
        while (after := flat.get(str(replacement.add["path"]))) is not None:
            replacement = Replacement(after.add, replacement.rows + after.rows)
        flat[path] = replacement
    return flat
