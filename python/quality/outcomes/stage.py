"""Stage `outcomes`: lists of earlier days with the events that followed, one commit to each of two Delta tables.

Metrics of the last ripe day are checked against the limits of `outcomes.alerts`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headrace.config import OutcomeAlert, Outcomes, Spec
from headrace.errors import RefusedError, UserError
from headrace.features.build.plan import pinned_table
from headrace.lake.delta.day_table import rows_of_day, verify_day, write_day
from headrace.quality.outcomes.served import Served, pinned_days, section, served_days, sources
from headrace.stage import Context, Result, Stage
from headrace.stage.manifest import Input, Manifest, Output

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("headrace.outcomes")

#: A row of the metrics: the columns of headrace.quality.outcomes.measure.SCHEMA, and `ripe`.
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Alert:
    """Metric beyond its limit."""

    served_ds: str
    label: str
    metric: str
    dimension: str
    value: str
    #: The metric's value; for `max_drop` its fall, as a share of the mean of earlier days.
    figure: float
    limit: float
    #: min, max, max_drop or min_rows; for min_rows the figure is the number of rows that were shown.
    kind: str
    action: str
    #: The limit's key in the spec.
    key: str

    def fact(self) -> dict[str, Any]:
        """Return the alert as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        if self.kind == "min_rows":
            few = f"{self.figure:.0f} rows served on {self.served_ds} were shown, fewer than {self.limit:g}"
            return f"{self.label}: {few} ({self.key})"
        group = "" if self.dimension == "all" else f" of {self.dimension} {self.value}"
        texts = {
            "min": f"is {self.figure:.4g}, below {self.limit:g}",
            "max": f"is {self.figure:.4g}, above {self.limit:g}",
            "max_drop": f"is {100 * self.figure:.3g} % below the mean of the ripe days before, "
            f"the limit is {100 * self.limit:g} %",
        }
        return f"{self.label} {self.metric}{group}, served on {self.served_ds}, {texts[self.kind]} ({self.key})"


def judge(
    records: Sequence[Record], outcomes: Outcomes, last_ripe: Mapping[str, str], served: Collection[str]
) -> list[Alert]:
    """Check the last ripe day of each label against the limits; a day with too few shown rows is an alert itself.

    Args:
        records: metrics of several served days.
        outcomes: the section.
        last_ripe: by label, the day to check.
        served: the days that have lists.
    """
    alerts: list[Alert] = []
    for number, limit in enumerate(outcomes.alerts):
        label = limit.label or next(iter(outcomes.labels))
        day, key = last_ripe[label], f"outcomes.alerts[{number}]"
        of_label = [r for r in records if r["label"] == label]
        rows_shown = max((r["rows"] for r in of_label if r["served_ds"] == day and r["dimension"] == "all"), default=0)
        if day in served and rows_shown < limit.min_rows:
            alerts.append(
                Alert(
                    served_ds=day,
                    label=label,
                    metric=limit.metric,
                    dimension="all",
                    value="",
                    figure=float(rows_shown),
                    limit=float(limit.min_rows),
                    kind="min_rows",
                    action=limit.action,
                    key=f"{key}.min_rows",
                )
            )
            continue
        of_metric = [r for r in of_label if r["metric"] == limit.metric and r["dimension"] == limit.by and r["ripe"]]
        for record in of_metric:
            if record["served_ds"] == day and record["rows"] >= limit.min_rows and record["estimate"] is not None:
                earlier = [
                    r["estimate"]
                    for r in of_metric
                    if r["value"] == record["value"] and r["served_ds"] < day and r["estimate"] is not None
                ]
                alerts += _broken(record, earlier, limit, key)
    return alerts


def _broken(record: Record, earlier: Sequence[float], limit: OutcomeAlert, key: str) -> list[Alert]:
    figure = record["estimate"]
    about = {name: record[name] for name in ("served_ds", "label", "metric", "dimension", "value")}
    broken: list[tuple[str, float, float]] = []
    if limit.min is not None and figure < limit.min:
        broken.append(("min", figure, limit.min))
    if limit.max is not None and figure > limit.max:
        broken.append(("max", figure, limit.max))
    mean = sum(earlier) / len(earlier) if earlier else 0.0
    if limit.max_drop is not None and mean > 0 and (drop := 1 - figure / mean) > limit.max_drop:
        broken.append(("max_drop", drop, limit.max_drop))
    return [
        Alert(**about, figure=figure_, limit=limit_, kind=kind, action=limit.action, key=f"{key}.{kind}")
        for kind, figure_, limit_ in broken
    ]


class MeasureOutcomes(Stage):
    """Stage that joins the lists of earlier days with the events that had landed by the day, and measures them."""

    name = "outcomes"
    version = 1
    needs: tuple[str, ...] = ("ingest",)

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """Return the section, and the keys that decide when a label is ripe and what a list's row is."""
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
        """Return the events at ingest's versions, and the lists of earlier days at their manifests' versions."""
        pinned = [pinned_table(ctx, source) for source in sources(ctx.spec)]
        events = [Input(kind=o.kind, name=o.name, version=o.version) for o in pinned]
        return (*events, *(day.input for day in served_days(ctx).days))

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Check that both tables still have the day at their versions, and that its files exist."""
        for output in manifest.outputs:
            if reason := verify_day(ctx.ws, output, ctx.ds):
                return reason
        return None

    def run(self, ctx: Context) -> Result:
        """Join, measure, check and commit.

        Raises:
            UserError: a slice is no expression over the events' columns.
            RefusedError: an alert with `action: stop`.
        """
        served = pinned_days(ctx)
        if served.late:
            log.warning("outcomes: lists of %s were published too late to be shown", ", ".join(served.late))
        if not served.days:
            log.info("outcomes: no list was served before %s", ctx.ds)
            return Result(
                rows={"days": 0, "late_days": len(served.late), "shown": 0, "alerts": 0},
                facts={"late_days": served.late, "days": [], "groups": [], "alerts": []},
            )
        from headrace.lake.spark.session import session

        with session(ctx.spec.spark, ctx.ws, f"outcomes {ctx.spec.pipeline} {ctx.ds}") as spark:
            return _run(ctx, served, spark)


def _run(ctx: Context, served: Served, spark: SparkSession) -> Result:
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as F

    from headrace.lake.delta.with_spark import read_version
    from headrace.quality.outcomes.measure import (
        Delays,
        by_age,
        completed_metrics,
        measure_days,
        metrics_frame,
        outcome_rows,
    )

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
    day_rows = read_version(spark, table, version, lambda partition: partition["ds"] == ctx.ds).where(
        F.col("ds") == ctx.ds
    )
    counts = {name: by_age(day_rows, name) for name in ("shown", *outcomes.labels)}
    records = completed_metrics(ctx, measure_days(ctx, day_rows), counts)
    ripe = {name: spec.last_ripe_day(name, ctx.ds) for name in outcomes.labels}
    alerts = judge(records, outcomes, ripe, {day.ds for day in days})
    metrics = ctx.ws.table(spec.pipeline, "outcome_metrics")
    metrics_version = write_day(metrics_frame(spark, ctx.ds, records), metrics, ctx, "outcomes")
    for alert in alerts:
        log.warning("outcomes: %s", alert)
    if stops := [alert for alert in alerts if alert.action == "stop"]:
        listing = "\n".join(f"  {alert}" for alert in stops)
        raise RefusedError(
            f"outcomes of '{spec.pipeline}' stop {ctx.ds}: nothing was trained, scored or published. Beyond a limit:\n"
            f"{listing}\nThe figures are in {ctx.ws.name_of(metrics)} (ds = '{ctx.ds}'). To go on, set action: warn"
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
            "days": [r for r in records if r["dimension"] == "all"],
            "groups": [
                r for r in records if r["dimension"] != "all" and r["served_ds"] == _groups_day(records, r["label"])
            ],
            "delays": {
                name: Delays.of_ripe_days(by_day, ripe[name]).curve() for name, by_day in counts.items() if name in ripe
            },
            "alerts": [alert.fact() for alert in alerts],
        },
    )


def _groups_day(records: Sequence[Mapping[str, Any]], label: str) -> str:
    """Return the day whose groups the manifest lists: the newest ripe one, or the newest while none is ripe."""
    days = {r["served_ds"]: r["ripe"] for r in records if r["label"] == label}
    return max((ds for ds, ripe in days.items() if ripe), default=max(days, default=""))
