"""The table of events at the version that ingest's manifest pins, and the days of it that a dataset is made of."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.errors import UserError
from headrace.features.build.window import first_day
from headrace.features.functions.spark_expressions import col
from headrace.features.types import declared
from headrace.manifest import Output
from headrace.schema import TableColumn
from headrace.stage import Context


def pinned_table(ctx: Context, source: str | None = None) -> Output:
    """The pinned table of events: the main source's, or a named one's.

    Raises:
        UserError: the manifest names none.
    """
    name = ctx.ws.name_of(ctx.ws.events(ctx.spec.pipeline, source))
    for output in ctx.upstream["ingest"].outputs:
        if output.kind == "delta" and output.name == name:
            return output
    raise UserError(f"ingest's manifest of {ctx.ds} names no table {name}; run ingest again")


def read_events(ctx: Context, spark: SparkSession, source: str | None = None) -> DataFrame:
    """All rows of the pinned version of a source, columns in the types that features see them in."""
    pinned = pinned_table(ctx, source)
    table = ctx.spec.table if source is None else ctx.spec.sources[source].table
    reader = spark.read.format("delta").option("versionAsOf", int(pinned.version))
    return as_features_see(reader.load(str(ctx.ws.locate(pinned.name))), table.columns)


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
