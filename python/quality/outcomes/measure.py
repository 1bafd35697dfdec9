"""Metrics of served lists: their rows joined with the events that followed, measured by model, arm and slice.

Events count as they had landed by the day of the run. How much is still to come is estimated from ripe days, all their
events taken together: the distribution of reporting delays by which actuaries complete the newest accident years (chain
ladder; Mack, 1993).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.compute import pc
from headrace.config import NamedSource, OutcomeLabel, Spec
from headrace.features.build.plan import pinned_table
from headrace.features.build.rows import as_features_see, source_table
from headrace.features.functions.arrays import one_chunk
from headrace.features.functions.spark_expressions import col
from headrace.features.functions.timestamps import DAY_MICROS, HOUR_MICROS, spark_micros
from headrace.features.types import declared
from headrace.lake.delta.with_spark import read_version
from headrace.quality.outcomes.served import ServedDay, section, sources
from headrace.stage import Context
from headrace.train.evaluation.bootstrap import NO_REPLICATES, Bootstrap, sum_by_cell
from headrace.train.evaluation.click import OF_PROBABILITIES, click_metrics
from headrace.train.evaluation.ranks import F64, I64, OVERALL, Dimension, Ranks, ScoredRows
from headrace.train.evaluation.request import NULL, hash_ids, make_dimension

#: Columns of a list that a table of scores may lack.
_OPTIONAL = {"arms": "string", "propensity": "double"}

#: Columns of the metrics, a row for each metric of a group.
SCHEMA = pa.schema(
    [
        ("served_ds", pa.string()),
        ("label", pa.string()),
        ("dimension", pa.string()),
        ("value", pa.string()),
        ("metric", pa.string()),
        ("estimate", pa.float64()),
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("rows", pa.int64()),
        ("users", pa.int64()),
        ("positives", pa.int64()),
    ]
)
#: Metrics of `click_metrics` -> their names in the table.
_CLICK = {"base_rate": "rate", "auc": "auc", "log_loss": "log_loss", "calibration": "calibration"}

#: Spark's names of the types in the metrics table.
_SQL = {pa.string(): "string", pa.float64(): "double", pa.int64(): "bigint"}


def outcome_rows(ctx: Context, spark: SparkSession, days: Sequence[ServedDay]) -> DataFrame:
    """Return the rows of the outcomes table for the day of the run.

    Returns:
        `ds`, the day of the run; `served_ds`, user, item, `rank`, `score`, `model_version`, `arms`, `propensity`;
        `shown_landed`, the landing day of the first event while the list was shown (null: there is none, where all
        rows count); for each label LABEL (0 or 1), LABEL_landed, the landing day with which it was known to be 1, and
        LABEL_ripe; slice_NAME of the first event while the list was shown.
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
    aggregates: list[Column] = [F.min(F.when(while_shown, F.col("__landed"))).alias("shown_landed")]
    for i, (name, label) in enumerate(outcomes.labels.items()):
        positive = F.col(f"__label{i}") & (age < label.within_days * DAY_MICROS)
        aggregates.append(F.min(F.when(positive, F.col("__landed"))).alias(f"{name}_landed"))
    for i, name in enumerate(outcomes.slices):
        first = F.min(F.when(while_shown, F.struct("__time", f"__slice{i}")))
        aggregates.append(first[f"__slice{i}"].alias(f"slice_{name}"))
    rows = joined.groupBy(*[col(c) for c in lists.columns]).agg(*aggregates)
    if outcomes.shown == "logged":
        rows = rows.where(F.col("shown_landed").isNotNull())
    labels: list[Column] = []
    for name in outcomes.labels:
        # A label is known when both events have landed: the impression and the action.
        landed = F.greatest(f"{name}_landed", "shown_landed")  # greatest() ignores nulls
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
    """Return the rows of all lists, with `served_ds`."""
    spec = ctx.spec
    assert spec.score is not None
    keys = [spec.score.user.key, spec.score.item.key]
    frames = []
    for day in days:

        def is_of_day(partition: Mapping[str, str | None], ds: str = day.ds) -> bool:
            return partition.get("ds") == ds

        rows = read_version(spark, ctx.ws.locate(day.table.name), int(day.table.version), is_of_day)
        optional = [
            (F.col(c) if c in rows.columns else F.lit(None)).cast(type_).alias(c) for c, type_ in _OPTIONAL.items()
        ]
        measure_day = rows.where(F.col("ds") == day.ds)
        frames.append(
            measure_day.select(
                F.lit(day.ds).alias("served_ds"), *[col(c) for c in keys], "rank", "score", "model_version", *optional
            )
        )
    return reduce(DataFrame.unionByName, frames)


def _events(ctx: Context, spark: SparkSession, days: Sequence[ServedDay], source: str | None) -> DataFrame:
    """Return the events since the first list was shown.

    Columns: `__user`, `__item`, `__time` (microseconds), `__landed`, `__main` and, by the position of labels and
    slices, __label0 (whether the event counts for it), __slice0.
    """
    spec, outcomes = ctx.spec, section(ctx.spec)
    assert spec.score is not None
    named_source = NamedSource(source=spec.source, table=spec.table) if source is None else spec.sources[source]
    # An event lands on its day or later, or a day earlier where the time zone's day begins before UTC's.
    first = (date.fromisoformat(days[0].ds) - timedelta(days=1)).isoformat()
    rows = _landed(ctx, spark, named_source, source, first)
    time = named_source.table.event_time
    assert time is not None
    (kind,) = [declared(c) for c in named_source.table.columns if c.name == time]
    labels = [
        _is_positive(spec, label) if label.from_ == source else F.lit(False) for label in outcomes.labels.values()
    ]
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


def _landed(ctx: Context, spark: SparkSession, named_source: NamedSource, source: str | None, first: str) -> DataFrame:
    """Return the pinned rows of a source that landed from a day on, up to the day of the run."""
    table_source = source_table(ctx, source)
    if table_source is not None:
        rows = table_source.rows(spark, [d for d in table_source.days if first <= d <= ctx.ds])
    else:
        pinned = pinned_table(ctx, source)

        def is_in_range(partition: Mapping[str, str | None]) -> bool:
            ds = partition.get("ds")
            return ds is not None and first <= ds <= ctx.ds

        rows = read_version(spark, ctx.ws.locate(pinned.name), int(pinned.version), is_in_range)
    return as_features_see(rows.where(F.col("ds").between(first, ctx.ds)), named_source.table.columns)


def _is_positive(spec: Spec, label: OutcomeLabel) -> Column:
    """Return the condition under which an event of the label's source counts."""
    column = label.column or (spec.features.label if label.from_ is None else None)
    if column is None:
        return F.lit(True)
    return F.coalesce(col(column).cast("double") > 0, F.lit(False))


def _start(served_ds: Column, after_hours: float) -> Column:
    """Return when the lists of a day are first shown, microseconds since 1970 (UTC)."""
    days = F.datediff(served_ds.cast("date"), F.lit("1970-01-01").cast("date")).cast("bigint")
    return (days + 1) * DAY_MICROS + round(after_hours * HOUR_MICROS)


@dataclass(frozen=True)
class Delays:
    """Events of ripe days by age: `counts[a]` became known `a` days after the served day."""

    counts: Mapping[int, int]

    @staticmethod
    def of_ripe_days(by_day: Mapping[str, Mapping[int, int]], last_ripe: str) -> Delays:
        """Add up the counts (served day -> age -> events) of the days up to `last_ripe`."""
        total: dict[int, int] = {}
        for served, ages in by_day.items():
            if served <= last_ripe:
                for age, count in ages.items():
                    total[age] = total.get(age, 0) + count
        return Delays(total)

    def known(self, age: int) -> float | None:
        """Return the share that is known after so many days, in [0, 1]; None where no ripe day had an event."""
        total = sum(self.counts.values())
        return sum(n for a, n in self.counts.items() if a <= age) / total if total else None

    def curve(self) -> list[float]:
        """Return `known` by age, from 0 up to the last age that has events; empty without any."""
        return [self.known(age) or 0.0 for age in range(max(self.counts, default=-1) + 1)]


def age_of(served: str, ds: str) -> int:
    """Return the days from a served day to another day."""
    return (date.fromisoformat(ds) - date.fromisoformat(served)).days


def final_rate(rate: float | None, known: float | None, shown_share: float | None) -> float | None:
    """Estimate the final rate, if the newest days' events arrive as those of the ripe days did.

    Args:
        rate: positives over rows, so far.
        known: the share of the positives that has arrived by now.
        shown_share: the share of the shown rows that has.
    """
    if rate is None or not known or not shown_share:
        return None
    return rate * shown_share / known


@dataclass(frozen=True)
class Measure:
    """Measurement of one served day: a task of Spark, called with the day's rows.

    labels: columns of 0 and 1; the scores are probabilities of the first. lengths: of lists, for hr_at_K.
    slices: columns of text, by name. most: values of a slice that get a group each.
    """

    user: str
    labels: tuple[str, ...]
    lengths: tuple[int, ...]
    slices: tuple[str, ...]
    most: int
    bootstrap: Bootstrap = NO_REPLICATES

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Measure the outcomes table's rows of one served day; return rows of SCHEMA.

        rate: share of the rows with the label; of clicks it is the click-through rate. auc, log_loss, calibration: of
        the score against the label (headrace.train.evaluation.click). hr_at_K: share of the users with the label on
        one of the first K items or more. Groups by dimension: `all`; `model`; `arm:EXPERIMENT`, by the arms in the
        column `arms`; `slice:NAME`.
        """
        ranks = Ranks()
        users = hash_ids(_numpy(rows[self.user]))
        scores = _numpy(rows["score"]).astype(np.float32)
        place = _numpy(rows["rank"]).astype(np.int64)
        dimensions, codes = self._groups(ranks, rows)
        is_probability = bool(np.all((scores >= 0) & (scores <= 1)))
        served_ds = rows["served_ds"][0].as_py() if rows.num_rows else ""
        records: list[dict[str, Any]] = []
        for number, label in enumerate(self.labels):
            positive = _numpy(rows[label]).astype(np.int64) > 0
            clicks = click_metrics(
                ranks,
                ScoredRows(scores, positive, users, tuple(codes)),
                dimensions=dimensions,
                bootstrap=self.bootstrap,
                probability=lambda p: np.asarray(p, np.float64),
            )
            everybody = [np.zeros(len(users), np.int64), *codes]
            for dimension, code, click in zip((OVERALL, *dimensions), everybody, clicks, strict=True):
                values = {_CLICK[name]: v for name, v in click.values.items() if name in _CLICK}
                if number or not is_probability:
                    values = {name: v for name, v in values.items() if name not in OF_PROBABILITIES}
                values |= self._hit_rates(ranks, dimension, code, users, positive, place)
                counts = _counts(dimension, code, users, positive)
                for segment, value in enumerate(dimension.values):
                    about = {"served_ds": served_ds, "label": label, "dimension": dimension.name or "all"}
                    about |= {"value": value, **{name: int(n[segment]) for name, n in counts.items()}}
                    records += [about | self._estimate(name, v[:, segment]) for name, v in values.items()]
        return pa.Table.from_pylist(records, SCHEMA)

    def _estimate(self, metric: str, values: F64) -> dict[str, Any]:
        """Return a metric of one group with its interval; values: float64 [1 + replicates], the estimate first."""
        low, high = (self.bootstrap.interval(values) if self.bootstrap.replicates else None) or (None, None)
        estimate = None if np.isnan(values[0]) else float(values[0])
        return {"metric": metric, "estimate": estimate, "low": low, "high": high}

    def _groups(self, ranks: Ranks, rows: pa.Table) -> tuple[list[Dimension], list[I64]]:
        """Return the dimensions of groups, and each row's group in them, -1 where it has none."""
        texts: dict[str, npt.NDArray[np.object_]] = {"model": _texts(rows["model_version"])}
        arms = _texts(rows["arms"])
        known, text_index = np.unique(arms.astype(str), return_inverse=True)
        by_text = [dict(part.partition("=")[::2] for part in text.split(",") if "=" in part) for text in known]
        for experiment in sorted({name for parts in by_text for name in parts}):
            values = np.array([parts.get(experiment, NULL) for parts in by_text], object)
            texts[f"arm:{experiment}"] = values[text_index]
        texts |= {f"slice:{name}": _texts(rows[f"slice_{name}"]) for name in self.slices}
        dimensions, codes = [], []
        for name, of_rows in texts.items():
            dimension, code = make_dimension(ranks, name, of_rows, self.most)
            if name.startswith("arm:"):
                # Users outside of an experiment belong to no arm.
                code = np.where(of_rows == NULL, -1, code)
                real_arms = [i for i, value in enumerate(dimension.values) if value != NULL]
                position = np.full(len(dimension.values) + 1, -1)
                position[real_arms] = np.arange(len(real_arms))
                dimension, code = Dimension(name, tuple(dimension.values[i] for i in real_arms)), position[code]
            dimensions.append(dimension)
            codes.append(code)
        return dimensions, codes

    def _hit_rates(
        self, ranks: Ranks, dimension: Dimension, code: I64, users: I64, positive: npt.NDArray[np.bool_], place: I64
    ) -> dict[str, F64]:
        """Return hr_at_K of each group: float64 [1 + replicates, groups]."""
        groups, rates = len(dimension.values), {}
        chosen = code >= 0
        distinct, index = np.unique(users[chosen], return_inverse=True)
        pair, pair_of_row = np.unique(code[chosen] * max(len(distinct), 1) + index, return_inverse=True)
        cell, user = pair // max(len(distinct), 1), distinct[pair % max(len(distinct), 1)] if len(pair) else users[:0]
        for k in self.lengths:
            hit = np.zeros(len(pair), bool)
            hit[pair_of_row[(positive & (place <= k))[chosen]]] = True
            integers = {"users": np.ones(len(pair), np.int64), "hits": hit.astype(np.int64)}
            sums = sum_by_cell(ranks, groups, cell, user, integers, {}, self.bootstrap)
            with np.errstate(invalid="ignore", divide="ignore"):
                rates[f"hr_at_{k}"] = sums["hits"] / sums["users"]
        return rates


def _counts(
    dimension: Dimension, code: I64, users: I64, positive: npt.NDArray[np.bool_]
) -> dict[str, npt.NDArray[np.int64]]:
    """Count rows, users and positives of each group."""
    groups, chosen = len(dimension.values), code >= 0
    distinct, index = np.unique(users[chosen], return_inverse=True)
    pairs = np.unique(code[chosen] * max(len(distinct), 1) + index)
    return {
        "rows": np.bincount(code[chosen], minlength=groups),
        "users": np.bincount(pairs // max(len(distinct), 1), minlength=groups),
        "positives": np.bincount(code[chosen & positive], minlength=groups),
    }


def _numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = one_chunk(column).to_numpy(zero_copy_only=False)
    return array


def _texts(column: pa.ChunkedArray) -> npt.NDArray[np.object_]:
    """Return values as text, `NULL` for nulls."""
    texts: npt.NDArray[np.object_] = _numpy(pc.fill_null(column, NULL))
    return texts.astype(object)


def concat_metrics(tables: Sequence[pa.Table]) -> pa.Table:
    """Concatenate the metrics of several days, sorted by day, label, dimension, value and metric."""
    keys = ("served_ds", "label", "dimension", "value", "metric")
    return pa.concat_tables(tables).sort_by([(key, "ascending") for key in keys])


def measure_days(ctx: Context, rows: DataFrame) -> pa.Table:
    """Measure each served day: one task per day."""
    outcomes = section(ctx.spec)
    assert ctx.spec.score is not None
    drawn = outcomes.bootstrap
    measure = Measure(
        user=ctx.spec.score.user.key,
        labels=tuple(outcomes.labels),
        lengths=outcomes.k,
        slices=tuple(outcomes.slices),
        most=outcomes.max_slices,
        bootstrap=NO_REPLICATES if drawn is None else Bootstrap(drawn.replicates, drawn.seed, drawn.confidence),
    )
    schema = ", ".join(f"{field.name} {_SQL[field.type]}" for field in SCHEMA)

    def measure_day(rows: pa.Table) -> pa.Table:  # Spark counts a callable object's `self`, too
        return measure(rows)

    return concat_metrics([rows.groupBy("served_ds").applyInArrow(measure_day, schema).toArrow().cast(SCHEMA)])


def by_age(rows: DataFrame, name: str) -> dict[str, dict[int, int]]:
    """Count impressions or a label's positives by served day and by the days until they were known."""
    counts: dict[str, dict[int, int]] = {}
    landed = rows.where(f"`{name}_landed` IS NOT NULL").groupBy("served_ds", f"{name}_landed").count()
    for served, day, count in landed.collect():
        counts.setdefault(served, {})[age_of(served, day)] = count
    return counts


def completed_metrics(
    ctx: Context, metrics: pa.Table, counts: Mapping[str, Mapping[str, Mapping[int, int]]]
) -> list[dict[str, Any]]:
    """Add to each metric whether it is ripe, the share of positives known so far, and the expected final rate."""
    spec = ctx.spec
    last = {name: spec.last_ripe_day(name, ctx.ds) for name in section(spec).labels}
    delays = {name: Delays.of_ripe_days(counts[name], day) for name, day in last.items()}
    shown_delays = {name: Delays.of_ripe_days(counts["shown"], day) for name, day in last.items()}
    records = []
    for record in metrics.to_pylist():
        label, age = record["label"], age_of(record["served_ds"], ctx.ds)
        ripe = record["served_ds"] <= last[label]
        known = 1.0 if ripe else delays[label].known(age)
        expected = None
        if record["metric"] == "rate":
            # Where all rows count, none is missing.
            rows = 1.0 if ripe or section(spec).shown == "all" else shown_delays[label].known(age)
            expected = final_rate(record["estimate"], known, rows)
        records.append(record | {"ripe": ripe, "known": known, "expected": expected})
    return records


def metrics_frame(spark: SparkSession, ds: str, records: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Return the rows of the metrics table as a frame."""
    columns = {f.name: _SQL[f.type] for f in SCHEMA} | {"ripe": "boolean", "known": "double", "expected": "double"}
    schema = "ds string, " + ", ".join(f"{name} {type_}" for name, type_ in columns.items())
    return spark.createDataFrame([(ds, *(r[name] for name in columns)) for r in records], schema).coalesce(1)
