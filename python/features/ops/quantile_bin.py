"""quantile_bin: numbers to codes of bins that hold equally many rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from headrace.features.functions.arrays import doubles, to_numpy
from headrace.features.learn import quantiles
from headrace.features.learn.statistics import Partials
from headrace.features.ops.base import FittedState, State
from headrace.features.ops.quantile_op import QuantileOp
from headrace.features.types import OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column


class QuantileBin(QuantileOp):
    """Numbers to codes: 1 + the number of edges below x, 0 for null; `bins` + 1 codes.

    Edge i of bins - 1 is the least value of the training range that i/bins of its values do not exceed (the inverted
    distribution function; Hyndman and Fan, "Sample Quantiles", 1996, type 1). Bins are closed on the right, as pandas'
    qcut; edges that are equal are one, so a value that is frequent leaves some codes unused. Counted as `fill_median`
    is: days merge and partitioning changes nothing (Spark's `approx_percentile` and `ntile` depend on it).
    """

    name: ClassVar[str] = "quantile_bin"

    bins: int = Field(ge=2, le=1024)

    def type_of(self, input_type: ValueType) -> ValueType:
        if not input_type.is_number:
            raise OpError(f"takes numbers, not {input_type}")
        return ValueType("code", cardinality=self.bins + 1)

    def finish(self, partials: Partials, types: Mapping[str, ValueType]) -> FittedState:
        states = {}
        for name in types:
            values, upto = quantiles.cumulated(partials[name])
            states[name] = {
                "edges": quantiles.edges(values, upto, self.bins),
                "count": int(upto[-1]) if len(upto) else 0,
            }
        return FittedState(states)

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        y = x.cast("double")
        edges = [float(e) for e in state["edges"]]

        def code(low: int, high: int) -> Column:
            """Between `low` and `high` edges are below: a tree of comparisons, so each row makes few."""
            if low == high:
                return F.lit(low + 1)
            middle = (low + high) // 2
            return F.when(y > F.lit(edges[middle]), code(middle + 1, high)).otherwise(code(low, middle))

        return F.when(y.isNull(), F.lit(0)).otherwise(code(0, len(edges))).cast("int")

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        y = to_numpy(doubles(x))
        below = np.searchsorted(np.asarray(state["edges"], np.float64), y, side="left")
        return pa.array(np.where(np.isnan(y), 0, below + 1).astype(np.int32))
