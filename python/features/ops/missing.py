"""Operators that fill missing values: fill_missing with a constant, fill_median with the training range's median."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
from pydantic import StrictBool, StrictFloat, StrictInt, StrictStr, field_validator

from headrace.compute import pc
from headrace.features.functions.arrays import doubles
from headrace.features.learn.statistics import Partials, cumulated, median
from headrace.features.ops.base import (
    ArrowOpContext,
    Elementwise,
    FittedState,
    QuantileOp,
    SparkOpContext,
    State,
    number,
)
from headrace.features.types import OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column


class WithIndicator(Elementwise):
    """With `indicator`, each column (no list: an empty one says it itself) also gives `<c>_missing`: true where the
    value was missing. The chain's later operators leave it as it is, so `normalize` does not touch it.
    """

    indicator: bool = False

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        out = super().types(inputs)
        if self.indicator:
            for name, value in inputs.items():
                if value.is_list:
                    raise OpError(f"column '{name}': `indicator` is for single values, not {value}")
                if f"{name}_missing" in out:
                    raise OpError(f"column '{name}': its indicator has the name of the column '{name}_missing'")
                out[f"{name}_missing"] = ValueType("boolean", final=True)
        return out

    def sources(self, inputs: Mapping[str, ValueType]) -> dict[str, tuple[str, ...]]:
        out: dict[str, tuple[str, ...]] = {name: (name,) for name in inputs}
        if self.indicator:
            out |= {f"{name}_missing": (name,) for name in inputs}
        return out

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        out = super().spark(columns, context)
        return out | ({f"{name}_missing": x.isNull() for name, x in columns.items()} if self.indicator else {})

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        out = super().arrow(columns, context)
        return out | ({f"{name}_missing": x.is_null() for name, x in columns.items()} if self.indicator else {})


class FillMissing(WithIndicator):
    """Null and NaN become `value`; in lists, null elements do (a null list is an empty one).

    Integers stay integers where `value` is one, so that `categorify` can follow; other numbers become double.

    With `indicator`, each column that is no list also gives `<c>_missing`: true where the value was missing (see
    `WithIndicator`). NVTabular's FillMissing with add_binary_cols.
    """

    name: ClassVar[str] = "fill_missing"
    onnx: ClassVar[str] = "headrace.export.features.operators:fill_missing"

    #: A text for a text column, else a number.
    value: StrictBool | StrictInt | StrictFloat | StrictStr = 0

    @field_validator("value")
    @classmethod
    def _finite(cls, value: bool | int | float | str) -> bool | int | float | str:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("must be finite")
        return value

    def type_of(self, input_type: ValueType) -> ValueType:
        if input_type.element == "string":
            if not isinstance(self.value, str):
                raise OpError(f"is text, so `value` must be a text, not {self.value!r}")
            return input_type
        if isinstance(self.value, str):
            raise OpError(f"is {input_type}, so `value` must be a number, not {self.value!r}")
        if input_type.is_integer and isinstance(self.value, int):
            if not -(2**63) <= self.value < 2**63:
                raise OpError(f"`value` {self.value} does not fit 64 bits")
            return ValueType("bigint")
        if input_type.is_number:
            return ValueType("double")
        raise OpError(f"takes numbers and text, not {input_type}")

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        out = self.type_of(input_type)
        return F.coalesce(x.cast(out.element), F.lit(self._as(out)).cast(out.element))

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        out = self.type_of(input_type)
        x = doubles(x) if out.element == "double" else x.cast(out.arrow)
        return pc.fill_null(x, pa.scalar(self._as(out), out.arrow))

    def _as(self, out: ValueType) -> float | int | str:
        return float(self.value) if out.element == "double" else self.value


class FillMedian(WithIndicator, QuantileOp):
    """Numbers to double: null and NaN become the median over the training range (0 where there is none).

    NVTabular's FillMedian; `indicator` (see `WithIndicator`) is its add_binary_cols. Of an even number of values the
    mean of the two in the middle. It is counted, not sampled: values are rounded to `significant_bits` bits and
    counted, so days merge and partitioning changes nothing.
    """

    name: ClassVar[str] = "fill_median"
    onnx: ClassVar[str] = "headrace.export.features.operators:fill_median"

    def type_of(self, input_type: ValueType) -> ValueType:
        return number(input_type, "double")

    def finish(self, partials: Partials, types: Mapping[str, ValueType]) -> FittedState:
        states = {}
        for name in types:
            values, upto = cumulated(partials[name])
            n = int(upto[-1]) if len(upto) else 0
            middle = median(values, upto) if n else 0.0
            states[name] = {"median": middle, "count": n}
        return FittedState(states)

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        return F.coalesce(x.cast("double"), F.lit(float(state["median"])))

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        return pc.fill_null(doubles(x), float(state["median"]))
