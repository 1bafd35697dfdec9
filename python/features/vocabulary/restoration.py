"""Rows of a vocabulary table that a power cut or a bad disk took, made again from saved workflows.

A code is given once: datasets and models of many days hold it. So lost rows are not counted anew, they are read from
the vocabularies that each dataset and each model has beside it. Rows that none of them has were in use nowhere; where
these are the last codes of their vocabulary, the next fit gives them again. Where they are not, nothing is changed.

The new file takes the place of the damaged one in the newest version, and in older ones that manifests pin
(headrace.lake.delta.log_files).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.compute import pc
from headrace.errors import UserError
from headrace.lake.delta.data_files import data_file
from headrace.lake.delta.log import DeltaLog, file_path
from headrace.lake.delta.log_files import Replacement, replacements, save_replacements
from headrace.lake.delta.transaction import Transaction
from headrace.storage import Fence, Location, not_as_written

_LOST = pa.schema([("name", pa.string()), ("value", pa.string()), ("code", pa.int64()), ("added_ds", pa.string())])


@dataclass(frozen=True)
class SavedCopies:
    """Copies of a pipeline's codes in its datasets and models."""

    #: The newest version of the table that a manifest names; None: no manifest names one.
    version: int | None
    #: (day, name of the vocabulary, its table (value, code)) of all datasets and models, the oldest day first.
    vocabularies: Callable[[], Iterable[tuple[str, str, pa.Table]]]


@dataclass
class Damage:
    """Files and commits that a version of a vocabulary table has lost."""

    table: Location
    #: The `add` actions of data files that are short or gone.
    adds: list[Mapping[str, Any]] = field(default_factory=list)
    #: Undamaged files of the version.
    intact_files: list[Location] = field(default_factory=list)
    #: Why: names the first file with both sizes, or the version that the log lacks.
    reason: str = ""
    #: Whether commits that a manifest names are not in the log.
    commits: bool = False

    @property
    def rows(self) -> int | None:
        """Rows that are lost; None where commits are, or where a file has no statistics."""
        counts = [_statistics(add)["numRecords"] for add in self.adds]
        return None if self.commits or None in counts else sum(counts)

    @property
    def days(self) -> list[tuple[str, str]]:
        """For each damaged file the first and the last day whose fits gave its codes."""
        statistics = [_statistics(add) for add in self.adds]
        return [(s["minValues"]["added_ds"], s["maxValues"]["added_ds"]) for s in statistics]


def damage_of(table: Location, version: int | None, named: int | None) -> Damage | None:
    """Return what a version lacks, or None where it is whole. Data files are compared on local disks alone.

    Args:
        table: folder of the vocabulary table.
        version: that is read; None: the newest.
        named: newest version that a manifest names.
    """
    log = DeltaLog(table)
    newest = log.version
    damage = Damage(table)
    if named is not None and (newest is None or newest < named):
        damage.commits = True
        damage.reason = f"version {named} of {table} is gone"
    read_version = newest if version is None or newest is None else min(version, newest)
    if table.scheme != "file" or read_version is None:
        return damage if damage.commits else None
    state = log.state(read_version, current=False)
    if state is None:
        return damage if damage.commits else None
    # Of older versions a file that was damaged before has another one in its place.
    replaced = {} if read_version == newest else replacements(table)
    for add in state.adds:
        add = replaced[add["path"]].add if add["path"] in replaced else add
        file = file_path(table, add["path"])
        if (reason := not_as_written({file: add["size"]})) is None:
            damage.intact_files.append(file)
        else:
            damage.adds.append(add)
            damage.reason = damage.reason or reason
    return damage if damage.adds or damage.commits else None


def lost_rows(damage: Damage, copies: SavedCopies, first_codes: Mapping[str, int]) -> pa.Table:
    """Return the rows (name, value, code, added_ds) that a table lacks and saved workflows have, in order of code.

    `added_ds` is the day of the damaged file, or the first day whose workflow has the code.

    Args:
        damage: of the table.
        copies: the saved workflows.
        first_codes: by vocabulary, the code with which it begins.

    Raises:
        UserError: codes between others are nowhere, or workflows have more than the damaged files had.
    """
    known = _known_codes(damage.intact_files)
    days = damage.days
    first = min((low for low, _ in days), default="")
    rows: list[pa.Table] = []
    for ds, name, vocabulary in copies.vocabularies():
        if damage.rows is not None and sum(t.num_rows for t in rows) >= damage.rows:
            break
        if ds < first:
            continue
        codes = vocabulary.column("code").to_numpy()
        known_codes = known.get(name, np.empty(0, np.int64))
        missing = vocabulary.filter(pa.array(np.isin(codes, known_codes, invert=True)))
        if missing.num_rows:
            known[name] = np.union1d(known_codes, codes)
            rows.append(_as_lost(name, missing, ds))
    lost = pa.concat_tables(rows) if rows else _LOST.empty_table()
    fitted_days = {day for pair in days for day in pair}
    if len(fitted_days) == 1 and not damage.commits:
        lost = lost.set_column(3, "added_ds", pa.repeat(fitted_days.pop(), lost.num_rows))
    _check(damage, lost, known, first_codes)
    return lost.sort_by([("name", "ascending"), ("code", "ascending")])


def restore_rows(damage: Damage, rows: pa.Table, fence: Fence | None) -> None:
    """Put rows (with the columns of the table) in the places of the damaged files, in one commit that changes no row.

    Raises:
        TransactionOvertaken: another writer has changed these files meanwhile.
        LeaseLost: a later holder has committed.
    """
    table = damage.table
    transaction = Transaction(table, fence=fence)
    live = {str(add["path"]) for add in transaction.adds}
    previous_record = replacements(table)
    record = dict(previous_record)
    new_adds: list[Mapping[str, Any]] = []
    for add, part in zip(damage.adds, _by_file(damage, rows), strict=True):
        new_add = data_file(table, part) | {"dataChange": False}
        new_adds.append(new_add)
        record[str(add["path"])] = Replacement(new_add, 0)
    # First the record: a process that is killed before its commit finds the damage again.
    save_replacements(table, record, previous_record)
    if live_paths := [str(add["path"]) for add in damage.adds if str(add["path"]) in live]:
        transaction.join(live_paths, new_adds)
    for add in damage.adds:
        file_path(table, add["path"]).remove()


def _by_file(damage: Damage, rows: pa.Table) -> Iterable[pa.Table]:
    """Split rows into those of each damaged file: by day; of files of one day the first has all, the others none.

    Where a file has codes of several days (it joined others), the first file has the rows of all.
    """
    days = damage.days
    if any(low != high for low, high in days) or damage.commits:
        return [rows, *(rows.slice(0, 0) for _ in days[1:])]
    days_done: set[str] = set()
    parts = []
    for day, _ in days:
        parts.append(rows.slice(0, 0) if day in days_done else rows.filter(pc.equal(rows.column("added_ds"), day)))
        days_done.add(day)
    return parts


def _check(
    damage: Damage, lost: pa.Table, known: Mapping[str, npt.NDArray[np.int64]], first_codes: Mapping[str, int]
) -> None:
    """Raise UserError where rows are missing before others, or a day has more than its damaged files had."""
    refused = (
        f"{damage.reason}: {damage.table} is damaged, and the datasets and models of the pipeline do not have all of "
        f"its codes"
    )
    if any(add.get("deletionVector") for add in damage.adds):
        raise UserError(f"{damage.reason}: {damage.table} is damaged, and rows of the file were deleted. Put it back")
    for name, codes in known.items():
        first = min(first_codes.get(name, int(codes.min())), int(codes.min()))
        gap = int(codes.max()) - first + 1 - len(codes)
        if gap:
            raise UserError(f"{refused}: {gap:,} of the vocabulary '{name}' are gone. Put it back from a backup")
    if damage.rows is None:
        return
    days = damage.days
    allowed: dict[str, int] = {}
    if all(low == high for low, high in days):
        for (day, _), add in zip(days, damage.adds, strict=True):
            allowed[day] = allowed.get(day, 0) + int(_statistics(add)["numRecords"])
    for each in pc.value_counts(lost.column("added_ds")).to_pylist():
        most = allowed.get(each["values"], 0) if allowed else damage.rows
        if each["counts"] > most:
            raise UserError(
                f"{refused}: they have {each['counts']:,} of {each['values']} where it had {most:,}. Put it back from "
                f"a backup"
            )


def _known_codes(files: Collection[Location]) -> dict[str, npt.NDArray[np.int64]]:
    """Return the codes of each vocabulary in data files of the table, ascending."""
    tables = [pq.ParquetFile(f.local_path()).read(["name", "code"]) for f in files]
    if not tables:
        return {}
    rows = pa.concat_tables(tables)
    codes_of = {}
    for name in pc.unique(rows.column("name")).to_pylist():
        codes = rows.filter(pc.equal(rows.column("name"), name)).column("code")
        codes_of[name] = np.unique(codes.to_numpy())
    return codes_of


def _as_lost(name: str, rows: pa.Table, ds: str) -> pa.Table:
    columns = [pa.repeat(name, rows.num_rows), rows.column("value"), rows.column("code"), pa.repeat(ds, rows.num_rows)]
    return pa.table(columns, names=_LOST.names).cast(_LOST)


def _statistics(add: Mapping[str, Any]) -> dict[str, Any]:
    statistics: dict[str, Any] = json.loads(add["stats"]) if add.get("stats") else {}
    return {"numRecords": None, "minValues": {"added_ds": ""}, "maxValues": {"added_ds": "9999-12-31"}} | statistics
