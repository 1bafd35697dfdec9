"""Quantiles of counted values: the same whatever the order in which they were counted."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pydantic import Field

from headrace.features.columns import ValueType
from headrace.features.fitting.exact import F64, I64
from headrace.features.fitting.partial import Learner, Partial, Statistic, counts
from headrace.features.op import Elementwise, scalars


class OfCountedValues(Elementwise, Learner):
    """An operator over numbers that learns from how often each value is there."""

    #: Values are counted with so many significant bits: a quantile's relative error is at most 2**-significant_bits,
    #: and whole numbers up to 2**significant_bits are exact. 53: exact, and as many counters as there are distinct
    #: values.
    significant_bits: int = Field(default=16, ge=2, le=53)

    def types(self, given: Mapping[str, ValueType]) -> dict[str, ValueType]:
        return super().types(scalars(given))

    def statistics(self, types: Mapping[str, ValueType]) -> dict[str, Statistic]:
        return {name: Statistic(key=(name,), kind="number", bits=self.significant_bits) for name in types}


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
