"""The rows of a day: the pinned events and named sources, through the spec's table operators, split.

Ingest's manifest pins the versions that are read. Named sources are read up to landing day ds.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, timedelta
from itertools import count
from typing import TYPE_CHECKING

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import LandingSource, NamedSource, Spec, TableSource
from headrace.config.schema import TableColumn, is_wider
from headrace.config.source import following
from headrace.config.source import midnight as landing_midnight
from headrace.errors import UserError
from headrace.features.arrow.decode import numbered_name
from headrace.features.build.plan import days_before_training, first_day, pinned_table, reads_by_day, source_facts
from headrace.features.functions.spark_expressions import col
from headrace.features.functions.timestamps import DAY_MICROS, spark_micros
from headrace.features.layout.files import seen_until, split_ranges
from headrace.features.layout.split import FrameFiles, SplitRows, split_rows
from headrace.features.table_ops.base import LABEL_KNOWN, QUERY, SourceRead
from headrace.features.table_ops.preparation import ExternalReader, Preparation, midnight, row_preparation, train_range
from headrace.features.table_ops.preparation import source_table as named_table
from headrace.features.types import ValueType, declared
from headrace.lake.delta.with_spark import read_version
from headrace.lake.scratch import PREPARED, task_folder
from headrace.lake.spark.session import spark_settings
from headrace.stage import Context
from headrace.storage import Location

if TYPE_CHECKING:
    from headrace.lake.tables.declared import PinnedTable

_LOG = logging.getLogger("headrace.features")


def events_within_days(spec: Spec, events: DataFrame, ds: str) -> DataFrame:
    """Return events that happened from `first_day` to the end of ds, whenever they landed (split by time of daily
    sources).
    """
    if not reads_by_day(spec):
        return events
    assert spec.table.event_time is not None
    type_ = next(declared(c) for c in spec.table.columns if c.name == spec.table.event_time)
    t = spark_micros(col(spec.table.event_time), type_)
    return events.where((t >= F.lit(midnight(first_day(spec, ds)))) & (t < F.lit(midnight(ds, 1))))


@contextmanager
def day_rows(ctx: Context, events: DataFrame, *, from_files: bool = False) -> Iterator[SplitRows]:
    """Yield the rows that the dataset of a day is made of.

    With table operators they are computed once and kept while the stage goes over them several times, to count, to fit,
    to write: as Parquet files, or by Spark on the executors' disks where hosts share no scratch folder and the stage
    does not need files. But not where the engine makes them of the lake's files itself.

    Args:
        ctx: its inputs pin the tables that are joined, see `other_inputs`.
        events: the pinned events from `first_day` on.
        from_files: whether the engine works on files: the lake's where it can (`row_preparation`), else on those of the
            rows.

    Raises:
        UserError: as the operators and the split do; a table that was joined has changed.
    """
    spec = ctx.spec
    if not spec.features.prepare:
        yield split_rows(spec, events, ctx.ds)
        return
    in_place = from_files and row_preparation(spec) is not None
    numbers, persisted = count(), list[DataFrame]()

    def materialize(frame: DataFrame) -> DataFrame:
        if in_place:
            return frame
        if spec.spark.own_scratch:
            # A lost executor's part is computed again from the pinned versions.
            persisted.append(frame.persist(StorageLevel.DISK_ONLY))
            return persisted[-1]
        return staged_frame(frame, folder / str(next(numbers)))[0]

    def last(frame: DataFrame) -> tuple[DataFrame, FrameFiles | None]:
        if in_place or (spec.spark.own_scratch and not from_files):
            return materialize(frame), None
        return staged_frame(frame, folder / "rows")

    with task_folder(ctx, PREPARED, ctx.ds) as folder:
        try:
            train, valid = split_ranges(spec, ctx.ds)
            preparation = Preparation.from_spec(spec)
            reader = ExternalReader.pinned_by(ctx.ws, preparation.externals, ctx.inputs)
            frame = preparation.spark(
                events_within_days(spec, events, ctx.ds),
                reader,
                train_range(spec, train[0], valid[0]),
                materialize,
                SourceRows.for_day(ctx, events.sparkSession),
                seen_until(spec, ctx.ds),
            )
            if LABEL_KNOWN in frame.columns:
                frame = frame.where(F.col(LABEL_KNOWN)).drop(LABEL_KNOWN)
            frame = frame.drop(QUERY)
            if spec.features.split.by == "time":
                # Lazy, and rows that were read only as history are dropped.
                rows = split_rows(spec, frame, ctx.ds)
                stored, files = last(rows.frame)
                rows = replace(rows, frame=stored, files=files)
            else:
                # Such a split looks at all rows first.
                stored, files = last(frame)
                rows = replace(split_rows(spec, stored, ctx.ds), files=files)
            reader.check_unchanged()
            _LOG.info("prepared the rows by %s", ", ".join(s.op.name for s in preparation.steps))
            yield rows
        finally:
            for frame in persisted:
                frame.unpersist()


def staged_frame(frame: DataFrame, folder: Location) -> tuple[DataFrame, FrameFiles]:
    """Write the rows to Parquet files in a new folder, and return the frame of these files beside them."""
    names = frame.columns
    numbered = frame.toDF(*map(numbered_name, range(len(names))))
    with spark_settings(frame.sparkSession, {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}):
        numbered.write.parquet(folder.spark_path)
    stored = frame.sparkSession.read.schema(numbered.schema).parquet(folder.spark_path).toDF(*names)
    return stored, FrameFiles(folder, tuple(names))


def source_table(ctx: Context, source: str | None = None) -> PinnedTable | None:
    """Return a source that is a table, as ingest has pinned it; None where the source is landing files.

    Raises:
        UserError: the version is gone, or files are others than they were.
    """
    spec = ctx.spec
    declared_source, table = (spec.source, spec.table)
    if source is not None:
        declared_source, table = spec.sources[source].source, spec.sources[source].table
    if not isinstance(declared_source, TableSource):
        return None
    # Late: most sources are landing files.
    from headrace.lake.forgotten import ForgottenValues
    from headrace.lake.tables.declared import PinnedTable

    facts = source_facts(ctx, source)
    bad_rows = ctx.ws.quarantine(spec.pipeline, source)
    name = ctx.ws.name_of(bad_rows)
    quarantine_version = next(o.version for o in ctx.upstream["ingest"].outputs if o.name == name)
    listed = ForgottenValues.load(ctx.ws.forgotten_values(spec.pipeline))
    forgotten = None if listed is None else listed.restricted_to([c.name for c in table.columns])
    version = pinned_table(ctx, source).version
    return PinnedTable.from_manifest(
        declared_source, table, ctx.ds, facts, version, (bad_rows, int(quarantine_version)), forgotten
    )


def days_of_window(ctx: Context, days: Collection[str]) -> list[str]:
    """Return those of some days that the dataset of `ctx.ds` may see: see `events_of_window`."""
    spec = ctx.spec
    if not spec.source.daily:
        return sorted(days)
    first = ""
    if spec.features.split.by == "time":
        first = spec.first_landing_day(first_day(spec, ctx.ds))
    return sorted(d for d in days if first <= d <= ctx.ds)


def read_events(ctx: Context, spark: SparkSession, source: str | None = None) -> DataFrame:
    """Return the rows of the pinned version of a source, columns in the types that features see them in.

    Of a named source all of them, up to ds where it is a table; of the main source at least those that
    `events_of_window` leaves, and those alone where it is a table.
    """
    table = ctx.spec.table if source is None else ctx.spec.sources[source].table
    taken = source_table(ctx, source)
    if taken is not None:
        days = days_of_window(ctx, taken.days) if source is None else [d for d in taken.days if d <= ctx.ds]
        return as_features_see(taken.rows(spark, days), table.columns)
    pinned = pinned_table(ctx, source)

    def is_read(partition: Mapping[str, str | None]) -> bool:
        ds = partition.get("ds")
        return ds is not None and (source is not None or not ctx.spec.source.daily or bool(days_of_window(ctx, [ds])))

    return as_features_see(read_version(spark, ctx.ws.locate(pinned.name), int(pinned.version), is_read), table.columns)


def as_features_see(events: DataFrame, columns: Sequence[TableColumn]) -> DataFrame:
    """Return events with declared columns as features see them (headrace.features.types).

    Small integers become int, local times those of UTC, and what the pinned version has with a narrower type than the
    declaration gets the declared one. A column of any other type, of an older declaration, stays for others to refuse.
    """
    stored = dict(events.dtypes)
    casts = {}
    for column in columns:
        type_, seen_as = stored.get(column.name), str(declared(column))
        if (
            type_ is not None
            and type_ != seen_as
            and (type_ == column.stored_type or is_wider(column.stored_type, type_))
        ):
            casts[column.name] = col(column.name).cast(seen_as)
    return events.withColumns(casts)


def events_of_window(ctx: Context, events: DataFrame) -> DataFrame:
    """Return the rows that the dataset of `ctx.ds` may see.

    Of a daily source those that landed up to ds, with a split by time from `first_day` on; else the newest snapshot up
    to ds.
    """
    spec = ctx.spec
    if isinstance(spec.source, TableSource):
        return events
    if not spec.source.daily:
        # Each run's day of a snapshot source holds all of it.
        newest = events.where(F.col("ds") <= ctx.ds).agg(F.max("ds")).collect()[0][0]
        return events.where(F.col("ds") == F.lit(newest))
    events = events.where(F.col("ds") <= ctx.ds)
    if spec.features.split.by == "time":
        events = events.where(F.col("ds") >= spec.first_landing_day(first_day(spec, ctx.ds)))
    return events


#: Most days by which an event's UTC day may be after its landing day: time zones, fast clocks.
_MOST_AHEAD = 3


@dataclass(frozen=True)
class SourceRows:
    """Reads the rows of named sources that a dataset of `ctx.ds` may see."""

    ctx: Context
    spark: SparkSession
    #: First microsecond of the rows to compute; None: no bound.
    first: int | None
    #: The same for sources' events where an operator has no bound of its own (`features.history_days`).
    first_event: int | None = None

    @staticmethod
    def for_day(ctx: Context, spark: SparkSession) -> SourceRows:
        """Return the reader for the days of `headrace.features.build.plan`."""
        spec, days = ctx.spec, ctx.spec.features.history_days
        if not reads_by_day(spec):
            return SourceRows(ctx, spark, None)
        bound = None if days is None else midnight(days_before_training(spec, ctx.ds, days))
        return SourceRows(ctx, spark, midnight(first_day(spec, ctx.ds)), bound)

    def __call__(self, read: SourceRead) -> DataFrame:
        """See SparkTableContext.source.

        Raises:
            UserError: the table lacks a declared column, or has it as another type.
        """
        from headrace.features.table_ops.spark_windows import EVENT_MICROS

        ctx = self.ctx
        named, pinned = ctx.spec.sources[read.name], pinned_table(ctx, read.name)
        rows = read_events(ctx, self.spark, read.name).where(F.col("ds") <= ctx.ds)
        stored_types = dict(rows.dtypes)
        for c in named.table.columns:
            if stored_types.get(c.name) != str(declared(c)):
                raise UserError(
                    f"column '{c.name}' is declared {c.type}, but {pinned.name} (version {pinned.version}) has it as "
                    f"{stored_types.get(c.name, 'no column at all')}; run ingest again"
                )
        timed = named_table(named).time is not None
        if named.source.daily and read.use == "newest" and isinstance(named.source, LandingSource):
            # Ingest has loaded ds: without rows of it the list is empty, never that of an earlier day.
            rows = rows.where(F.col("ds") == ctx.ds)
        elif read.use == "newest" or (not named.source.daily and (timed or read.use == "table")):
            newest = rows.agg(F.max("ds")).collect()[0][0]
            rows = rows.where(F.col("ds") == F.lit(newest))
        rows = rows.withColumn(EVENT_MICROS, _known_from(named))
        since = self._since(read)
        if since is None or not timed:
            return rows
        if named.source.daily:
            landed = date(1970, 1, 1) + timedelta(days=since // DAY_MICROS - _MOST_AHEAD)
            rows = rows.where(F.col("ds") >= landed.isoformat())
        return rows.where(F.col(EVENT_MICROS) >= F.lit(since))

    def _since(self, read: SourceRead) -> int | None:
        """Return the first microsecond from which on rows of a source can matter; None: all may."""
        if read.lookback is not None:
            return None if self.first is None else self.first - read.lookback
        return self.first_event if read.use == "events" else None


def has_timestamps(named: NamedSource) -> bool:
    """Return whether the rows of a source say when they happened to the moment, not by dates or landing days."""
    source = named_table(named)
    return source.time is not None and source.types[source.time].element == "timestamp"


def end_of_day(named: NamedSource, ds: str) -> int:
    """Return the first microsecond that is no knowledge of the day `ds`, in terms of a source's EVENT_MICROS.

    Of timestamps it is midnight in UTC, as of splits and windows; of dates and landing days their end in the source's
    time zone, which is later in the west.
    """
    if has_timestamps(named):
        return midnight(ds, 1)
    return int(landing_midnight(named.source, following(ds)).timestamp()) * 1_000_000


def _known_from(named: NamedSource) -> Column:
    """Return the microsecond from which on a row of a source can be known.

    That of its event; where that is a date, or there is none, the end of its day or of its landing day: what happened
    in the course of a day is no knowledge of that day's rows.
    """
    source = named_table(named)
    if source.time is not None and source.types[source.time].element == "timestamp":
        return spark_micros(col(source.time), source.types[source.time])
    day = F.col("ds").cast("date") if source.time is None else col(source.time)
    end = F.date_add(day, 1).cast("timestamp")
    if named.source.timezone != "UTC":
        end = F.to_utc_timestamp(end, F.lit(named.source.timezone))
    # The day's last microsecond, which is before the first event of the next day.
    return spark_micros(end, ValueType("timestamp")) - F.lit(1)
