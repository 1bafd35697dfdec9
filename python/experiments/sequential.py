"""Bounds of a difference that hold at all looks together, so that an experiment may be looked at every day.

The mixture sequential probability ratio test with a normal prior of the effect (Robbins, 1970; Johari, Koomen,
Pekelis and Walsh, *Always valid inference: continuous monitoring of A/B tests*, Operations Research 2022). With the
estimate d of variance V and the prior's variance t^2, the likelihood ratio of any effect to none is

    L = sqrt(V / (V + t^2)) exp(t^2 d^2 / (2 V (V + t^2)))

Without an effect L is a martingale of mean 1, so P(L >= 1 / a at any look) <= a (Ville's inequality). The interval is
of the effects that L does not reject. It is exact for normal estimates with independent increments, and nearly so for
means of many users.
"""

from __future__ import annotations

import math

from headrace.experiments.difference import Difference


def always_valid_p(found: Difference, scale: float) -> float:
    """The p-value of this look; the smallest of all looks so far is valid whenever one stops.

    Args:
        found: the arms' difference now.
        scale: t, the standard deviation of effects that are expected, in the metric's unit: where it is right,
            effects are found soonest; false alarms are as rare with any, so long as it is fixed beforehand.
    """
    if found.variance <= 0:
        return 1.0
    return min(1.0, math.exp(-_log_ratio(found.estimate, found.variance, scale)))


def always_valid_interval(found: Difference, scale: float, confidence: float = 0.95) -> tuple[float, float]:
    """An interval that holds the effect at all looks together with this confidence. `scale`: see `always_valid_p`."""
    v, t2 = found.variance, scale * scale
    if v <= 0:
        return -math.inf, math.inf
    radius = math.sqrt(v * (v + t2) / t2 * (math.log((v + t2) / v) - 2 * math.log(1 - confidence)))
    return found.estimate - radius, found.estimate + radius


def _log_ratio(estimate: float, variance: float, scale: float) -> float:
    t2 = scale * scale
    return 0.5 * math.log(variance / (variance + t2)) + t2 * estimate**2 / (2 * variance * (variance + t2))
