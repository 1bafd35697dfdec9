"""fill_missing: a value for what is missing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import StrictBool, StrictFloat, StrictInt, StrictStr, field_validator

from headrace.features.functions.arrays import doubles
from headrace.features.ops.base import State
from headrace.features.ops.indicator import WithIndicator
from headrace.features.types import OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column


class FillMissing(WithIndicator):
    """Null and NaN become `value`; in lists, null elements do (a null list is an empty one).

    Integers stay integers where `value` is one, so that `categorify` can follow; other numbers become double.

    With `indicator`, each column that is no list also gives `<c>_missing`: true where the value was missing (see
    `WithIndicator`). NVTabular's FillMissing with add_binary_cols.
    """

    name: ClassVar[str] = "fill_missing"

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
