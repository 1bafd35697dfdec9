"""What a decimal becomes where it enters a chain: a double, or its text.

No operator that a spec can name: headrace.features.workflow.binding puts it before a chain's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.features.ops.base import Elementwise, State
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column

#: Whole numbers up to here, and powers of ten up to 10**22, are doubles; so their quotient is rounded once.
_EXACT = 2**53
_EXACT_POWER = 22


class FromDecimal(Elementwise):
    """Decimals as numbers, each the nearest double; or as texts, in plain notation with all digits of the scale (7 as a
    decimal(4,2) is `7.00`). Other columns pass unchanged.
    """

    name: ClassVar[str] = "from_decimal"

    to: Literal["double", "string"]

    def type_of(self, input_type: ValueType) -> ValueType:
        return ValueType(self.to) if input_type.element == "decimal" else input_type

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        return x.cast(self.to) if input_type.element == "decimal" else x

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        if input_type.element != "decimal":
            return x
        return doubles(x) if self.to == "double" else texts(x)


def doubles(x: pa.Array) -> pa.Array:
    """decimal128 as float64, rounded to nearest; nulls stay. (Arrow's own cast is off by a bit now and then.)"""
    scale = x.type.scale
    high, low = _halves(x)
    there = x.is_valid().to_numpy(zero_copy_only=False)
    # The 128 bits are of one 64-bit number.
    small = (high == low >> 63) & (low >= -_EXACT) & (low <= _EXACT)
    out = low.astype(np.float64) / np.float64(10.0**scale) if scale <= _EXACT_POWER else np.zeros(len(x))
    if scale > _EXACT_POWER:
        small[:] = False
    for i in np.flatnonzero(there & ~small).tolist():
        out[i] = float(x[i].as_py())
    return pa.array(out, pa.float64(), mask=~there)


def texts(x: pa.Array) -> pa.Array:
    """decimal128 in plain notation, as Spark spells it; nulls stay."""
    return pa.array([None if v is None else f"{v:f}" for v in x.to_pylist()], pa.string())


def _halves(x: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The high and the low 64 bits of each value; of a null any. int64 [n] each."""
    buffer = x.buffers()[1]
    if buffer is None or not len(x):
        empty = np.zeros(len(x), np.int64)
        return empty, empty.copy()
    words = np.frombuffer(buffer, np.int64)[2 * x.offset : 2 * (x.offset + len(x))]
    return words[1::2], words[0::2]
