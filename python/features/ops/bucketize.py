"""bucketize: numbers to the codes of intervals with given boundaries."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field, StrictFloat, StrictInt, field_validator

from headrace.features.functions.arrays import doubles, to_numpy
from headrace.features.ops.base import Elementwise, State
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
    """Codes from `first` on, by halving: a value meets about log2(n) comparisons."""
    from pyspark.sql import functions as F

    if not boundaries:
        return F.lit(first)
    middle = len(boundaries) // 2
    below = _descend(x, boundaries[:middle], first)
    above = _descend(x, boundaries[middle + 1 :], first + middle + 1)
    return F.when(x < F.lit(boundaries[middle]), below).otherwise(above)
