"""normalize_minmax: the training range's least and greatest become 0 and 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.functions.arrays import doubles
from headrace.features.learn.statistics import Number, Partials, Statistic, counts
from headrace.features.ops.base import Elementwise, FittedState, State, number, scalars
from headrace.features.ops.estimator import EstimatorOp
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column


class NormalizeMinMax(Elementwise, EstimatorOp):
    """Numbers to double: (x - min) / (max - min) over the training range; x - min where they are equal. Null stays
    null.

    NVTabular's NormalizeMinMax (which gives 0.5 where they are equal). Later days' values may lie outside of 0 to 1;
    put clip behind it where that matters. Values that float32 cannot hold, and infinities, are no part of the range.
    """

    name: ClassVar[str] = "normalize_minmax"

    def type_of(self, input_type: ValueType) -> ValueType:
        return number(input_type, "double")

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        return super().types(scalars(inputs))

    def statistics(self, types: Mapping[str, ValueType]) -> dict[str, Statistic]:
        return {name: Statistic(numbers=(Number(name, minmax=True),)) for name in types}

    def finish(self, partials: Partials, types: Mapping[str, ValueType]) -> FittedState:
        states = {}
        for name in types:
            n = int(counts(partials[name], "0.count")[0])
            low, high = (partials[name].column(f"0.{end}")[0].as_py() for end in ("min", "max"))
            states[name] = {"min": low if n else 0.0, "max": high if n else 0.0, "count": n}
        return FittedState(states)

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        low, width = float(state["min"]), float(state["max"]) - float(state["min"])
        out = x.cast("double") - F.lit(low)
        return out / F.lit(width) if width > 0 else out

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        low, width = float(state["min"]), float(state["max"]) - float(state["min"])
        out = pc.subtract(doubles(x), low)
        return pc.divide(out, width) if width > 0 else out
