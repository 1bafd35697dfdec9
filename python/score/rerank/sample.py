"""Exploration by a temperature: each position is drawn by a softmax of what may stand there.

Without other rules this is sampling by the model of Plackett (1975) and Luce (1959), which taking the greatest scores
with Gumbel noise is, too. The probability that is told is that of the item at this position, given the items above it:
exact under all rules, for caps, shares and diversity look at what is above. So inverse propensity scores at a position
are unbiased for any policy that chooses among what may stand there below the same items, at the first position for any
policy; and the product of a list's propensities is the probability of the list.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.config.score import Explore
from headrace.score.rerank.draws import draws
from headrace.score.rerank.lists import F64, I64, Bools, Rectangle


@dataclass(frozen=True)
class Softmax:
    """A `Draw` of `select`. numbers: float64 [n, k], uniform in [0, 1). reach: bool [n, m], or None: all."""

    temperature: float
    numbers: F64
    reach: Bools | None

    @staticmethod
    def of(settings: Explore, ds: str, users: NDArray[np.uint64], grid: Rectangle, k: int) -> Softmax:
        """Of a day and users, by their hashes [n]; with a pool, the items of the first k + pool ranked ones."""
        assert settings.temperature is not None, "asked for where there is one"
        reach = None if settings.pool is None else grid.there.cumsum(1) <= k + settings.pool
        return Softmax(settings.temperature, draws(settings.seed, f"rerank/softmax/{ds}", users, k), reach)

    def __call__(self, place: int, values: F64, among: Bools) -> tuple[I64, F64]:
        """See `Draw`."""
        if self.reach is not None:
            near = among & self.reach
            among = np.where(near.any(1, keepdims=True), near, among)
        scaled = np.where(among, values / self.temperature, -np.inf)
        most = scaled.max(1, keepdims=True, initial=-np.inf)
        weights = np.exp(scaled - np.where(np.isfinite(most), most, 0.0))
        sums = weights.cumsum(1)
        total = sums[:, -1]
        # Below the total even where the product is rounded up.
        at = np.minimum(self.numbers[:, place] * total, np.nextafter(total, 0.0))
        found = (sums > at[:, None]).argmax(1)
        with np.errstate(invalid="ignore"):
            return found, weights[np.arange(len(found)), found] / total
