"""clip: bounds for numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import StrictFloat, StrictInt, model_validator

from headrace.features.functions.arrays import doubles
from headrace.features.ops.base import Elementwise, State, number
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column


class Clip(Elementwise):
    """Numbers below `min` become `min`, those above `max` become `max`, infinities too. Null stays null.

    Integers stay integers where both given bounds are integers; other numbers become double.
    """

    name: ClassVar[str] = "clip"

    min: StrictInt | StrictFloat | None = None
    max: StrictInt | StrictFloat | None = None

    @model_validator(mode="after")
    def _bounds(self) -> Clip:
        if self.min is None and self.max is None:
            raise ValueError("give min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min ({self.min}) is above max ({self.max})")
        if any(b != b for b in (self.min, self.max)):
            raise ValueError("a bound is not a number (NaN)")
        return self

    def type_of(self, input_type: ValueType) -> ValueType:
        whole = all(b is None or (isinstance(b, int) and -(2**63) <= b < 2**63) for b in (self.min, self.max))
        return number(input_type, "bigint" if input_type.is_integer and whole else "double")

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        element = self.type_of(input_type).element
        as_ = float if element == "double" else int
        x = x.cast(element)
        if self.min is not None:
            low = F.lit(as_(self.min)).cast(element)
            x = F.when(x < low, low).otherwise(x)
        if self.max is not None:
            high = F.lit(as_(self.max)).cast(element)
            x = F.when(x > high, high).otherwise(x)
        return x

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        out = self.type_of(input_type)
        x = doubles(x) if out.element == "double" else x.cast(out.arrow)
        as_ = float if out.element == "double" else int
        if self.min is not None:
            low = pa.scalar(as_(self.min), out.arrow)
            x = pc.if_else(pc.less(x, low), low, x)
        if self.max is not None:
            high = pa.scalar(as_(self.max), out.arrow)
            x = pc.if_else(pc.greater(x, high), high, x)
        return x
