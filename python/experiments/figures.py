"""What is known of an experiment by a day: arms, differences by day and in total, whether arms can be told apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headrace.config import Experiment, Spec
from headrace.experiments.difference import Arm, Difference, difference
from headrace.experiments.ratio import sample_ratio_p
from headrace.experiments.sequential import always_valid_interval, always_valid_p
from headrace.experiments.stops import Stop
from headrace.experiments.totals import Totals

#: Below it the users of the arms are not those that were sent there (see headrace.experiments.ratio).
SAMPLE_RATIO_LIMIT = 0.001
_CONCLUSIONS = ("better", "worse")


def figures(
    spec: Spec, name: str, experiment: Experiment, totals: Totals, ds: str, stops: Mapping[str, Stop]
) -> dict[str, Any]:
    """All of it, as JSON values.

    Totals are of the days whose label is ripe; an arm that was stopped is held against the control of its own days.

    Args:
        spec: the pipeline.
        name: of the experiment.
        experiment: its section.
        totals: of its users, by day.
        ds: the day of the run that knows of them.
        stops: its arms that were stopped.
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
                "model": given.model,
                "share": shares[arm],
                **_value(experiment, known, arm),
                "stopped": None if arm not in stops else stops[arm].model_dump(mode="json"),
            }
            for arm, given in experiment.arms.items()
        },
        "differences": {arm: _against(experiment, known, arm, scale) for arm in experiment.treatments},
        "by_day": [_day(experiment, totals, served) for served in totals.days],
    }


def losing(experiment: Experiment, found: Mapping[str, Any]) -> list[str]:
    """The arms that the rule `stop` takes away, of what `figures` says."""
    rule = experiment.stop
    if rule is None or not found["sample_ratio"]["ok"]:
        return []
    arms = []
    for arm, told in found["differences"].items():
        if found["arms"][arm]["stopped"] is not None or told is None or told["conclusion"] == "too few users":
            continue
        low, high = told["sequential"]["low"], told["sequential"]["high"]
        worse = low is not None and (low > rule.worse_than if experiment.lower_is_better else high < -rule.worse_than)
        if worse and len(told["days"]) >= rule.min_days:
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
    """Counts, and the metric: None of nobody."""
    counts = totals.counts(arm)
    below = counts["users"] if experiment.metric == "per_user" else counts["rows"]
    return {**counts, "value": counts["positives"] / below if below else None}


def _scale(experiment: Experiment, known: Totals) -> float | None:
    """The effect that is expected, in the metric's unit: fixed by what is known before the second look.

    None while nothing is known.
    """
    if known.before_below.sum() > 0:
        below = (known.before_below > 0).sum() if experiment.metric == "per_user" else known.before_below.sum()
        value = float(known.before_above.sum() / below)
    else:
        days = known.served_on(experiment.control_arm)
        told = _value(experiment, known.of_days(days[:1]), experiment.control_arm)["value"]
        value = told or 0.0
    return experiment.expected_effect * value or None


def _compared(experiment: Experiment, totals: Totals, arm: str, *, known_before: bool) -> Difference | None:
    """None where one of both has less than two users."""
    per_user = experiment.metric == "per_user"
    sides: list[Arm] = [
        totals.of_arm(of, per_user=per_user, known_before=known_before) for of in (experiment.control_arm, arm)
    ]
    return None if min(len(side.above) for side in sides) < 2 else difference(*sides)


def _against(experiment: Experiment, known: Totals, arm: str, scale: float | None) -> dict[str, Any] | None:
    """An arm held against the control, over the days of both; None before there are any."""
    days = [ds for ds in known.served_on(arm) if ds in set(known.served_on(experiment.control_arm))]
    looks = [_compared(experiment, known.of_days(days[: i + 1]), arm, known_before=True) for i in range(len(days))]
    found = looks[-1] if looks else None
    if found is None:
        return None
    plain = _compared(experiment, known.of_days(days), arm, known_before=False)
    assert plain is not None, "it has users"
    many = len(experiment.treatments)
    together = 1 - (1 - experiment.confidence) / many  # so that all intervals hold together (Bonferroni)
    low, high = (None, None) if scale is None else map(_finite, always_valid_interval(found, scale, together))
    p = 1.0 if scale is None else min(always_valid_p(look, scale) for look in looks if look is not None)
    fewest = min(known.of_days(days).counts(of)["users"] for of in (arm, experiment.control_arm))
    return {
        "days": days,
        "control": found.control,
        "treatment": found.treatment,
        "estimate": found.estimate,
        "relative": found.estimate / found.control if found.control else None,
        **_interval(found, experiment.confidence),
        "plain": {"estimate": plain.estimate, **_interval(plain, experiment.confidence)},
        "variance_ratio": found.variance_ratio,
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
    mine = totals.of_days([served])
    differences = {}
    for arm in experiment.treatments:
        found = _compared(experiment, mine, arm, known_before=False)
        differences[arm] = (
            None if found is None else {"estimate": found.estimate, **_interval(found, experiment.confidence)}
        )
    arms = {arm: _value(experiment, mine, arm) for arm in experiment.arms}
    return {"served_ds": served, "ripe": served in totals.ripe_days, "arms": arms, "differences": differences}


def _interval(found: Difference, confidence: float) -> dict[str, float]:
    low, high = found.interval(confidence)
    return {"low": low, "high": high}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
