"""Days by the change data feed of a Delta table: a day has the rows that commits brought since the day before it.

The first day that is taken has the table as it was at its end. Each later one has what was committed after the day
taken before it, up to its own midnight: rows that were inserted, and updated ones as they are since. A row that was
updated or deleted later is left out of its day by whoever reads later versions, as `source.changed_days` says.

Which versions a day is made of is written down when it is taken (`5..9`, of the first day `..4`), and never changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql import types as T

from headrace.config import Table, TableSource
from headrace.config.schema import quoted_names
from headrace.config.source import RowChange, following, midnight
from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog, commit_times, file_path, newest_until
from headrace.lake.tables.delta import DeltaSnapshot, pinned_version
from headrace.lake.tables.snapshot import DAY, FILE, LINE, OneSchemaRows, Snapshot, TableFile, TablePlace
from headrace.lake.values import extract
from headrace.storage import Location, location_of, missing

_RANGE = re.compile(r"(\d+)?\.\.(\d+)")
#: Columns of a change data feed.
TYPE, VERSION = "_change_type", "_commit_version"
INSERT, PREIMAGE, POSTIMAGE, DELETE = "insert", "update_preimage", "update_postimage", "delete"
#: Columns of `live_rows`.
ROW, COPY = "__row", "__copy"
#: Types that Spark does not hash, or hashes without regard to nulls within.
_NESTED = (T.ArrayType, T.MapType, T.StructType, T.VariantType)
_ENABLED = "delta.enableChangeDataFeed"
_MAPPING = "delta.columnMapping.mode"
_PHYSICAL = "delta.columnMapping.physicalName"
_ANEW = "give the pipeline another name: it then begins with the table as it is"


@dataclass(frozen=True)
class VersionRange:
    """The versions that a day is made of."""

    #: First version of the range; None: all up to `last`, as one snapshot.
    first: int | None
    last: int

    @staticmethod
    def parse(text: str) -> VersionRange:
        """Return the range that a text names: `5..9` or `..4`.

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
class ChangeFeed(OneSchemaRows):
    """A Delta table as days of changes, seen at one version."""

    source: TableSource
    table: Table
    folder: Location
    #: Version of the table; later changes are not read.
    version: int
    #: Range of versions (VersionRange, as text) of each known day, at first of the days that were taken.
    ranges: Mapping[str, str]
    format: str = "delta"
    plain: bool = False
    versioned: bool = True
    #: Always empty: rows of a change feed have no files.
    files: Sequence[TableFile] = ()

    def day_versions(self, days: Collection[str]) -> dict[str, str]:
        """Return the ranges of versions of days, as text: of known ones as they are, of later ones by the times of
        commits.

        Where no day is known the last of `days` becomes the first one.
        """
        versions = {ds: self.ranges[ds] for ds in days if ds in self.ranges}
        last_version = self._last()
        newer = sorted(ds for ds in days if not self.ranges or ds > max(self.ranges))
        times = commit_times(DeltaLog(self.folder), 0 if last_version is None else last_version) if newer else {}
        times = {version: time for version, time in times.items() if version <= self.version}
        for ds in newer if last_version is not None else newer[-1:]:
            end = int(midnight(self.source, following(ds)).timestamp() * 1000) - 1
            until = newest_until(times, end)
            if until is not None and (last_version is None or until > last_version):
                versions[ds] = str(VersionRange(None if last_version is None else last_version + 1, until))
                last_version = until
        return versions

    def why_no_rows(self, ds: str) -> str:
        if self.ranges and ds < min(self.ranges):
            first = min(self.ranges)
            return f"its days begin with {first}, which has the table as it was then, with all that came before"
        after = min((day for day in self.ranges if day > ds), default=None)
        if after is not None:
            return f"it was not taken before {after}, which has the changes of that day, too"
        last_version = self._last()
        since = "" if last_version is None else f"after {last_version} "
        return f"no version {since}was committed before the end of that day"

    def lost(self, ds: str) -> str | None:
        try:
            self._check([ds])
        except UserError as e:
            return str(e)
        return None

    def pin(self, days: Mapping[str, str]) -> str:
        return str(VersionRange.parse(days[max(days)]).last if days else self.version)

    def as_of_day(self, ds: str, ranges: Mapping[str, str]) -> ChangeFeed:
        """Return the feed as it was when a day ended; `ranges`: those of `day_versions`, of the day and the days
        before.
        """
        known = {day: text for day, text in ranges.items() if day <= ds}
        return replace(self, version=VersionRange.parse(known[ds]).last, ranges=known)

    @property
    def first_day(self) -> str | None:
        """Return the day that has the table as it was; None where it is not known."""
        return next((ds for ds, text in self.ranges.items() if VersionRange.parse(text).first is None), None)

    def changes(self, spark: SparkSession, ds: str) -> DataFrame | None:
        """Return all that was recorded on a day, rows before updates included; None of the first day.

        Returns:
            all columns, `_change_type`, `_commit_version`.
        """
        versions = VersionRange.parse(self.ranges[ds])
        self._check([ds])
        return None if versions.first is None else self._feed(spark, versions.first, versions.last)

    def rows(self, spark: SparkSession, days: Collection[str] | None) -> DataFrame:
        """Return the rows as Snapshot.rows does; of days the live rows, with DAY, and `_source_file` naming the version
        that added them.
        """
        if days is None:
            return self._snapshot(spark, self.version)
        ranges = {ds: VersionRange.parse(self.ranges[ds]) for ds in sorted(set(days) & self.ranges.keys())}
        if not ranges:
            null = F.lit(None).cast("string")
            empty = self._snapshot(spark, self.version).limit(0)
            return empty.select("*", null.alias(DAY), null.alias(FILE), F.lit(None).cast("long").alias(LINE))
        self._check(ranges)
        changes, policy = self._since(spark, ranges), self.source.changed_days
        key = self._key_hash(changes) if policy.updates == "ignore" else None
        live = live_rows(changes, self._schema, key, updates=policy.updates, deletes=policy.deletes)
        day: Column = F.lit(None).cast("string")
        for ds, versions in ranges.items():
            first = 0 if versions.first is None else versions.first
            day = F.when(F.col(VERSION).between(first, versions.last), ds).otherwise(day)
        # Zero-padded, so that names sort like versions: the first of repeated rows is kept.
        file = F.format_string("version=%020d", F.col(VERSION))
        copy = F.when(F.col(COPY) > 1, F.format_string("/copy=%d", F.col(COPY))).otherwise("")
        return live.select(
            *quoted_names([f.name for f in self._schema.fields]),
            day.alias(DAY),
            F.concat(file, copy).alias(FILE),
            F.col(ROW).alias(LINE),
        ).where(F.col(DAY).isNotNull())

    def _last(self) -> int | None:
        return VersionRange.parse(self.ranges[max(self.ranges)]).last if self.ranges else None

    def _check(self, days: Collection[str]) -> None:
        """Raise UserError where changes since the first of these days cannot be read."""
        log, newest = DeltaLog(self.folder), DeltaLog(self.folder).version
        if newest is None or newest < self.version:
            raise UserError(
                f"source: {self.source.title} has no version {self.version} any more: it was made anew. Give the "
                f"pipeline another name, so that it begins with the table as it is"
            )
        first = VersionRange.parse(self.ranges[min(days)])
        after = first.last + 1 if first.first is None else first.first
        metadata = log.metadata(first.last) if first.first is None else None
        if metadata is not None and not has_feed(metadata):
            raise UserError(
                f"source.day.changes: {self.source.title} has no change data feed. Turn it on (ALTER TABLE ... SET "
                f"TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')), or name a partition or a time column"
            )
        if after <= self.version:
            check_feed(log, self.source.title, after, self.version)

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
        return feed.select(*quoted_names([f.name for f in self._schema.fields]), TYPE, VERSION)

    def _since(self, spark: SparkSession, ranges: Mapping[str, VersionRange]) -> DataFrame:
        """Return all changes since the first of some days, a snapshot as insertions."""
        first = ranges[min(ranges)]
        if first.first is not None:
            return self._feed(spark, first.first, self.version)
        first_rows = self._snapshot(spark, first.last)
        rows = first_rows.select("*", F.lit(INSERT).alias(TYPE), F.lit(first.last).cast("long").alias(VERSION))
        if first.last == self.version:
            return rows
        return self._feed(spark, first.last + 1, self.version).unionByName(rows, allowMissingColumns=True)

    def _key_hash(self, changes: DataFrame) -> Column:
        """Return a hash of `table.keys`; null where one is null."""
        declared = {c.name: c for c in self.table.columns}
        keys = [extract(declared[name], changes.schema, self.source) for name in self.table.keys]
        missing = [name for name, key in zip(self.table.keys, keys, strict=True) if key is None]
        if not keys or missing:
            hint = f"column '{missing[0]}' of table.keys is not there" if missing else "declare table.keys"
            raise UserError(
                f"source.changed_days: where updates are ignored, rows of {self.source.title} are told apart by their "
                f"keys: {hint}"
            )
        columns = [key.value for key in keys if key is not None]
        known = reduce(lambda a, b: a & b, (c.isNotNull() for c in columns))
        return F.when(known, F.xxhash64(*columns))


def live_rows(
    changes: DataFrame, schema: T.StructType, key: Column | None, *, updates: RowChange, deletes: RowChange
) -> DataFrame:
    """Return the added rows that no later change removes.

    A row that is taken away is the newest one with its values. So which one it is does not depend on whether older
    changes are among these.

    Args:
        changes: `_change_type`, `_commit_version` and the columns of the table.
        schema: the columns of the table.
        key: bigint; rows with the same one are taken for the same row, whatever their values; null: the values count.
            Given where updates are ignored, for what is deleted then has other values than what was inserted.
        updates: `ignore`: rows stay as they were inserted.
        deletes: `ignore`: rows stay.

    Returns:
        the columns of `changes`; ROW bigint, a hash of the row; COPY int, from 1: the how many-th of a commit with this
        hash.
    """
    added = [INSERT] if updates == "ignore" else [INSERT, POSTIMAGE]
    removing = [] if updates == "ignore" else [PREIMAGE]
    removing += [] if deletes == "ignore" else [DELETE]
    values = _hash(schema)
    row = values if key is None else F.coalesce(key, values)
    named = changes.where(F.col(TYPE).isin(added + removing)).select("*", values.alias("__values"), row.alias(ROW))
    is_added = F.col(TYPE).isin(added)
    of_commit = Window.partitionBy(ROW, VERSION, "__comes").orderBy("__values")
    named = named.select("*", is_added.alias("__comes")).select("*", F.row_number().over(of_commit).alias(COPY))
    if not removing:
        return named
    # Within a commit, removals come before additions. The running sum is a depth, as of nested brackets.
    order = Window.partitionBy(ROW).orderBy(VERSION, "__comes", COPY)
    step = F.when(F.col("__comes"), 1).otherwise(-1)
    deep = F.sum(step).over(order.rowsBetween(Window.unboundedPreceding, Window.currentRow))
    named = named.select("*", deep.alias("__depth"))
    least = F.min("__depth").over(order.rowsBetween(1, Window.unboundedFollowing))
    stays = F.coalesce(least >= F.col("__depth"), F.lit(True))
    return named.select("*", stays.alias("__stays")).where(F.col("__comes") & F.col("__stays"))


def _hash(schema: T.StructType) -> Column:
    """Return a hash of all values, nulls included."""
    columns = [F.col(quoted_names([f.name])[0]) for f in schema.fields]
    values = [
        F.to_json(F.struct(c.alias("v"))) if isinstance(f.dataType, _NESTED) else c
        for c, f in zip(columns, schema.fields, strict=True)
    ]
    # xxhash64 skips nulls, so their positions are hashed, too.
    return F.xxhash64(*values, *(c.isNull() for c in columns))


def has_feed(metadata: Mapping[str, Any] | None) -> bool:
    """Return whether commits under this `metaData` action are recorded in the feed."""
    return str(((metadata or {}).get("configuration") or {}).get(_ENABLED)).lower() == "true"


def check_feed(log: DeltaLog, table_name: str, first: int, last: int) -> None:
    """Look whether the changes from version `first` to `last` can be read, under the columns of `last`.

    Args:
        log: of the table.
        table_name: the table for a message.
        first: the first version.
        last: the last one.

    Raises:
        UserError: a commit or a file is gone, commits were not recorded, or columns have changed.
    """
    existing = log.versions()
    missing_version = next((v for v in range(first, last + 1) if v not in existing), None)
    metadata = None if missing_version is not None else log.metadata(first)
    if missing_version is not None or metadata is None:
        raise UserError(
            f"source.day.changes: the log of {table_name} no longer has version "
            f"{first if missing_version is None else missing_version}, which is read for these days. Keep "
            f"it for longer than features.window_days (delta.logRetentionDuration), and {_ANEW}"
        )
    schemas = [(first, metadata["schemaString"])]
    for version in range(first, last + 1):
        files, changed = _changes(log, version)
        if changed is not None:
            metadata = changed
            schemas.append((version, metadata["schemaString"]))
        if not has_feed(metadata):
            raise UserError(
                f"source.day.changes: {table_name} has no change data feed of version {version}. Record changes from "
                f"now on (ALTER TABLE ... SET TBLPROPERTIES ('{_ENABLED}' = 'true')), and {_ANEW}"
            )
        lost = missing(files)
        if lost is not None:
            raise UserError(
                f"source.day.changes: {lost}, which has changes of version {version} of {table_name}, is gone: VACUUM "
                f"has removed it. Keep such files for longer than features.window_days "
                f"(delta.deletedFileRetentionDuration of the table), and {_ANEW}"
            )
    newest = log.version
    mapped = (metadata.get("configuration") or {}).get(_MAPPING, "none") != "none"
    if not mapped and newest is not None and newest > last:
        # Without column mapping, Delta reads old changes by the newest schema.
        _check_columns([schemas[-1], (newest, (log.metadata(newest) or metadata)["schemaString"])], table_name)
    _check_columns(schemas, table_name)


def _changes(log: DeltaLog, version: int) -> tuple[list[Location], Mapping[str, Any] | None]:
    """Return the files that have a commit's changes, and its `metaData` action."""
    recorded: list[Location] = []
    moved: list[Location] = []
    metadata = None
    for action in log.actions(version):
        metadata = action.get("metaData", metadata)
        if "cdc" in action:
            recorded.append(file_path(log.folder, action["cdc"]["path"]))
        for kind in ("add", "remove"):
            if kind in action and action[kind].get("dataChange", True):
                moved.append(file_path(log.folder, action[kind]["path"]))
    # A commit's change files, if it has any, hold all of its changes.
    return recorded or moved, metadata


def _check_columns(schemas: list[tuple[int, str]], table_name: str) -> None:
    """Refuse columns that are no more as they were: Delta cannot read changes across that."""
    now = dict(_columns(schemas[-1][1]))
    for version, text in schemas[:-1]:
        for name, was in _columns(text):
            if now.get(name) != was:
                raise UserError(
                    f"source.day.changes: column '{name}' of {table_name} was renamed, dropped or given another type "
                    f"after version {version}, and changes across that cannot be read; {_ANEW}"
                )


def _columns(schema: str) -> Iterator[tuple[str, str]]:
    for field in json.loads(schema)["fields"]:
        yield field["name"], json.dumps([field["type"], (field.get("metadata") or {}).get(_PHYSICAL)])


def open_delta(
    source: TableSource, table: Table, place: TablePlace, days: Mapping[str, str], version: str | None
) -> Snapshot:
    """Open a Delta table; arguments as of `headrace.lake.tables.opened.open_table`."""
    folder = location_of(place.path).as_plain()
    number = pinned_version(source, folder) if version is None else int(version)
    if source.day is not None and source.day.changes:
        return ChangeFeed(source, table, folder, number, days)
    return DeltaSnapshot(source, folder, number)
