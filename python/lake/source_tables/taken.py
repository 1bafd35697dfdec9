"""The days of a source table that ingest has taken, as its manifest pins them: what every later stage reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Table, TableSource
from headrace.errors import UserError
from headrace.lake.delta.with_spark import read_version
from headrace.lake.forgotten import ForgottenValues
from headrace.lake.source_tables.declared import FAULTS, table_rows
from headrace.lake.source_tables.opened import TablePlace, open_table
from headrace.lake.source_tables.parquet_files import arrow_reads
from headrace.lake.source_tables.snapshot import FILE, LINE, Snapshot, TableFile
from headrace.storage import Location


@dataclass(frozen=True)
class PinnedTable:
    """A source table at the version that a manifest of ingest names."""

    source: TableSource
    table: Table
    #: Of the run.
    ds: str
    snapshot: Snapshot
    #: By day that was taken, up to `ds`: fingerprint of its files, and its rows that are left out.
    days: Mapping[str, tuple[str, int]]
    #: The table of the rows that are left out, and its version.
    quarantine: Location
    quarantine_version: int
    #: Values of declared columns whose rows are left out.
    forgotten: ForgottenValues | None = None

    @staticmethod
    def of(
        source: TableSource,
        table: Table,
        ds: str,
        facts: Mapping[str, Any],
        version: str,
        quarantine: tuple[Location, int],
        forgotten: ForgottenValues | None = None,
    ) -> PinnedTable:
        """From a manifest: `facts["table"]`, the output's version, the quarantine table and its version.

        Rows with a value of `forgotten` are left out, whenever the day was taken.

        Raises:
            UserError: the version is gone, or files are others than they were.
        """
        said = facts["table"]
        days = {day: (files, int(left_out)) for day, (files, left_out) in said["days"].items()}
        was = {day: files for day, (files, _) in days.items()}
        snapshot = open_table(source, table, TablePlace(**said["place"]), was, version)
        now = snapshot.day_versions(days)
        changed = [day for day, (files, left_out) in days.items() if now.get(day, "") != files]
        if changed:
            raise UserError(
                f"source: the files of {source.shown} of {', '.join(changed[:3])} are others than when ingest ran; run "
                f"ingest again"
            )
        return PinnedTable(source, table, ds, snapshot, days, *quarantine, forgotten)

    def rows(self, spark: SparkSession, days: Collection[str]) -> DataFrame:
        """The rows of some of the days, without those that are left out.

        Returns:
            the declared columns, `_source_file`, `_source_line`, `ds`.
        """
        wanted = sorted(set(days) & set(self.days))
        rows, _ = table_rows(spark, self.snapshot, self.table, self.source, wanted, self.ds, self.forgotten)
        rows = rows.drop(FAULTS)
        if not any(self.days[day][1] for day in wanted):
            return rows
        bad = read_version(spark, self.quarantine, self.quarantine_version, lambda of: of.get("ds") in wanted)
        bad = bad.where(F.col("ds").isin(wanted)).select(FILE, LINE)
        return rows.join(bad, [FILE, LINE], "left_anti")

    def plain_files(
        self, spark: SparkSession, days: Collection[str], columns: Collection[str]
    ) -> list[TableFile] | None:
        """The data files that hold the rows of some of the days, where a reader of Parquet may take them as they are.

        Args:
            spark: the session.
            days: of `days`.
            columns: that are read.

        Returns:
            None where Spark must read the table: rows are deleted, forgotten or left out, columns are partitions, have
            other names or types than declared, files hold rows of days that were not taken, or Arrow cannot open them.
        """
        wanted = sorted(set(days) & set(self.days))
        if not self.snapshot.plain or self.forgotten is not None or any(self.days[day][1] for day in wanted):
            return None
        _, stored = table_rows(spark, self.snapshot, self.table, self.source, wanted, self.ds)
        files = [f for f in self.snapshot.files if not self.source.daily or any(f.may_hold(day) for day in wanted)]
        partitions = set((files[0].partition or {}) if files else {})
        if not set(columns) <= stored.exact or {c.lower() for c in columns} & partitions:
            return None
        if self.source.daily and not all(holds_only(f, wanted) for f in files):
            return None
        return files if arrow_reads(files) else None


def holds_only(file: TableFile, days: list[str]) -> bool:
    """Whether all rows of a file are of these days."""
    between = [day for day in days if file.may_hold(day)]
    return bool(between) and not file.may_lack_days and _span(file.first, file.last) == len(between)


def _span(first: str, last: str) -> int:
    """Days from one to another; -1 where an end is open."""
    try:
        return (date.fromisoformat(last) - date.fromisoformat(first)).days + 1
    except ValueError:
        return -1
