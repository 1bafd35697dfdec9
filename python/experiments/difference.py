"""How much an arm is better than another: means of users, with what was known of them before taken out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Arm:
    """The users of an arm, with their totals so far: clicks over impressions, say; or one value each.

    above: float64 [n]. below: float64 [n]; None: the users themselves are counted, the metric is a mean of users.
    before: the same users' value of the metric before the experiment, float64 [n], or None.
    """

    above: F64
    below: F64 | None = None
    before: F64 | None = None


@dataclass(frozen=True)
class Difference:
    """Of two arms: treatment less control, and its variance."""

    control: float
    treatment: float
    estimate: float
    variance: float
    #: The variance over that without `before`; 1 where nothing was known.
    variance_ratio: float

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Of one look that was planned beforehand; of many looks, headrace.experiments.sequential."""
        half = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(self.variance)
        return self.estimate - half, self.estimate + half


def difference(control: Arm, treatment: Arm) -> Difference:
    """Compare two arms.

    A ratio of sums (clicks over impressions) has users for its units, not impressions, which are not independent: it
    is linearised at its value (the delta method; Deng, Knoblich and Lu, KDD 2018). Where both arms have `before`, the
    part of each user's value that it explains is taken out (CUPED; Deng, Xu, Kohavi and Walker, WSDM 2013), with one
    coefficient of both arms: the estimate stays unbiased, and its variance shrinks by the squared correlation.

    Raises:
        ValueError: an arm has less than two users.
    """
    sides = [_linear(arm) for arm in (control, treatment)]
    values = [linear for _, linear in sides]
    if min(len(x) for x in values) < 2:
        raise ValueError("an arm needs two users or more")
    plain = sum(x.var(ddof=1) / len(x) for x in values)
    shift = 0.0
    variance = plain
    if control.before is not None and treatment.before is not None:
        before = [control.before, treatment.before]
        centred = [(x - x.mean(), b - b.mean()) for x, b in zip(values, before, strict=True)]
        spread = sum(float((b * b).sum()) for _, b in centred)
        slope = sum(float((x * b).sum()) for x, b in centred) / spread if spread > 0 else 0.0
        shift = slope * float(before[1].mean() - before[0].mean())
        adjusted = [x - slope * b for x, b in zip(values, before, strict=True)]
        variance = sum(x.var(ddof=1) / len(x) for x in adjusted)
    means = [mean for mean, _ in sides]
    return Difference(
        control=means[0],
        treatment=means[1],
        estimate=means[1] - means[0] - shift,
        variance=float(variance),
        variance_ratio=float(variance / plain) if plain > 0 else 1.0,
    )


def _linear(arm: Arm) -> tuple[float, F64]:
    """The metric, and a value of each user whose mean varies as it does: float64 [n]."""
    if arm.below is None:
        return float(arm.above.mean()), arm.above
    ratio = float(arm.above.sum() / arm.below.sum())
    linear: F64 = ratio + (arm.above - ratio * arm.below) / arm.below.mean()
    return ratio, linear
