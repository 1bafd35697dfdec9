"""Draws by weight in constant time: the alias method (Walker, 1977), its table made by sums over sorted weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


class AliasTable:
    """Numbers 0 .. n - 1, each in proportion to its weight.

    Args:
        weights: float64 [n], at least 0, one of them above it.
    """

    def __init__(self, weights: F64) -> None:
        n = len(weights)
        scaled = weights / weights.sum() * n
        order = np.argsort(scaled, kind="stable")
        # Equal weights may all be just below 1, as 49 times 1 / 49 is; the greatest fills up the others.
        small, large = np.split(order, [min(int(np.searchsorted(scaled[order], 1.0)), n - 1)])
        # Place by place, what a small weight lacks of 1 is filled up by the large one that is first in line; a large
        # one that has given so much that it is below 1 itself is filled up by the next.
        lacks, spare = np.cumsum(1 - scaled[small]), np.cumsum(scaled[large] - 1)
        self._kept = np.ones(n)
        self._other = np.arange(n)
        self._kept[small] = scaled[small]
        before = np.concatenate([[0.0], lacks[:-1]]) if len(small) else lacks
        last = len(large) - 1
        if len(small):
            self._other[small] = large[np.minimum(np.searchsorted(spare, before, side="right"), last)]
            first = np.searchsorted(lacks, spare, side="right")  # the small one that takes more than is left
            # One that begins where the large one ends is the next one's.
            used = (first < len(small)) & (before[np.minimum(first, len(small) - 1)] < spare)
            used[-1:] = False  # nobody fills up the last one: all sums are equal, but for rounding
            missing = lacks[np.minimum(first, len(small) - 1)] - spare
            self._kept[large[used]] = 1 - missing[used]
            self._other[large[used]] = np.append(large[1:], large[-1:])[used]

    def draw(self, uniform: F64) -> I64:
        """For numbers uniform in [0, 1), of any shape, one each."""
        n = len(self._kept)
        scaled = uniform * n
        place = np.minimum(scaled.astype(np.int64), n - 1)
        return np.where(scaled - place < self._kept[place], place, self._other[place])

    def shares(self) -> F64:
        """How likely each number is: float64 [n]."""
        n = len(self._kept)
        return (self._kept + np.bincount(self._other, weights=1 - self._kept, minlength=n)) / n
