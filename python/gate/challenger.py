"""The verdict on a challenger: by the rules of the day's model, and whether it is to be champion instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.config import Gate
from headrace.config.evaluation import HIGHER_IS_BETTER
from headrace.gate.rules import PASSED, Rule, judge, verdict_of

#: The key of the spec that says how much better it must be.
BEHIND = "challenger.behind"


def judge_challenger(gate: Gate, evaluated: Mapping[str, Any], drift: Mapping[str, Any] | None) -> list[Rule]:
    """Every rule of the section, of the challenger instead of the day's model, against the same champion.

    Args:
        gate: the section.
        evaluated: facts of the stage `evaluate`, with a challenger that was measured.
        drift: see `judge`.

    Raises:
        UserError: as `judge`.
    """
    challenger = evaluated["challenger"]
    beside_champion = challenger["beside_champion"] or {}
    return judge(gate, {**evaluated, "model": challenger, **beside_champion}, drift)


def better_rule(evaluated: Mapping[str, Any], verdict: str, monitor: str, behind: float) -> Rule | None:
    """Whether a challenger is better than the version that would be champion without it.

    Args:
        evaluated: facts of the stage `evaluate`, with a challenger that was measured.
        verdict: on the day's model, which is that version where it has passed; else the champion is, where it can
            predict the rows.
        monitor: the metric.
        behind: by more than this, in units of the metric.

    Returns:
        the rule; None where there is no such version.
    """
    if verdict == PASSED:
        other, differences = evaluated["model"], evaluated["challenger"]["beside_model"]
    elif evaluated["champion"] is not None and evaluated["challenger"]["beside_champion"] is not None:
        other, differences = evaluated["champion"], evaluated["challenger"]["beside_champion"]["differences"]
    else:
        return None
    figure = f"{monitor} beside that of version {other['version']}"
    found = differences.get(monitor)
    if found is None:
        return Rule(BEHIND, figure, None, behind, None, False, f"{figure}: it was not measured on these rows")
    value, low, high = (found[name] for name in ("value", "low", "high"))
    if not HIGHER_IS_BETTER.get(monitor, True):
        value, low, high = -value, None if high is None else -high, None if low is None else -low
    between = "" if low is None or high is None else f" [{low:+.4g}, {high:+.4g}]"
    text = f"{figure}: better by {value:+.4g}{between}, more than {behind:.4g} is asked for"
    return Rule(BEHIND, figure, value, behind, value - behind, value > behind, text, low, high)


def verdict_on_challenger(
    gate: Gate, evaluated: Mapping[str, Any], drift: Mapping[str, Any] | None, verdict: str, monitor: str, behind: float
) -> dict[str, Any]:
    """What the gate's manifest says of a challenger that was measured: verdict, rules, `becomes_champion`.

    Args:
        gate: the section.
        evaluated: facts of the stage `evaluate`, with it.
        drift: see `judge`.
        verdict: on the day's model.
        monitor: see `better_rule`.
        behind: see `better_rule`.

    Raises:
        UserError: as `judge`.
    """
    rules = judge_challenger(gate, evaluated, drift)
    found = verdict_of(rules)
    better = better_rule(evaluated, verdict, monitor, behind) if gate.challenger == "promote" else None
    becomes = gate.challenger == "promote" and found == PASSED and (better is None or better.passed is True)
    return {
        "verdict": found,
        "becomes_champion": becomes,
        "rules": [rule.fact() for rule in (*rules, *([] if better is None else [better]))],
    }
