"""The rows of served lists with the events that followed, as they had landed by the day of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from functools import reduce

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import NamedSource, OutcomeLabel, Spec
from headrace.features.build.events import as_features_see, pinned_table, source_table
from headrace.features.functions.spark_expressions import col
from headrace.features.functions.timestamps import DAY_MICROS, HOUR_MICROS, spark_micros
from headrace.features.types import declared
from headrace.lake.delta.frame import read_version
from headrace.outcomes.served import ServedDay, section
from headrace.stage import Context

#: Columns of a list that a table of scores may lack.
_OPTIONAL = {"arms": "string", "propensity": "double"}


def sources(spec: Spec) -> list[str | None]:
    """The sources whose events are read; None: the main one, which is always among them."""
    return list(dict.fromkeys([None, *(label.from_ for label in section(spec).labels.values())]))


def outcome_rows(ctx: Context, spark: SparkSession, days: Sequence[ServedDay]) -> DataFrame:
    """The rows of the outcomes table for the day of the run.

    Returns:
        `ds`, the day of the run; `served_ds`, user, item, `rank`, `score`, `model_version`, `arms`, `propensity`;
        `shown_landed`, the landing day of the first event while the list was shown (null: there is none, where all
        rows count); for each label LABEL (0 or 1), LABEL_landed, the landing day with which it was known to be 1, and
        LABEL_ripe; `slice_NAME` of the first event while the list was shown.
    """
    spec, outcomes = ctx.spec, section(ctx.spec)
    assert spec.score is not None
    user, item = spec.score.user.key, spec.score.item.key
    lists = _lists(ctx, spark, days)
    events = reduce(DataFrame.unionByName, [_events(ctx, spark, days, source) for source in sources(spec)])
    start = _start(F.col("served_ds"), outcomes.starts_after_hours)
    longest = max(outcomes.live_days, *(label.within_days for label in outcomes.labels.values()))
    age = F.col("__time") - start
    same = (col(user) == F.col("__user")) & (col(item) == F.col("__item"))
    followed = same & (age >= 0) & (age < longest * DAY_MICROS)
    joined = lists.join(events, followed, "inner" if outcomes.shown == "logged" else "left")
    while_shown = F.col("__main") & (age < outcomes.live_days * DAY_MICROS)
    found: list[Column] = [F.min(F.when(while_shown, F.col("__landed"))).alias("shown_landed")]
    for i, (name, label) in enumerate(outcomes.labels.items()):
        positive = F.col(f"__label{i}") & (age < label.within_days * DAY_MICROS)
        found.append(F.min(F.when(positive, F.col("__landed"))).alias(f"{name}_landed"))
    for i, name in enumerate(outcomes.slices):
        first = F.min(F.when(while_shown, F.struct("__time", f"__slice{i}")))
        found.append(first[f"__slice{i}"].alias(f"slice_{name}"))
    rows = joined.groupBy(*[col(c) for c in lists.columns]).agg(*found)
    if outcomes.shown == "logged":
        rows = rows.where(F.col("shown_landed").isNotNull())
    labels: list[Column] = []
    for name in outcomes.labels:
        # Known when both have landed: that the item was shown, and what was done.
        landed = F.greatest(f"{name}_landed", "shown_landed")  # of those that are not null
        labels.append(F.col(f"{name}_landed").isNotNull().cast("int").alias(name))
        labels.append(F.when(F.col(f"{name}_landed").isNotNull(), landed).alias(f"{name}_landed"))
        ripe = F.col("served_ds") <= F.lit(spec.last_ripe_day(name, ctx.ds))
        labels.append(ripe.alias(f"{name}_ripe"))
    return rows.select(
        F.lit(ctx.ds).alias("ds"),
        *[col(c) for c in lists.columns],
        "shown_landed",
        *labels,
        *[F.col(f"slice_{name}") for name in outcomes.slices],
    )


def _lists(ctx: Context, spark: SparkSession, days: Sequence[ServedDay]) -> DataFrame:
    """The rows of all lists, with `served_ds`."""
    spec = ctx.spec
    assert spec.score is not None
    keys = [spec.score.user.key, spec.score.item.key]
    frames = []
    for day in days:

        def wanted(partition: Mapping[str, str | None], ds: str = day.ds) -> bool:
            return partition.get("ds") == ds

        rows = read_version(spark, ctx.ws.locate(day.table.name), int(day.table.version), wanted)
        optional = [
            (F.col(c) if c in rows.columns else F.lit(None)).cast(type_).alias(c) for c, type_ in _OPTIONAL.items()
        ]
        of_day = rows.where(F.col("ds") == day.ds)
        frames.append(
            of_day.select(
                F.lit(day.ds).alias("served_ds"), *[col(c) for c in keys], "rank", "score", "model_version", *optional
            )
        )
    return reduce(DataFrame.unionByName, frames)


def _events(ctx: Context, spark: SparkSession, days: Sequence[ServedDay], source: str | None) -> DataFrame:
    """Events since the first list was shown: `__user`, `__item`, `__time` (microseconds), `__landed`, `__main` and,
    by the position of labels and slices, `__label0` (whether one counts), `__slice0`.
    """
    spec, outcomes = ctx.spec, section(ctx.spec)
    assert spec.score is not None
    given = NamedSource(source=spec.source, table=spec.table) if source is None else spec.sources[source]
    # An event of a day lands on that day or later, but where the day of a time zone begins before UTC's.
    first = (date.fromisoformat(days[0].ds) - timedelta(days=1)).isoformat()
    rows = _landed(ctx, spark, given, source, first)
    time = given.table.event_time
    assert time is not None
    (kind,) = [declared(c) for c in given.table.columns if c.name == time]
    labels = [_counts(spec, label) if label.from_ == source else F.lit(False) for label in outcomes.labels.values()]
    slices = [
        F.expr(text).cast("string") if source is None else F.lit(None).cast("string")
        for text in outcomes.slices.values()
    ]
    return rows.select(
        col(spec.score.user.key).alias("__user"),
        col(spec.score.item.key).alias("__item"),
        spark_micros(col(time), kind).alias("__time"),
        F.col("ds").alias("__landed"),
        F.lit(source is None).alias("__main"),
        *[label.alias(f"__label{i}") for i, label in enumerate(labels)],
        *[value.alias(f"__slice{i}") for i, value in enumerate(slices)],
    )


def _landed(ctx: Context, spark: SparkSession, given: NamedSource, source: str | None, first: str) -> DataFrame:
    """The pinned rows of a source that landed from a day on, up to the day of the run."""
    taken = source_table(ctx, source)
    if taken is not None:
        rows = taken.rows(spark, [d for d in taken.days if first <= d <= ctx.ds])
    else:
        pinned = pinned_table(ctx, source)

        def wanted(partition: Mapping[str, str | None]) -> bool:
            ds = partition.get("ds")
            return ds is not None and first <= ds <= ctx.ds

        rows = read_version(spark, ctx.ws.locate(pinned.name), int(pinned.version), wanted)
    return as_features_see(rows.where(F.col("ds").between(first, ctx.ds)), given.table.columns)


def _counts(spec: Spec, label: OutcomeLabel) -> Column:
    """Whether an event of the label's source is one that counts."""
    column = label.column or (spec.features.label if label.from_ is None else None)
    if column is None:
        return F.lit(True)
    return F.coalesce(col(column).cast("double") > 0, F.lit(False))


def _start(served_ds: Column, after_hours: float) -> Column:
    """When the lists of a day are first shown, microseconds since 1970 (UTC)."""
    days = F.datediff(served_ds.cast("date"), F.lit("1970-01-01").cast("date")).cast("bigint")
    return (days + 1) * DAY_MICROS + round(after_hours * HOUR_MICROS)
