"""Days by the change data feed of a Delta table: a day has the rows that commits brought since the day before it.

The first day that is taken has the table as it was at its end. Each later one has what was committed after the day
taken before it, up to its own midnight: rows that were inserted, and updated ones as they are since. A row that was
updated or deleted later is left out of its day by whoever reads later versions, as `source.changed_days` says.

Which versions a day is made of is written down when it is taken (`5..9`, of the first day `..4`), and never changes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from headrace.config import Table, TableSource
from headrace.errors import UserError
from headrace.lake.delta.change_data import check_feed, has_feed
from headrace.lake.delta.log import DeltaLog, commit_times, newest_until
from headrace.lake.landing import following, midnight
from headrace.lake.source_tables.delta import DeltaSnapshot
from headrace.lake.source_tables.live_rows import COPY, INSERT, ROW, TYPE, VERSION, live_rows
from headrace.lake.source_tables.snapshot import DAY, FILE, LINE, StoredRows, TableFile
from headrace.lake.sources.frame import quoted
from headrace.lake.sources.values import extract
from headrace.storage import Location

_RANGE = re.compile(r"(\d+)?\.\.(\d+)")


@dataclass(frozen=True)
class VersionRange:
    """The versions that a day is made of."""

    #: None: all up to `last`, as one snapshot.
    first: int | None
    last: int

    @staticmethod
    def of(text: str) -> VersionRange:
        """Of its text: `5..9` or `..4`.

        Raises:
            UserError: it is another's.
        """
        match = _RANGE.fullmatch(text)
        if match is None:
            raise UserError(
                "source.day.changes: days of this pipeline were taken by a partition or a time column before; give the "
                "pipeline another name"
            )
        return VersionRange(None if match.group(1) is None else int(match.group(1)), int(match.group(2)))

    def __str__(self) -> str:
        return f"{'' if self.first is None else self.first}..{self.last}"


@dataclass(frozen=True)
class ChangeFeed:
    """A Delta table as days of changes, seen at one version."""

    source: TableSource
    table: Table
    folder: Location
    #: No later change is seen.
    version: int
    #: What the days are made of that are known (VersionRange, as text): those that were taken, at first.
    ranges: Mapping[str, str]
    format: str = "delta"
    plain: bool = False
    versioned: bool = True
    #: None have days.
    files: Sequence[TableFile] = ()

    def day_versions(self, days: Collection[str]) -> dict[str, str]:
        """The ranges of versions of days, as text: of known ones as they are, of later ones by the times of commits.

        Where no day is known the last of `days` becomes the first one.
        """
        found = {ds: self.ranges[ds] for ds in days if ds in self.ranges}
        at = self._last()
        newer = sorted(ds for ds in days if not self.ranges or ds > max(self.ranges))
        times = commit_times(DeltaLog(self.folder), 0 if at is None else at) if newer else {}
        times = {version: time for version, time in times.items() if version <= self.version}
        for ds in newer if at is not None else newer[-1:]:
            end = int(midnight(self.source, following(ds)).timestamp() * 1000) - 1
            until = newest_until(times, end)
            if until is not None and (at is None or until > at):
                found[ds] = str(VersionRange(None if at is None else at + 1, until))
                at = until
        return found

    def why_no_rows(self, ds: str) -> str:
        if self.ranges and ds < min(self.ranges):
            first = min(self.ranges)
            return f"its days begin with {first}, which has the table as it was then, with all that came before"
        after = min((other for other in self.ranges if other > ds), default=None)
        if after is not None:
            return f"it was not taken before {after}, which has the changes of that day, too"
        at = self._last()
        return f"no version {'' if at is None else f'after {at} '}was committed before the end of that day"

    def lost(self, ds: str) -> str | None:
        try:
            self._check([ds])
        except UserError as e:
            return str(e)
        return None

    def pin(self, days: Mapping[str, str]) -> str:
        return str(VersionRange.of(days[max(days)]).last if days else self.version)

    def at(self, ds: str, ranges: Mapping[str, str]) -> ChangeFeed:
        """As it was when a day ended; `ranges`: of `day_versions`, of it and the days before."""
        known = {day: text for day, text in ranges.items() if day <= ds}
        return replace(self, version=VersionRange.of(known[ds]).last, ranges=known)

    @property
    def first_day(self) -> str | None:
        """The day that has the table as it was; None where it is not known."""
        return next((ds for ds, text in self.ranges.items() if VersionRange.of(text).first is None), None)

    def changes(self, spark: SparkSession, ds: str) -> DataFrame | None:
        """All that was recorded on a day, rows before updates included; None of the first day.

        Returns:
            all columns, `_change_type`, `_commit_version`.
        """
        versions = VersionRange.of(self.ranges[ds])
        self._check([ds])
        return None if versions.first is None else self._feed(spark, versions.first, versions.last)

    def stored_rows(
        self, spark: SparkSession, days: Collection[str] | None, paths: Collection[Sequence[str]]
    ) -> list[StoredRows]:
        """Return all rows of the days as one entry: a table with a log has one schema."""
        return [StoredRows.of(self.rows(spark, days))]

    def rows(self, spark: SparkSession, days: Collection[str] | None) -> DataFrame:
        """As Snapshot.rows; of days the live rows, with DAY, `_source_file` naming the version that brought them."""
        if days is None:
            return self._snapshot(spark, self.version)
        wanted = {ds: VersionRange.of(self.ranges[ds]) for ds in sorted(set(days) & self.ranges.keys())}
        if not wanted:
            nothing = F.lit(None).cast("string")
            empty = self._snapshot(spark, self.version).limit(0)
            return empty.select("*", nothing.alias(DAY), nothing.alias(FILE), F.lit(None).cast("long").alias(LINE))
        self._check(wanted)
        changes, policy = self._since(spark, wanted), self.source.changed_days
        key = self._key_hash(changes) if policy.updates == "ignore" else None
        live = live_rows(changes, self._schema, key, updates=policy.updates, deletes=policy.deletes)
        day: Column = F.lit(None).cast("string")
        for ds, versions in wanted.items():
            first = 0 if versions.first is None else versions.first
            day = F.when(F.col(VERSION).between(first, versions.last), ds).otherwise(day)
        # Ordered as text as the versions are: the first of repeated rows is kept.
        file = F.format_string("version=%020d", F.col(VERSION))
        copy = F.when(F.col(COPY) > 1, F.format_string("/copy=%d", F.col(COPY))).otherwise("")
        return live.select(
            *quoted([f.name for f in self._schema.fields]),
            day.alias(DAY),
            F.concat(file, copy).alias(FILE),
            F.col(ROW).alias(LINE),
        ).where(F.col(DAY).isNotNull())

    def _last(self) -> int | None:
        return VersionRange.of(self.ranges[max(self.ranges)]).last if self.ranges else None

    def _check(self, days: Collection[str]) -> None:
        """Raises UserError where changes since the first of these days cannot be read."""
        log, newest = DeltaLog(self.folder), DeltaLog(self.folder).version
        if newest is None or newest < self.version:
            raise UserError(
                f"source: {self.source.shown} has no version {self.version} any more: it was made anew. Give the "
                f"pipeline another name, so that it begins with the table as it is"
            )
        first = VersionRange.of(self.ranges[min(days)])
        after = first.last + 1 if first.first is None else first.first
        metadata = log.metadata(first.last) if first.first is None else None
        if metadata is not None and not has_feed(metadata):
            raise UserError(
                f"source.day.changes: {self.source.shown} has no change data feed. Turn it on (ALTER TABLE ... SET "
                f"TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')), or name a partition or a time column"
            )
        if after <= self.version:
            check_feed(log, self.source.shown, after, self.version)

    @property
    def _schema(self) -> T.StructType:
        return DeltaSnapshot(self.source, self.folder, self.version).schema

    def _snapshot(self, spark: SparkSession, version: int) -> DataFrame:
        DeltaSnapshot(self.source, self.folder, version).check()
        return spark.read.format("delta").option("versionAsOf", version).load(str(self.folder))

    def _feed(self, spark: SparkSession, first: int, last: int) -> DataFrame:
        DeltaSnapshot(self.source, self.folder, last).check()
        reader = spark.read.format("delta").option("readChangeFeed", "true")
        feed = reader.option("startingVersion", first).option("endingVersion", last).load(str(self.folder))
        return feed.select(*quoted([f.name for f in self._schema.fields]), TYPE, VERSION)

    def _since(self, spark: SparkSession, wanted: Mapping[str, VersionRange]) -> DataFrame:
        """All changes since the first of some days, a snapshot as insertions."""
        first = wanted[min(wanted)]
        if first.first is not None:
            return self._feed(spark, first.first, self.version)
        whole = self._snapshot(spark, first.last)
        rows = whole.select("*", F.lit(INSERT).alias(TYPE), F.lit(first.last).cast("long").alias(VERSION))
        if first.last == self.version:
            return rows
        return self._feed(spark, first.last + 1, self.version).unionByName(rows, allowMissingColumns=True)

    def _key_hash(self, changes: DataFrame) -> Column:
        """A hash of `table.keys`; null where one is null."""
        declared = {c.name: c for c in self.table.columns}
        keys = [extract(declared[name], changes.schema, self.source) for name in self.table.keys]
        missing = [name for name, one in zip(self.table.keys, keys, strict=True) if one is None]
        if not keys or missing:
            what = f"column '{missing[0]}' of table.keys is not there" if missing else "declare table.keys"
            raise UserError(
                f"source.changed_days: where updates are ignored, rows of {self.source.shown} are told apart by their "
                f"keys: {what}"
            )
        columns = [one.value for one in keys if one is not None]
        known = reduce(lambda a, b: a & b, (c.isNotNull() for c in columns))
        return F.when(known, F.xxhash64(*columns))
