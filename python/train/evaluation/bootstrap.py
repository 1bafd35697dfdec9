"""Confidence intervals by the Poisson bootstrap over users (Hanley and MacGibbon, 2006; Chamandy et al., 2012).

A replicate counts each user so often as a Poisson variable of mean 1 says, all rows of a user alike, since they are
not independent of each other. The variable is a function of seed, replicate and user: every rank draws the same
for a user of whom it has some rows, and tells nobody.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.embeddings.kernels.id_map import mix
from headrace.train.evaluation.ranks import I64

F64 = npt.NDArray[np.float64]
#: P(at most k) of a Poisson variable of mean 1; the last one is 1 as a double.
_CUMULATIVE = np.cumsum([math.exp(-1) / math.factorial(k) for k in range(20)])


@dataclass(frozen=True)
class Bootstrap:
    """How many replicates there are, and their seed; with none there are no intervals.

    `confidence`: the share of the replicates that an interval holds.
    """

    replicates: int = 0
    seed: int = 0
    confidence: float = 0.95

    def counts(self, users: I64, replicate: int) -> I64:
        """How often a replicate (from 1) counts each user; replicate 0 is the rows as they are. int64 [n]."""
        if replicate == 0:
            return np.ones(len(users), np.int64)
        # Hashed twice: of ids in a row, and of replicates in a row, no pattern stays.
        hashed = mix(mix(users, self.seed).view(np.int64), replicate)
        uniform = (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53
        drawn: I64 = np.searchsorted(_CUMULATIVE, uniform, side="right").astype(np.int64)
        return drawn

    def all_counts(self, users: I64) -> Iterator[I64]:
        """`counts` of the rows as they are, then of each replicate."""
        return (self.counts(users, replicate) for replicate in range(1 + self.replicates))

    def interval(self, values: F64) -> tuple[float, float] | None:
        """The middle `confidence` of the replicates' values, by percentiles.

        Args:
            values: float64 [1 + replicates], the first of the rows as they are; NaN where there is none.

        Returns:
            None without replicates, or where less than half of them have a value.
        """
        found = values[1:][~np.isnan(values[1:])]
        if not len(found) or 2 * len(found) < self.replicates:
            return None
        tail = (1 - self.confidence) / 2
        low, high = np.quantile(found, [tail, 1 - tail])
        return float(low), float(high)


NO_REPLICATES = Bootstrap()
