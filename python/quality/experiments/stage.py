"""Stage `experiments`: figures of each experiment by the day; a losing arm is stopped where the spec says so."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from headrace.config import Experiment, Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.quality.experiments.comparison import (
    Arm,
    ArmDifference,
    ServedOutcomes,
    Totals,
    always_valid_interval,
    always_valid_p,
    difference,
    first_day,
    sample_ratio_p,
    served_outcomes,
)
from headrace.score.assignment import RULE, Stop, all_stopped, stop_arm, stopped
from headrace.stage import Context, Result, Stage
from headrace.stage.manifest import Input, Manifest, fingerprint

log = logging.getLogger("headrace.experiments")

#: Below it the users of the arms are not those that were sent there (see headrace.quality.experiments.comparison).
SAMPLE_RATIO_LIMIT = 0.001
_CONCLUSIONS = ("better", "worse")


def figures(
    spec: Spec, name: str, experiment: Experiment, totals: Totals, ds: str, stops: Mapping[str, Stop]
) -> dict[str, Any]:
    """Compute the figures of an experiment, as JSON values: arms, differences by day and in total, conclusions.

    Totals are of the days whose label is ripe; an arm that was stopped is compared with the control of its own days.

    Args:
        spec: the pipeline.
        name: the experiment's name.
        experiment: its section.
        totals: totals of its users, by day.
        ds: the day of the run.
        stops: records of its stopped arms.
    """
    assert spec.outcomes is not None
    label = experiment.label or next(iter(spec.outcomes.labels))
    known = totals.of_days(totals.ripe_days)
    control = experiment.control_arm
    scale = _scale(experiment, known)
    shares, first_stop = experiment.shares, min((s.ds for s in stops.values()), default=None)
    together = totals.of_days([served for served in totals.days if first_stop is None or served < first_stop])
    users = {arm: together.counts(arm)["users"] for arm in experiment.arms}
    p = sample_ratio_p(list(users.values()), [shares[arm] for arm in users])
    return {
        "name": name,
        "ds": ds,
        "state": _state(experiment, ds, stops),
        "label": label,
        "metric": experiment.metric,
        "lower_is_better": experiment.lower_is_better,
        "control": control,
        "start": experiment.start,
        "end": experiment.end,
        "percent": experiment.percent,
        "confidence": experiment.confidence,
        "min_users": experiment.min_users,
        "days": list(totals.days),
        "ripe_days": list(totals.ripe_days),
        "moved_users": totals.moved,
        "sample_ratio": {"users": users, "p": p, "ok": p >= SAMPLE_RATIO_LIMIT},
        "expected_effect": scale,
        "arms": {
            arm: {
                "model": arm_spec.model,
                "share": shares[arm],
                **_value(experiment, known, arm),
                "stopped": None if arm not in stops else stops[arm].model_dump(mode="json"),
            }
            for arm, arm_spec in experiment.arms.items()
        },
        "differences": {arm: _against(experiment, known, arm, scale) for arm in experiment.treatments},
        "by_day": [_day(experiment, totals, served) for served in totals.days],
    }


def losing(experiment: Experiment, summary: Mapping[str, Any]) -> list[str]:
    """Return the arms that the rule `stop` stops; summary: from `figures`."""
    rule = experiment.stop
    if rule is None or not summary["sample_ratio"]["ok"]:
        return []
    arms = []
    for arm, result in summary["differences"].items():
        if summary["arms"][arm]["stopped"] is not None or result is None or result["conclusion"] == "too few users":
            continue
        low, high = result["sequential"]["low"], result["sequential"]["high"]
        worse = low is not None and (low > rule.worse_than if experiment.lower_is_better else high < -rule.worse_than)
        if worse and len(result["days"]) >= rule.min_days:
            arms.append(arm)
    return arms


def _state(experiment: Experiment, ds: str, stops: Mapping[str, Stop]) -> str:
    # The lists of a day are shown from its end on: those of `ds` are the newest there can be.
    if experiment.start is not None and ds < experiment.start:
        return "planned"
    if all(arm in stops for arm in experiment.treatments):
        return "stopped"
    return "ended" if experiment.end is not None and ds > experiment.end else "running"


def _value(experiment: Experiment, totals: Totals, arm: str) -> dict[str, Any]:
    """Return counts and the metric's value, None without rows."""
    counts = totals.counts(arm)
    below = counts["users"] if experiment.metric == "per_user" else counts["rows"]
    return {**counts, "value": counts["positives"] / below if below else None}


def _scale(experiment: Experiment, known: Totals) -> float | None:
    """Return the expected effect, in the metric's unit: fixed by what is known before the second look.

    None while nothing is known.
    """
    if known.before_below.sum() > 0:
        below = (known.before_below > 0).sum() if experiment.metric == "per_user" else known.before_below.sum()
        value = float(known.before_above.sum() / below)
    else:
        days = known.served_on(experiment.control_arm)
        first_value = _value(experiment, known.of_days(days[:1]), experiment.control_arm)["value"]
        value = first_value or 0.0
    return experiment.expected_effect * value or None


def _compared(experiment: Experiment, totals: Totals, arm: str, *, known_before: bool) -> ArmDifference | None:
    """Compare an arm with the control; return None where one has less than two users."""
    per_user = experiment.metric == "per_user"
    sides: list[Arm] = [
        totals.of_arm(side, per_user=per_user, known_before=known_before) for side in (experiment.control_arm, arm)
    ]
    return None if min(len(side.above) for side in sides) < 2 else difference(*sides)


def _against(experiment: Experiment, known: Totals, arm: str, scale: float | None) -> dict[str, Any] | None:
    """Compare an arm with the control over the days of both; return None before there are any."""
    days = [ds for ds in known.served_on(arm) if ds in set(known.served_on(experiment.control_arm))]
    looks = [_compared(experiment, known.of_days(days[: i + 1]), arm, known_before=True) for i in range(len(days))]
    last_look = looks[-1] if looks else None
    if last_look is None:
        return None
    plain = _compared(experiment, known.of_days(days), arm, known_before=False)
    assert plain is not None, "the arm has users"
    many = len(experiment.treatments)
    together = 1 - (1 - experiment.confidence) / many  # so that all intervals hold together (Bonferroni)
    low, high = (None, None) if scale is None else map(_finite, always_valid_interval(last_look, scale, together))
    p = 1.0 if scale is None else min(always_valid_p(look, scale) for look in looks if look is not None)
    fewest = min(known.of_days(days).counts(compared_arm)["users"] for compared_arm in (arm, experiment.control_arm))
    return {
        "days": days,
        "control": last_look.control,
        "treatment": last_look.treatment,
        "estimate": last_look.estimate,
        "relative": last_look.estimate / last_look.control if last_look.control else None,
        **_interval(last_look, experiment.confidence),
        "plain": {"estimate": plain.estimate, **_interval(plain, experiment.confidence)},
        "variance_ratio": last_look.variance_ratio,
        "sequential": {"low": low, "high": high, "p": min(1.0, p * many), "confidence": together},
        "conclusion": _conclusion(experiment, fewest, low, high),
    }


def _conclusion(experiment: Experiment, fewest: int, low: float | None, high: float | None) -> str:
    if fewest < experiment.min_users:
        return "too few users"
    if low is not None and high is not None and (low > 0 or high < 0):
        return _CONCLUSIONS[(high < 0) != experiment.lower_is_better]
    return "undecided"


def _day(experiment: Experiment, totals: Totals, served: str) -> dict[str, Any]:
    day_totals = totals.of_days([served])
    differences = {}
    for arm in experiment.treatments:
        result = _compared(experiment, day_totals, arm, known_before=False)
        differences[arm] = (
            None if result is None else {"estimate": result.estimate, **_interval(result, experiment.confidence)}
        )
    arms = {arm: _value(experiment, day_totals, arm) for arm in experiment.arms}
    return {"served_ds": served, "ripe": served in totals.ripe_days, "arms": arms, "differences": differences}


def _interval(arm_difference: ArmDifference, confidence: float) -> dict[str, float]:
    low, high = arm_difference.interval(confidence)
    return {"low": low, "high": high}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class JudgeExperiments(Stage):
    """Stage that compares the arms of each experiment and stops those that lose, from this day's scores on."""

    name = "experiments"
    version = 1
    needs: tuple[str, ...] = ("outcomes",)

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """Return the section, and which rows count."""
        assert spec.score is not None
        assert spec.outcomes is not None
        return {
            "experiments": {name: experiment.model_dump(mode="json") for name, experiment in section(spec).items()},
            "ripe": {name: spec.days_until_ripe(name) for name in spec.outcomes.labels},
            "user": spec.score.user.key,
        }

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Return the outcomes as their runs have them, and the arms that were stopped before."""
        tables = {
            served_day.input for served in _served(ctx).values() for served_day in served if served_day.run_ds != ctx.ds
        }
        stops = [
            stop
            for name, experiment in section(ctx.spec).items()
            for stop in stops_before(ctx, name, experiment).values()
        ]
        version = fingerprint({"stops": sorted((s.experiment, s.arm, s.ds) for s in stops)})
        return (
            *sorted(tables, key=lambda i: int(i.version)),
            Input(kind="stopped_arms", name=f"experiments/{ctx.spec.pipeline}", version=version),
        )

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Check that the arms stopped by this run, or before it from its day on, are still recorded as such."""
        for summary in manifest.facts["experiments"]:
            from_now = [
                arm
                for arm, arm_facts in summary["arms"].items()
                if arm_facts["stopped"] and arm_facts["stopped"]["ds"] == ctx.ds
            ]
            for arm in {*summary["stopped_now"], *from_now}:
                if stopped(ctx.ws, ctx.spec.pipeline, summary["name"], arm) is None:
                    return f"{ctx.ws.stopped_arm(ctx.spec.pipeline, summary['name'], arm)} is gone"
        return None

    def run(self, ctx: Context) -> Result:
        """Compare the arms and stop losing ones.

        Raises:
            UserError: outcomes were made again in the meantime, or their files are gone.
        """
        summaries = []
        for name, served in _served(ctx).items():
            if any(served_day.run_ds != ctx.ds and served_day.input not in ctx.inputs for served_day in served):
                raise UserError("outcomes have been made again in the meantime: run the stage experiments again")
            experiment = section(ctx.spec)[name]
            summary = known_of(ctx.ws, ctx.spec, name, experiment, ctx.ds, served, stops_before(ctx, name, experiment))
            if not summary["sample_ratio"]["ok"]:
                log.warning(
                    "experiment %s: users of the arms are not those that were sent there (p %.2g): no difference can "
                    "be believed",
                    name,
                    summary["sample_ratio"]["p"],
                )
            lost = losing(experiment, summary)
            for arm in lost:
                reason = _reason(experiment, summary["differences"][arm])
                # A run that is killed after this line: the next one decides the same, and finds this record.
                stop_arm(ctx.ws, ctx.spec.pipeline, _stop(name, arm, ctx.ds, reason, summary["differences"][arm]))
                log.warning("experiment %s: arm %s is stopped: %s", name, arm, reason)
            for arm, stop in _stopped_from(ctx, name, experiment).items():
                # Includes stops by an earlier run of the day from other outcomes: the lists obey them.
                summary["arms"][arm]["stopped"] = stop.model_dump(mode="json")
            summaries.append({**summary, "stopped_now": lost})
        running = sum(summary["state"] == "running" for summary in summaries)
        return Result(
            rows={"running": running, "stopped": sum(len(summary["stopped_now"]) for summary in summaries)},
            facts={"experiments": summaries},
        )


def known_of(
    ws: Workspace,
    spec: Spec,
    name: str,
    experiment: Experiment,
    ds: str,
    served: list[ServedOutcomes],
    stops: Mapping[str, Stop],
) -> dict[str, Any]:
    """Return the figures of an experiment by a day; see `figures`."""
    return figures(spec, name, experiment, Totals.read(ws, spec, name, experiment, served), ds, stops)


def section(spec: Spec) -> Mapping[str, Experiment]:
    """Return the section, which every pipeline with the stage has."""
    assert spec.experiments is not None, "headrace.config.stages: no stage without the section"
    return spec.experiments


def stops_before(ctx: Context, name: str, experiment: Experiment) -> dict[str, Stop]:
    """Return the arms that were stopped before the day, or by hand on it."""
    stops = all_stopped(ctx.ws, ctx.spec.pipeline, name, experiment.arms)
    return {a: s for a, s in stops.items() if s.ds < ctx.ds or (s.ds == ctx.ds and s.by != RULE)}


def _stopped_from(ctx: Context, name: str, experiment: Experiment) -> dict[str, Stop]:
    """Return the arms that were stopped from the day on, by a user or the rule."""
    stops = all_stopped(ctx.ws, ctx.spec.pipeline, name, experiment.arms)
    return {arm: stop for arm, stop in stops.items() if stop.ds == ctx.ds}


def _served(ctx: Context) -> dict[str, list[ServedOutcomes]]:
    """Return by experiment the outcomes of its served days."""
    return {
        name: served_outcomes(ctx.ws, ctx.spec, ctx.ds, first_day(experiment))
        for name, experiment in section(ctx.spec).items()
    }


def _reason(experiment: Experiment, result: Mapping[str, Any]) -> str:
    assert experiment.stop is not None
    bounds = result["sequential"]
    unit = "rate" if experiment.metric == "rate" else "per user"
    margin = f" by more than {experiment.stop.worse_than:g}" if experiment.stop.worse_than else ""
    return (
        f"surely worse than {experiment.control_arm}{margin}: {unit} {result['treatment']:.4f}, the control's "
        f"{result['control']:.4f}, sequential interval of the difference {bounds['low']:.4f} to {bounds['high']:.4f} "
        f"after {len(result['days'])} days"
    )


def _stop(name: str, arm: str, ds: str, reason: str, result: Mapping[str, Any]) -> Stop:
    return Stop(experiment=name, arm=arm, ds=ds, by=RULE, at=datetime.now(UTC), reason=reason, figures=dict(result))
