"""Operators over numbers that learn from how often each value is there."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from headrace.features.learn.statistics import Statistic
from headrace.features.ops.base import Elementwise, scalars
from headrace.features.ops.estimator import EstimatorOp
from headrace.features.types import ValueType


class QuantileOp(Elementwise, EstimatorOp):
    """An operator over numbers that learns from how often each value is there."""

    #: Values are counted with so many significant bits: a quantile's relative error is at most 2**-significant_bits,
    #: and whole numbers up to 2**significant_bits are exact. 53: exact, and as many counters as there are distinct
    #: values.
    significant_bits: int = Field(default=16, ge=2, le=53)

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        return super().types(scalars(inputs))

    def statistics(self, types: Mapping[str, ValueType]) -> dict[str, Statistic]:
        return {name: Statistic(key=(name,), kind="number", bits=self.significant_bits) for name in types}
