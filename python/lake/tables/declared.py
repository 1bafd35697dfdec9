"""Rows of a source table as the spec declares them, and the days that a manifest of ingest pins.

Columns have the declared names and types, each row its day and identity. Every later stage reads the pinned days.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Table, TableSource
from headrace.config.schema import TableColumn, quoted_names
from headrace.errors import UserError
from headrace.lake.delta.with_spark import read_version
from headrace.lake.faults import a_type, kind_unreadable
from headrace.lake.forgotten import ForgottenValues
from headrace.lake.tables.days import day_column
from headrace.lake.tables.folder import FolderSnapshot
from headrace.lake.tables.opened import open_table
from headrace.lake.tables.parquet import arrow_reads
from headrace.lake.tables.snapshot import FILE, LINE, Snapshot, StoredRows, TableFile, TablePlace, files_of
from headrace.lake.values import AmbiguousColumn, Extracted, extract
from headrace.storage import Location

#: Column of `table_rows` with the faults of values that cannot be read as declared.
FAULTS = "__faults"
_FAULTS_TYPE = "array<struct<kind string, reason string>>"
#: Characters of a value that a reason quotes.
_VALUE_CHARACTERS = 100


@dataclass(frozen=True)
class StoredColumns:
    """Declared columns as the table stores them."""

    #: Declared columns that the table lacks.
    missing: frozenset[str]
    #: Whether rows have a file and a position in it; else their keys identify them.
    positions: bool
    #: All its columns, name to type; of files that differ, all of their types.
    types: Mapping[str, str]
    #: Declared columns whose stored type is the declared one in all files that have them.
    exact: frozenset[str]


def table_rows(
    spark: SparkSession,
    snapshot: Snapshot,
    table: Table,
    source: TableSource,
    days: Collection[str],
    ds: str,
    forgotten: ForgottenValues | None = None,
) -> tuple[DataFrame, StoredColumns]:
    """Return the rows of some days.

    Args:
        spark: the session.
        snapshot: of the table.
        table: declares columns and keys.
        source: says what a day is.
        days: all others are left out; of a table without days, the one day that all its rows are of.
        ds: of the run.
        forgotten: values of declared columns whose rows are left out.

    Returns:
        the declared columns (null where the table lacks one), `_source_file`, `_source_line`, `ds`, and FAULTS
        (array<struct<kind string, reason string>>): values that cannot be read as declared, null here; and how the
        columns are stored.

    Raises:
        UserError: a column has a type that cannot be read as declared; rows have no identity.
    """
    parts = snapshot.stored_rows(spark, days if source.daily else None, _needed(table, source))
    extracted = _extracted(parts, table, source)
    positions = all(FILE in part.frame.columns for part in parts)
    types: dict[str, set[str]] = {}
    for part in parts:
        for name, type_ in part.types.items():
            types.setdefault(name, set()).add(type_)
    stored = StoredColumns(
        frozenset(c.name for c in table.columns if all(columns[c.name] is None for columns in extracted)),
        positions,
        {name: " or ".join(sorted(columns)) for name, columns in types.items()},
        frozenset(c.name for c in table.columns if _is_exact(c, parts, extracted)),
    )
    each = [
        _declared_rows(part, columns, table, source, ds, positions)
        for part, columns in zip(parts, extracted, strict=True)
    ]
    rows = reduce(DataFrame.union, each)
    for name in forgotten.columns if forgotten is not None else ():
        assert forgotten is not None
        rows = rows.where(~forgotten.spark(name, F.col(quoted_names([name])[0])))
    return (rows.where(F.col("ds").isin(sorted(days))) if source.daily else rows), stored


def _needed(table: Table, source: TableSource) -> list[tuple[str, ...]]:
    """Return the paths that are read of a row: the declared columns, and the column that says its day."""
    days = () if source.day is None else (*source.day.partitions, *filter(None, [source.day.time]))
    return [*(c.steps for c in table.columns), *((name,) for name in days)]


def _declared_rows(
    part: StoredRows,
    extracted: Mapping[str, Extracted | None],
    table: Table,
    source: TableSource,
    ds: str,
    positions: bool,
) -> DataFrame:
    declared, faults = [], []
    for column in table.columns:
        value_of = extracted[column.name]
        value = F.lit(None).cast(column.stored_type) if value_of is None else value_of.value
        declared.append(value.alias(column.name))
        if value_of is not None and (
            column.path is not None or value_of.checked or part.types.get(column.name) != column.type
        ):
            faults.append(_fault(column, value_of))
    day = day_column(part, source) if source.daily else F.lit(ds)
    place = [F.col(FILE), F.col(LINE)] if positions else _by_keys(table, source, extracted)
    wrong = F.array_compact(F.array(*faults)) if faults else F.array()
    return part.frame.select(
        *declared, place[0].alias(FILE), place[1].alias(LINE), day.alias("ds"), wrong.cast(_FAULTS_TYPE).alias(FAULTS)
    )


def _is_exact(
    column: TableColumn, parts: Sequence[StoredRows], extracted: Sequence[Mapping[str, Extracted | None]]
) -> bool:
    """Return whether a column is stored as it is declared in all parts that have it."""
    types = [
        part.types.get(column.name)
        for part, columns in zip(parts, extracted, strict=True)
        if columns[column.name] is not None
    ]
    return column.path is None and bool(types) and all(type_ == column.stored_type for type_ in types)


def _extracted(parts: Sequence[StoredRows], table: Table, source: TableSource) -> list[dict[str, Extracted | None]]:
    """Return each part's declared columns, None where it lacks one. Raises UserError for all faults at once."""
    extracted: list[dict[str, Extracted | None]] = []
    faults = []
    for part in parts:
        extracted.append({})
        for column in table.columns:
            try:
                extracted[-1][column.name] = extract(column, part.frame.schema, source, part.place, table.columns)
            except AmbiguousColumn:
                raise
            except UserError as e:
                faults.append(str(e))
    if faults:
        raise UserError(
            "\n".join(faults) + f"\nDeclare the types that {source.title} has in table.columns (or a view of it with "
            f"other ones); numbers since 1970 are named in source.timestamps"
        )
    return extracted


def _fault(column: TableColumn, extracted: Extracted) -> Column:
    """Return a struct where a value cannot be read as declared, else null."""
    value = F.substring(extracted.text, 1, _VALUE_CHARACTERS)
    reason = F.concat(F.lit(f"{column.name}: '"), value, F.lit(f"' is not {a_type(column.type)}"))
    return F.when(extracted.unread, F.struct(F.lit(kind_unreadable(column)).alias("kind"), reason.alias("reason")))


def _by_keys(table: Table, source: TableSource, extracted: Mapping[str, Extracted | None]) -> list[Column]:
    """`_source_file`, `_source_line` where the format has no positions: the keys, and a hash of the row."""
    if not table.keys:
        raise UserError(
            f"source: rows of {source.title} have no positions that Spark gives, so it takes their keys to tell them "
            f"apart: declare table.keys (a Delta table has positions with 'delta.enableDeletionVectors' = 'true')"
        )
    values = {name: column.value for name, column in extracted.items() if column is not None}
    keys = [values[k].alias(k) for k in table.keys if k in values]
    return [F.to_json(F.struct(*keys)), F.xxhash64(*values.values())]


@dataclass(frozen=True)
class PinnedTable:
    """A source table at the version that a manifest of ingest names."""

    source: TableSource
    table: Table
    #: Day of the run.
    ds: str
    snapshot: Snapshot
    #: By day taken, up to `ds`: fingerprint of its files, and number of its quarantined rows.
    days: Mapping[str, tuple[str, int]]
    #: The table of the quarantined rows, and its version.
    quarantine: Location
    quarantine_version: int
    #: Values of declared columns whose rows are left out.
    forgotten: ForgottenValues | None = None

    @staticmethod
    def from_manifest(
        source: TableSource,
        table: Table,
        ds: str,
        facts: Mapping[str, Any],
        version: str,
        quarantine: tuple[Location, int],
        forgotten: ForgottenValues | None = None,
    ) -> PinnedTable:
        """Return the table as a manifest pins it: by `facts["table"]`, the output's version, and the quarantine table's
        version.

        Rows with a value of `forgotten` are left out, whenever the day was taken.

        Raises:
            UserError: the version is gone, or files are others than they were.
        """
        pinned = facts["table"]
        days = {day: (files, int(left_out)) for day, (files, left_out) in pinned["days"].items()}
        was = {day: files for day, (files, _) in days.items()}
        snapshot = open_table(source, table, TablePlace(**pinned["place"]), was, version)
        now = snapshot.day_versions(days)
        changed = [day for day, (files, left_out) in days.items() if now.get(day, "") != files]
        if changed:
            raise UserError(
                f"source: the files of {source.title} of {', '.join(changed[:3])} are others than when ingest ran; run "
                f"ingest again"
            )
        if bad_files := pinned.get("bad_files"):
            assert isinstance(snapshot, FolderSnapshot), "other tables have no such files"
            snapshot = snapshot.leaving_out(bad_files)
        return PinnedTable(source, table, ds, snapshot, days, *quarantine, forgotten)

    def rows(self, spark: SparkSession, days: Collection[str]) -> DataFrame:
        """Return the rows of some of the days, without those that are left out.

        Returns:
            the declared columns, `_source_file`, `_source_line`, `ds`.
        """
        read_days = sorted(set(days) & set(self.days))
        rows, _ = table_rows(spark, self.snapshot, self.table, self.source, read_days, self.ds, self.forgotten)
        rows = rows.drop(FAULTS)
        if not any(self.days[day][1] for day in read_days):
            return rows
        bad = read_version(
            spark, self.quarantine, self.quarantine_version, lambda partition: partition.get("ds") in read_days
        )
        bad = bad.where(F.col("ds").isin(read_days)).select(FILE, LINE)
        return rows.join(bad, [FILE, LINE], "left_anti")

    def plain_files(
        self, spark: SparkSession, days: Collection[str], columns: Collection[str]
    ) -> list[TableFile] | None:
        """Return the data files that hold the rows of some of the days, where a reader of Parquet may take them as they
        are.

        Args:
            spark: the session.
            days: of `days`.
            columns: that are read.

        Returns:
            None where Spark must read the table: rows are deleted, forgotten or left out, columns are partitions, have
            other names or types than declared, files hold rows of days that were not taken, or Arrow cannot open them.
        """
        read_days = sorted(set(days) & set(self.days))
        if not self.snapshot.plain or self.forgotten is not None or any(self.days[day][1] for day in read_days):
            return None
        _, stored = table_rows(spark, self.snapshot, self.table, self.source, read_days, self.ds)
        files = files_of(self.snapshot, read_days if self.source.daily else None)
        if isinstance(self.snapshot, FolderSnapshot):
            files = [f for f in files if f.name not in self.snapshot.left_out]
        partitions = set((files[0].partition or {}) if files else {})
        if not set(columns) <= stored.exact or {c.lower() for c in columns} & partitions:
            return None
        if self.source.daily and not all(holds_only(f, read_days) for f in files):
            return None
        return files if arrow_reads(files) else None


def holds_only(file: TableFile, days: list[str]) -> bool:
    """Return whether all rows of a file are of these days."""
    between = [day for day in days if file.may_hold(day)]
    return bool(between) and not file.may_lack_days and _span(file.first, file.last) == len(between)


def _span(first: str, last: str) -> int:
    """Days from one to another; -1 where an end is open."""
    try:
        return (date.fromisoformat(last) - date.fromisoformat(first)).days + 1
    except ValueError:
        return -1
