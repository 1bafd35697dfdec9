"""The table of events at the version that ingest's manifest pins, and the days of it that a dataset is made of."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.errors import UserError
from headrace.features.build.prepared_rows import first_day
from headrace.features.functions.spark_expressions import col
from headrace.features.types import declared
from headrace.manifest import Output
from headrace.schema import TableColumn
from headrace.stage import Context


def events_output(ctx: Context) -> Output:
    """The pinned table.

    Raises:
        UserError: the manifest names none.
    """
    for output in ctx.upstream["ingest"].outputs:
        if output.kind == "delta" and output.name.endswith("/events"):
            return output
    raise UserError(f"ingest's manifest of {ctx.ds} names no events table; run ingest again")


def read_events(ctx: Context, spark: SparkSession) -> DataFrame:
    """All rows of the pinned version, columns in the types that features see them in."""
    pinned = events_output(ctx)
    reader = spark.read.format("delta").option("versionAsOf", int(pinned.version))
    return as_features_see(reader.load(str(ctx.ws.locate(pinned.name))), ctx.spec.table.columns)


def as_features_see(events: DataFrame, columns: Sequence[TableColumn]) -> DataFrame:
    """Declared columns of small integers as int, local times as if they were of UTC (headrace.features.types)."""
    other = {c.name: str(declared(c)) for c in columns if c.stored_type != str(declared(c))}
    # A column that is there as another type, of an older declaration, stays for others to complain about.
    stored = {c.name: c.stored_type for c in columns}
    return events.withColumns({n: col(n).cast(t) for n, t in other.items() if dict(events.dtypes).get(n) == stored[n]})


def events_of_window(ctx: Context, events: DataFrame) -> DataFrame:
    """The rows that the dataset of `ctx.ds` may see.

    Of a daily source those that landed up to ds, with a split by time from `first_day` on; else the newest snapshot up
    to ds.
    """
    spec = ctx.spec
    if not spec.source.daily:
        # Each run's day of a snapshot source holds all of it.
        newest = events.where(F.col("ds") <= ctx.ds).agg(F.max("ds")).collect()[0][0]
        return events.where(F.col("ds") == F.lit(newest))
    events = events.where(F.col("ds") <= ctx.ds)
    if spec.features.split.by == "time":
        events = events.where(F.col("ds") >= spec.first_landing_day(first_day(spec, ctx.ds)))
    return events
