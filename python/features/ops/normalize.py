"""normalize: zero mean, unit standard deviation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.functions.arrays import doubles
from headrace.features.learn import exact_sums
from headrace.features.learn.statistics import Number, Partials, Statistic, counts, numbers
from headrace.features.ops.base import Elementwise, FittedState, State, number, scalars
from headrace.features.ops.estimator import EstimatorOp
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column


class Normalize(Elementwise, EstimatorOp):
    """Numbers to double: (x - mean) / std over the training range; x - mean where std is 0. Null stays null.

    std has n - 1 below, as NVTabular's Normalize. Values that float32 cannot hold are no part of the statistics, nor
    are infinities. Mean and standard deviation come from exact sums (learn.exact_sums), each rounded once, so
    the same rows give the same bits whatever the partitioning, and days merge.
    """

    name: ClassVar[str] = "normalize"

    def type_of(self, input_type: ValueType) -> ValueType:
        return number(input_type, "double")

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        return super().types(scalars(inputs))

    def statistics(self, types: Mapping[str, ValueType]) -> dict[str, Statistic]:
        return {name: Statistic(numbers=(Number(name, sum=True, squares=True),)) for name in types}

    def finish(self, partials: Partials, types: Mapping[str, ValueType]) -> FittedState:
        states = {}
        for name in types:
            partial = partials[name]
            n = counts(partial, "0.count")
            sums, squares = numbers(partial, 0, "sum"), numbers(partial, 0, "squares")
            mean, std = float(exact_sums.means(sums, n)[0]), float(exact_sums.deviations(sums, squares, n)[0])
            states[name] = {"mean": mean if n[0] else 0.0, "std": std if n[0] else 0.0, "count": int(n[0])}
        return FittedState(states)

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        out = x.cast("double") - F.lit(float(state["mean"]))
        return out / F.lit(float(state["std"])) if state["std"] > 0 else out

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        out = pc.subtract(doubles(x), float(state["mean"]))
        return pc.divide(out, float(state["std"])) if state["std"] > 0 else out
