"""log: log(1 + x)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from headrace.features.functions.arrays import doubles, from_numpy, to_numpy
from headrace.features.functions.log1p import log1p
from headrace.features.ops.base import Elementwise, State, number
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column


class Log(Elementwise):
    """The natural logarithm of 1 + x, as NVTabular's LogOp. double out.

    Where x <= -1 there is none and the result is missing (NVTabular: NaN, or -inf at -1); clip first if that matters.
    Spark's log1p is fdlibm's, and the Arrow kernel is the same algorithm: equal to the last bit of a double on CPUs.
    On GPUs log1p is the device library's, within one unit in the last place.
    """

    name: ClassVar[str] = "log"

    def type_of(self, input_type: ValueType) -> ValueType:
        return number(input_type, "double")

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        return F.log1p(x.cast("double"))  # null where x <= -1

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        return from_numpy(log1p(to_numpy(doubles(x))))
