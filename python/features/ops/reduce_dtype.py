"""reduce_dtype: the smallest type that holds the given bounds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import StrictFloat, StrictInt, model_validator

from headrace.features.functions.arrays import doubles
from headrace.features.ops.base import Elementwise, State
from headrace.features.types import Element, OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column

_INT32 = (-(2**31), 2**31 - 1)
_FLOAT32 = 3.4028234663852886e38


class ReduceDtype(Elementwise):
    """Numbers in the smallest type of the chain that holds `min`..`max`; what is outside cannot be held and is missing.

    Integers become int where both bounds fit 32 bits, else bigint; other numbers become float (rounded to nearest)
    where both bounds fit it, else double.

    NVTabular's ReduceDtypeSize finds the bounds in the data and goes down to int8; here they are given, so that a day's
    type does not hang on its data. A dataset has float32 and int32 columns only, the smallest physical types of Parquet
    (int8 and int16 are stored in 32 bits), so this does not make it smaller. It halves what operators after it compute
    with and hash, and keeps out values that nobody has announced.
    """

    name: ClassVar[str] = "reduce_dtype"

    min: StrictInt | StrictFloat
    max: StrictInt | StrictFloat

    @model_validator(mode="after")
    def _bounds(self) -> ReduceDtype:
        if not (math.isfinite(self.min) and math.isfinite(self.max)):
            raise ValueError("bounds must be finite")
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is above max ({self.max})")
        return self

    def type_of(self, input_type: ValueType) -> ValueType:
        if input_type.is_integer:
            if not (isinstance(self.min, int) and isinstance(self.max, int)):
                raise OpError(f"is {input_type}, so `min` and `max` must be integers, not {self.min} and {self.max}")
            if not (self.min >= -(2**63) and self.max < 2**63):
                raise OpError(f"{self.min}..{self.max} does not fit 64 bits")
            return ValueType("int" if self.min >= _INT32[0] and self.max <= _INT32[1] else "bigint")
        if input_type.element in ("float", "double"):
            fits = self.min >= -_FLOAT32 and self.max <= _FLOAT32
            smallest: Element = "float" if input_type.element == "float" or fits else "double"
            return ValueType(smallest)
        raise OpError(f"takes numbers, not {input_type}")

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        wide = "bigint" if input_type.is_integer else "double"
        as_ = int if input_type.is_integer else float
        y = x.cast(wide)
        held = (y >= F.lit(as_(self.min)).cast(wide)) & (y <= F.lit(as_(self.max)).cast(wide))
        return F.when(held, y).cast(self.type_of(input_type).element)

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        out = self.type_of(input_type).arrow
        y = x.cast(pa.int64()) if input_type.is_integer else doubles(x)
        as_ = int if input_type.is_integer else float
        low, high = pa.scalar(as_(self.min), y.type), pa.scalar(as_(self.max), y.type)
        held = pc.and_(pc.greater_equal(y, low), pc.less_equal(y, high))
        kept = pc.if_else(held, y, pa.scalar(None, y.type))
        return kept.cast(out) if input_type.is_integer else _rounded(kept, out)


def _rounded(x: pa.Array, out: pa.DataType) -> pa.Array:
    """Doubles within float's range as float, or as they are."""
    if out != pa.float32():
        return x
    values = x.to_numpy(zero_copy_only=False).astype(np.float32)
    return pa.array(values, out, from_pandas=True)
