"""Operators that learn by statistics of parts of the training rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from headrace.features.learn.statistics import Partials, Statistic
from headrace.features.ops.base import FittedState, Op
from headrace.features.types import ValueType


class EstimatorOp(Op):
    """An operator that learns by statistics of parts."""

    learns: ClassVar[bool] = True
    #: Whether `finish` makes each row of its tables of the groups of its key alone, and states of the statistics that
    #: have no key: then it is called with parts of the keys where there are many. The tables' values are int64 or
    #: float64.
    by_key: ClassVar[bool] = False

    def statistics(self, types: Mapping[str, ValueType]) -> dict[str, Statistic]:
        """What to collect of the columns as they arrive at this operator."""
        raise NotImplementedError

    def finish(self, partials: Partials, types: Mapping[str, ValueType]) -> FittedState:
        """What the statistics of all training rows teach. Does not depend on the order of groups."""
        raise NotImplementedError
