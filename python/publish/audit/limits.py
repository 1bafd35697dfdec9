"""A figure and its limits, as a check."""

from __future__ import annotations

import math

from headrace.publish.target import Check


def within(name: str, value: float | None, low: float | None, high: float | None, detail: str = "") -> Check:
    """The check that `low <= value <= high`; None and NaN are outside.

    Args:
        low: None: no such limit.
        high: likewise.
        detail: said about the figure.
    """
    limits = [f"at least {low:g}"] if low is not None else []
    limits += [f"at most {high:g}"] if high is not None else []
    limit = " and ".join(limits)
    if value is None or math.isnan(value):
        return Check(name, math.nan, limit, False, detail or "no number")
    ok = (low is None or value >= low) and (high is None or value <= high)
    return Check(name, _short(value, low, high), limit, ok, detail)


def _short(value: float, low: float | None, high: float | None) -> float:
    """Four decimals, unless that would hide on which side of a limit it is."""
    shown = round(value, 4)
    return value if shown in (low, high) and shown != value else shown
