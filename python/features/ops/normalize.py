"""normalize: zero mean, unit standard deviation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.columns import ValueType
from headrace.features.op import Aggregates, Elementwise, Fit, OpError, State, doubles, number
from headrace.features.sums import grids, slices, total

if TYPE_CHECKING:
    from pyspark.sql import Column

#: Values that float32 cannot hold are no part of the statistics (nor are infinities).
_LARGEST = 3.4e38


class Normalize(Elementwise):
    """(x - mean) / std over the training range; x - mean where std is 0. std has n - 1 below, as NVTabular's Normalize.

    Mean and standard deviation come from sums that are exact in any order (headrace.features.sums), so the same rows
    give the same bits whatever the partitioning. Two passes: the ranges, then the sums around their middle.
    """

    name: ClassVar[str] = "normalize"
    learns: ClassVar[bool] = True

    def type_of(self, given: ValueType) -> ValueType:
        return number(given, "double")

    def types(self, given: Mapping[str, ValueType]) -> dict[str, ValueType]:
        for name, value in given.items():
            if value.is_list:
                raise OpError(f"column '{name}': takes scalars, not {value}")
        return super().types(given)

    def fit(self, columns: Mapping[str, Column], types: Mapping[str, ValueType]) -> Fit:
        from pyspark.sql import functions as F

        asked: dict[str, Column] = {}
        usable = {}
        for name, column in columns.items():
            x = column.cast("double")
            usable[name] = F.when(F.abs(x) <= F.lit(_LARGEST), x)
            asked |= {
                f"{name}.count": F.count(usable[name]),
                f"{name}.min": F.min(usable[name]),
                f"{name}.max": F.max(usable[name]),
            }
        ranges = yield Aggregates(asked)

        asked, pivots, parts = {}, {}, {}
        for name, x in usable.items():
            low, high, n = ranges[f"{name}.min"], ranges[f"{name}.max"], ranges[f"{name}.count"]
            if not n:
                continue
            # The middle is a pivot that depends on the values alone; it keeps squares small where the mean is large.
            pivots[name] = pivot = low / 2 + high / 2
            bound = max(high - pivot, pivot - low)
            first, second = grids(n, bound), grids(n, bound * bound)
            d = x - F.lit(pivot)
            asked |= slices(f"{name}.d", d, first) | slices(f"{name}.dd", d * d, second)
            parts[name] = len(first)
        sums = (yield Aggregates(asked)) if asked else {}

        states = {}
        for name in columns:
            n = ranges[f"{name}.count"]
            if not n:
                states[name] = {"mean": 0.0, "std": 0.0, "count": 0}
                continue
            s, ss = total(f"{name}.d", sums, parts[name]), total(f"{name}.dd", sums, parts[name])
            variance = max((ss - s * s / n) / (n - 1), 0) if n > 1 else 0
            states[name] = {"mean": float(s / n + Fraction(pivots[name])), "std": math.sqrt(variance), "count": n}
        return states

    def spark_value(self, x: Column, given: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        out = x.cast("double") - F.lit(float(state["mean"]))
        return out / F.lit(float(state["std"])) if state["std"] > 0 else out

    def arrow_value(self, x: pa.Array, given: ValueType, state: State) -> pa.Array:
        out = pc.subtract(doubles(x), float(state["mean"]))
        return pc.divide(out, float(state["std"])) if state["std"] > 0 else out
