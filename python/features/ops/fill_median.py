"""fill_median: the training range's median for what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.functions.arrays import doubles
from headrace.features.learn import quantiles
from headrace.features.learn.statistics import Partials
from headrace.features.ops.base import FittedState, State, number
from headrace.features.ops.indicator import WithIndicator
from headrace.features.ops.quantile_op import QuantileOp
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column


class FillMedian(WithIndicator, QuantileOp):
    """Numbers to double: null and NaN become the median over the training range (0 where there is none).

    NVTabular's FillMedian; `indicator` (see `WithIndicator`) is its add_binary_cols. Of an even number of values the
    mean of the two in the middle. It is counted, not sampled: values are rounded to `significant_bits` bits and
    counted, so days merge and partitioning changes nothing.
    """

    name: ClassVar[str] = "fill_median"

    def type_of(self, input_type: ValueType) -> ValueType:
        return number(input_type, "double")

    def finish(self, partials: Partials, types: Mapping[str, ValueType]) -> FittedState:
        states = {}
        for name in types:
            values, upto = quantiles.cumulated(partials[name])
            n = int(upto[-1]) if len(upto) else 0
            median = quantiles.median(values, upto) if n else 0.0
            states[name] = {"median": median, "count": n}
        return FittedState(states)

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        return F.coalesce(x.cast("double"), F.lit(float(state["median"])))

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        return pc.fill_null(doubles(x), float(state["median"]))
