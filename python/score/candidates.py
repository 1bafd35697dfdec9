"""Who is scored and what for: users and items that were active, with the columns of their newest event."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Side, Spec
from headrace.errors import UserError
from headrace.features.spark_plan import col
from headrace.features.split import SPLIT, split_rows, time_ranges
from headrace.manifest import Output
from headrace.stage import Context


def events_output(ctx: Context) -> Output:
    """The events' table at the version that ingest's manifest pins."""
    found = [o for o in ctx.upstream["ingest"].outputs if o.kind == "delta" and o.name.endswith("/events")]
    if not found:
        raise UserError(f"ingest's manifest of {ctx.ds} names no events table; run ingest again")
    return found[0]


def active_events(ctx: Context, spark: SparkSession) -> DataFrame:
    """The pinned events that the dataset of this day was made of, with the column `__split`.

    With a split by time: from the first day of the training window up to ds. Else: the newest snapshot up to ds, or
    all days of a daily source.
    """
    spec, pinned = ctx.spec, events_output(ctx)
    events = spark.read.format("delta").option("versionAsOf", int(pinned.version)).load(str(ctx.ws.home / pinned.name))
    events = events.where(F.col("ds") <= ctx.ds)
    if not spec.source.daily:
        newest = events.agg(F.max("ds")).collect()[0][0]
        events = events.where(F.col("ds") == F.lit(newest))
    elif spec.features.split.by == "time":
        # An event lands on its day or later, never before.
        events = events.where(F.col("ds") >= time_ranges(spec.features, ctx.ds)[0][0])
    return split_rows(spec, events, ctx.ds).frame


def newest(spec: Spec, events: DataFrame, side: Side) -> DataFrame:
    """One row for each key that has an event in the training rows: the key and the side's columns.

    The columns are those of the key's newest event up to ds (validation days included: it is what is known on that
    day), by event time, then by place in the source. With a limit: the keys with the most events in the training rows,
    of equally many the lower key.
    """
    columns = [c for c in dict.fromkeys(side.columns) if c != side.key]
    # Without a time, the place in the source is the order of the events.
    age: list[Column] = [col(spec.table.event_time)] if spec.table.event_time else []
    order = F.struct(*age, F.col("_source_file"), F.col("_source_line"))
    values = F.struct(F.lit(0).alias("0"), *(col(c).alias(str(i)) for i, c in enumerate(columns, 1)))
    found = (
        events.where(col(side.key).isNotNull())
        .groupBy(col(side.key).alias("key"))
        .agg(F.count(F.when(F.col(SPLIT) == "train", 1)).alias("events"), F.max_by(values, order).alias("newest"))
        .where(F.col("events") > 0)
    )
    if side.limit is not None:
        found = found.orderBy(F.desc("events"), F.asc("key")).limit(side.limit)
    return found.select(
        F.col("key").alias(side.key), *(F.col(f"newest.{i}").alias(c) for i, c in enumerate(columns, 1))
    )


def seen(spec: Spec, events: DataFrame, user_key: str, item_key: str) -> DataFrame:
    """(key, seen): for each user, the items with a label of 1 - up to ds with a split by time, else in train."""
    rows = events.where(col(user_key).isNotNull() & col(item_key).isNotNull())
    rows = rows.where(col(spec.features.label).cast("double") == 1.0)
    if spec.features.split.by != "time":
        rows = rows.where(F.col(SPLIT) == "train")
    return rows.groupBy(col(user_key).alias("key")).agg(F.collect_set(col(item_key)).alias("seen"))
