"""The stage `outcomes`: lists of earlier days beside what followed, one commit to each of two Delta tables."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.config import Spec
from headrace.errors import RefusedError, UserError
from headrace.features.build.events import pinned_table
from headrace.lake.delta.frame import read_version
from headrace.lake.session import session
from headrace.manifest import Input, Manifest, Output
from headrace.outcomes.alerts import judge
from headrace.outcomes.delays import Delays, age_of, final_rate
from headrace.outcomes.measure import SCHEMA, Measure, measured
from headrace.outcomes.served import Served, pinned_days, section, served_days
from headrace.score.day_table import rows_of_day, verify_day, write_day
from headrace.stage import Context, Result, Stage
from headrace.train.evaluation.bootstrap import NO_REPLICATES, Bootstrap

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("headrace.outcomes")

#: Of the metrics table, Spark's names of types.
_SQL = {pa.string(): "string", pa.float64(): "double", pa.int64(): "bigint"}


class MeasureOutcomes(Stage):
    """Join the lists of earlier days with the events that had landed by the day, and measure them."""

    name = "outcomes"
    version = 1
    needs: tuple[str, ...] = ("ingest",)

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """The section, and what says when a label is ripe and what a row of a list is."""
        outcomes = section(spec)
        assert spec.score is not None
        return {
            "outcomes": outcomes.model_dump(mode="json"),
            "ripe": {name: spec.days_until_ripe(name) for name in outcomes.labels},
            "label": spec.features.label,
            "event_time": spec.table.event_time,
            "user": spec.score.user.key,
            "item": spec.score.item.key,
        }

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """The events at ingest's versions, and the lists of earlier days as their manifests have them."""
        from headrace.outcomes.join import sources

        pinned = [pinned_table(ctx, source) for source in sources(ctx.spec)]
        events = [Input(kind=o.kind, name=o.name, version=o.version) for o in pinned]
        return (*events, *(day.input for day in served_days(ctx).days))

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Both tables still have the day at their versions, and its files are there."""
        for output in manifest.outputs:
            if reason := verify_day(ctx.ws, output, ctx.ds):
                return reason
        return None

    def run(self, ctx: Context) -> Result:
        """See the class.

        Raises:
            UserError: a slice is no expression over the events' columns.
            RefusedError: an alert with `action: stop`.
        """
        served = pinned_days(ctx)
        if served.late:
            log.warning("outcomes: published when they could no longer be shown: lists of %s", ", ".join(served.late))
        if not served.days:
            log.info("outcomes: no list was served before %s", ctx.ds)
            return Result(
                rows={"days": 0, "late_days": len(served.late), "shown": 0, "alerts": 0},
                facts={"late_days": served.late, "days": [], "groups": [], "alerts": []},
            )
        with session(ctx.spec.spark, ctx.ws, f"outcomes {ctx.spec.pipeline} {ctx.ds}") as spark:
            return _run(ctx, served, spark)


def _run(ctx: Context, served: Served, spark: SparkSession) -> Result:
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as F

    from headrace.outcomes.join import outcome_rows

    spec, outcomes, days = ctx.spec, section(ctx.spec), served.days
    try:
        rows = outcome_rows(ctx, spark, days)
    except AnalysisException as e:
        raise UserError(
            f"outcomes of {ctx.ds} cannot be joined ({str(e).splitlines()[0]}): look at outcomes.slices and the columns"
        ) from None
    table = ctx.ws.table(spec.pipeline, "outcomes")
    version = write_day(rows, table, ctx, "outcomes")
    written = Output(
        kind="delta", name=ctx.ws.name_of(table), version=str(version), rows=rows_of_day(table, version, ctx.ds)
    )
    mine = read_version(spark, table, version, lambda of: of["ds"] == ctx.ds).where(F.col("ds") == ctx.ds)
    counts = {name: _by_age(mine, name) for name in ("shown", *outcomes.labels)}
    found = _completed(ctx, _measured(ctx, mine), counts)
    ripe = {name: spec.last_ripe_day(name, ctx.ds) for name in outcomes.labels}
    alerts = judge(found, outcomes, ripe, {day.ds for day in days})
    metrics = ctx.ws.table(spec.pipeline, "outcome_metrics")
    metrics_version = write_day(_frame(spark, ctx.ds, found), metrics, ctx, "outcomes")
    for alert in alerts:
        log.warning("outcomes: %s", alert)
    if stops := [alert for alert in alerts if alert.action == "stop"]:
        told = "\n".join(f"  {alert}" for alert in stops)
        raise RefusedError(
            f"outcomes of '{spec.pipeline}' stop {ctx.ds}: nothing was trained, scored or published. Beyond a limit:\n"
            f"{told}\nThe figures are in {ctx.ws.name_of(metrics)} (ds = '{ctx.ds}'). To go on, set action: warn"
        )
    log.info("outcomes: %s rows shown of %d days, %d alerts", f"{written.rows:,}", len(days), len(alerts))
    return Result(
        outputs=(
            written,
            Output(
                kind="delta",
                name=ctx.ws.name_of(metrics),
                version=str(metrics_version),
                rows=rows_of_day(metrics, metrics_version, ctx.ds),
            ),
        ),
        rows={
            "served": sum(day.table.rows or 0 for day in days),
            "shown": written.rows or 0,
            "days": len(days),
            "late_days": len(served.late),
            "alerts": len(alerts),
        },
        facts={
            "last_ripe_day": ripe,
            "late_days": served.late,
            "days": [r for r in found if r["dimension"] == "all"],
            "groups": [r for r in found if r["dimension"] != "all" and r["served_ds"] == _told(found, r["label"])],
            "delays": {name: Delays.of(by_day, ripe[name]).curve() for name, by_day in counts.items() if name in ripe},
            "alerts": [alert.fact() for alert in alerts],
        },
    )


def _told(found: Sequence[Mapping[str, Any]], label: str) -> str:
    """The day whose groups a manifest tells: the newest that is ripe; while none is, the newest."""
    days = {r["served_ds"]: r["ripe"] for r in found if r["label"] == label}
    return max((ds for ds, ripe in days.items() if ripe), default=max(days, default=""))


def _measured(ctx: Context, rows: DataFrame) -> pa.Table:
    """The metrics of each served day: one task a day."""
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

    def of_day(rows: pa.Table) -> pa.Table:  # Spark counts the parameters, and of a callable object `self`, too
        return measure(rows)

    return measured([rows.groupBy("served_ds").applyInArrow(of_day, schema).toArrow().cast(SCHEMA)])


def _by_age(rows: DataFrame, name: str) -> dict[str, dict[int, int]]:
    """Served day -> days until it was known -> how many: of what was shown, or of a label's positives."""
    found: dict[str, dict[int, int]] = {}
    landed = rows.where(f"`{name}_landed` IS NOT NULL").groupBy("served_ds", f"{name}_landed").count()
    for served, day, count in landed.collect():
        found.setdefault(served, {})[age_of(served, day)] = count
    return found


def _completed(
    ctx: Context, metrics: pa.Table, counts: Mapping[str, Mapping[str, Mapping[int, int]]]
) -> list[dict[str, Any]]:
    """The metrics with whether they are ripe, the share of the positives that has come, and the rate to be expected."""
    spec = ctx.spec
    last = {name: spec.last_ripe_day(name, ctx.ds) for name in section(spec).labels}
    delays = {name: Delays.of(counts[name], day) for name, day in last.items()}
    shown = {name: Delays.of(counts["shown"], day) for name, day in last.items()}
    found = []
    for record in metrics.to_pylist():
        label, age = record["label"], age_of(record["served_ds"], ctx.ds)
        ripe = record["served_ds"] <= last[label]
        known = 1.0 if ripe else delays[label].known(age)
        expected = None
        if record["metric"] == "rate":
            # Where all rows count, none of them is still to come.
            rows = 1.0 if ripe or section(spec).shown == "all" else shown[label].known(age)
            expected = final_rate(record["estimate"], known, rows)
        found.append(record | {"ripe": ripe, "known": known, "expected": expected})
    return found


def _frame(spark: SparkSession, ds: str, records: Sequence[Mapping[str, Any]]) -> DataFrame:
    """The rows of the metrics table."""
    columns = {f.name: _SQL[f.type] for f in SCHEMA} | {"ripe": "boolean", "known": "double", "expected": "double"}
    schema = "ds string, " + ", ".join(f"{name} {type_}" for name, type_ in columns.items())
    return spark.createDataFrame([(ds, *(r[name] for name in columns)) for r in records], schema).coalesce(1)
