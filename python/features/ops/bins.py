"""Operators that put numbers into bins: bucketize with given boundaries, quantile_bin with learned ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field, StrictFloat, StrictInt, field_validator

from headrace.features.functions.arrays import doubles, to_numpy
from headrace.features.learn.statistics import Partials, cumulated, quantile_edges
from headrace.features.ops.base import Elementwise, FittedState, QuantileOp, State
from headrace.features.types import OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column


class Bucketize(Elementwise):
    """The interval that a number falls into, as a code: 0 for null, else one more than the boundaries at or below it.

    With boundaries b1 < b2 < .. < bn: code 1 for x < b1, 2 for b1 <= x < b2, .., n + 1 for bn <= x: NumPy's
    searchsorted(side="right"), as NVTabular's Bucketize. Infinities are in the outer intervals; -0.0 is 0.0. Any
    number, and lists of them, compared as double (a bigint above 2**53 is rounded first).
    """

    name: ClassVar[str] = "bucketize"
    onnx: ClassVar[str] = "headrace.export.features.operators:bucketize"

    boundaries: tuple[StrictInt | StrictFloat, ...] = Field(min_length=1, max_length=1024)

    @field_validator("boundaries")
    @classmethod
    def _rising(cls, value: tuple[int | float, ...]) -> tuple[int | float, ...]:
        if not all(math.isfinite(v) for v in value):
            raise ValueError("must be finite")
        if any(float(a) >= float(b) for a, b in pairwise(value)):
            raise ValueError("must rise")
        return value

    def type_of(self, input_type: ValueType) -> ValueType:
        if not input_type.is_number:
            raise OpError(f"takes numbers, not {input_type}")
        return replace(ValueType("code"), cardinality=len(self.boundaries) + 2)

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        as_double = x.cast("int").cast("double") if input_type.element == "boolean" else x.cast("double")
        return F.when(x.isNull(), F.lit(0)).otherwise(_descend(as_double, [float(b) for b in self.boundaries], 1))

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        values = to_numpy(doubles(x))
        codes = np.searchsorted(np.array(self.boundaries, np.float64), values, side="right") + 1
        return pa.array(np.where(np.isnan(values), 0, codes).astype(np.int32))


def _descend(x: Column, boundaries: list[float], first: int) -> Column:
    """Return codes from `first` on, by halving: a value meets about log2(n) comparisons."""
    from pyspark.sql import functions as F

    if not boundaries:
        return F.lit(first)
    middle = len(boundaries) // 2
    below = _descend(x, boundaries[:middle], first)
    above = _descend(x, boundaries[middle + 1 :], first + middle + 1)
    return F.when(x < F.lit(boundaries[middle]), below).otherwise(above)


class QuantileBin(QuantileOp):
    """Numbers to codes: 1 + the number of edges below x, 0 for null; `bins` + 1 codes.

    Edge i of bins - 1 is the least value of the training range that i/bins of its values do not exceed (the inverted
    distribution function; Hyndman and Fan, "Sample Quantiles", 1996, type 1). Bins are closed on the right, as pandas'
    qcut; edges that are equal are one, so a value that is frequent leaves some codes unused. Counted as `fill_median`
    is: days merge and partitioning changes nothing (Spark's approx_percentile and ntile depend on it).
    """

    name: ClassVar[str] = "quantile_bin"
    onnx: ClassVar[str] = "headrace.export.features.operators:quantile_bin"

    bins: int = Field(ge=2, le=1024)

    def type_of(self, input_type: ValueType) -> ValueType:
        if not input_type.is_number:
            raise OpError(f"takes numbers, not {input_type}")
        return ValueType("code", cardinality=self.bins + 1)

    def finish(self, partials: Partials, types: Mapping[str, ValueType]) -> FittedState:
        states = {}
        for name in types:
            values, upto = cumulated(partials[name])
            states[name] = {
                "edges": quantile_edges(values, upto, self.bins),
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
