"""Quantiles of counted values: the same whatever the order in which they were counted."""

from __future__ import annotations

import numpy as np

from headrace.features.learn.exact_sums import F64, I64
from headrace.features.learn.statistics import Partial, counts


def cumulated(partial: Partial) -> tuple[F64, I64]:
    """(values, how many are not above each) of a statistic by numbers. float64 [groups], int64 [groups], ascending."""
    values = partial.column("key").to_numpy()
    order = np.argsort(values)
    return values[order], np.cumsum(counts(partial)[order])


def median(values: F64, upto: I64) -> float:
    """The middle value, or the mean of the two in the middle. `values` is not empty."""
    n = int(upto[-1])
    low, high = np.searchsorted(upto, [(n + 1) // 2, n // 2 + 1])
    return float(values[low] / 2 + values[high] / 2)


def edges(values: F64, upto: I64, bins: int) -> list[float]:
    """Distinct values v_1 < v_2 < ...: for each i in 1..bins-1 the least that i/bins of the values do not exceed."""
    if not len(values):
        return []
    n = int(upto[-1])
    wanted = [-(-i * n // bins) for i in range(1, bins)]
    found = np.unique(values[np.searchsorted(upto, wanted)])
    return [float(v) for v in found]
