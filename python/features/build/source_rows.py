"""Named sources as table operators read them: at the versions that ingest's manifest pins, landing days up to ds."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import LandingSource, NamedSource
from headrace.errors import UserError
from headrace.features.build.events import pinned_table, read_events
from headrace.features.build.window import by_days, days_before_training, first_day
from headrace.features.functions.spark_expressions import col
from headrace.features.functions.timestamps import DAY_MICROS, spark_micros
from headrace.features.table_ops.base import SourceRead
from headrace.features.table_ops.preparation import midnight, source_table
from headrace.features.table_ops.spark_windows import EVENT_MICROS
from headrace.features.types import ValueType, declared
from headrace.lake.landing import following
from headrace.lake.landing import midnight as landing_midnight
from headrace.stage import Context

#: Days by which a landing day may be after the UTC day of an event in it: time zones, clocks that are ahead.
_MOST_AHEAD = 3


@dataclass(frozen=True)
class SourceRows:
    """Reads the rows of named sources that a dataset of `ctx.ds` may see."""

    ctx: Context
    spark: SparkSession
    #: The first microsecond of the rows that ask; None where they are not bounded.
    first: int | None
    #: The same for sources' events where an operator has no bound of its own (`features.history_days`).
    first_event: int | None = None

    @staticmethod
    def of(ctx: Context, spark: SparkSession) -> SourceRows:
        """For the rows of `headrace.features.build.window`."""
        spec, days = ctx.spec, ctx.spec.features.history_days
        if not by_days(spec):
            return SourceRows(ctx, spark, None)
        bound = None if days is None else midnight(days_before_training(spec, ctx.ds, days))
        return SourceRows(ctx, spark, midnight(first_day(spec, ctx.ds)), bound)

    def __call__(self, read: SourceRead) -> DataFrame:
        """See SparkTableContext.source.

        Raises:
            UserError: the table lacks a declared column, or has it as another type.
        """
        ctx = self.ctx
        named, pinned = ctx.spec.sources[read.name], pinned_table(ctx, read.name)
        rows = read_events(ctx, self.spark, read.name).where(F.col("ds") <= ctx.ds)
        there = dict(rows.dtypes)
        for c in named.table.columns:
            if there.get(c.name) != str(declared(c)):
                raise UserError(
                    f"column '{c.name}' is declared {c.type}, but {pinned.name} (version {pinned.version}) has it as "
                    f"{there.get(c.name, 'no column at all')}; run ingest again"
                )
        timed = source_table(named).time is not None
        if named.source.daily and read.use == "newest" and isinstance(named.source, LandingSource):
            # Ingest has loaded ds: where it has no rows, the list is empty, and not that of a day before.
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
        """The first microsecond from which on rows of a source can matter; None: all may."""
        if read.lookback is not None:
            return None if self.first is None else self.first - read.lookback
        return self.first_event if read.use == "events" else None


def has_timestamps(named: NamedSource) -> bool:
    """Whether the rows of a source say when they happened to the moment, not by dates or landing days."""
    source = source_table(named)
    return source.time is not None and source.types[source.time].element == "timestamp"


def end_of_day(named: NamedSource, ds: str) -> int:
    """The first microsecond that is no knowledge of the day `ds`, in terms of a source's EVENT_MICROS.

    Of timestamps it is midnight in UTC, as of splits and windows; of dates and landing days their end in the source's
    time zone, which is later in the west.
    """
    if has_timestamps(named):
        return midnight(ds, 1)
    return int(landing_midnight(named.source, following(ds)).timestamp()) * 1_000_000


def _known_from(named: NamedSource) -> Column:
    """The microsecond from which on a row of a source can be known.

    That of its event; where that is a date, or there is none, the end of its day or of its landing day: what happened
    in the course of a day is no knowledge of that day's rows.
    """
    source = source_table(named)
    if source.time is not None and source.types[source.time].element == "timestamp":
        return spark_micros(col(source.time), source.types[source.time])
    day = F.col("ds").cast("date") if source.time is None else col(source.time)
    end = F.date_add(day, 1).cast("timestamp")
    if named.source.timezone != "UTC":
        end = F.to_utc_timestamp(end, F.lit(named.source.timezone))
    # The day's last microsecond: before an event of the next day's first.
    return spark_micros(end, ValueType("timestamp")) - F.lit(1)
