"""The table of events at the version that ingest's manifest pins, and the days of it that a dataset is made of."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.errors import UserError
from headrace.features.build.prepared_rows import first_day
from headrace.manifest import Output
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
    """All rows of the pinned version."""
    pinned = events_output(ctx)
    reader = spark.read.format("delta").option("versionAsOf", int(pinned.version))
    return reader.load(str(ctx.ws.locate(pinned.name)))


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
