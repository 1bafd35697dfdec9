"""Sums over events that come out the same whatever the order, in both bodies: integers in two halves.

An integer is summed as it is. A real number is taken on a grid of 2**-20 (about a millionth), at most 2**42 (4.4e12)
from zero; what is no finite number is no value. Each is cut into q = high * 2**32 + low; both halves of a thousand
million values sum within 64 bits, so adding and taking away again is exact, which a sum of doubles is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column

_GRID = float(2**20)
_MOST = float(2**42)
_LOW = 2**32 - 1

I64 = npt.NDArray[np.int64]


def _is_real(given: ValueType) -> bool:
    return given.element in ("float", "double")


def whole(x: Column, given: ValueType) -> Column:
    """A number as a bigint on its grid; null where it is no finite number."""
    from pyspark.sql import functions as F

    if not _is_real(given):
        return x.cast("int").cast("bigint") if given.element == "boolean" else x.cast("bigint")
    x = x.cast("double")
    infinity = F.lit(float("inf"))
    # NaN is above infinity in Spark's order.
    finite = F.when((x < infinity) & (x > -infinity), x)
    clipped = F.when(finite > _MOST, _MOST).when(finite < -_MOST, -_MOST).otherwise(finite)
    return F.rint(clipped * F.lit(_GRID)).cast("bigint")


def halves(q: Column) -> tuple[Column, Column]:
    """(high, low) of a bigint."""
    from pyspark.sql import functions as F

    return F.shiftright(q, 32), q.bitwiseAND(F.lit(_LOW).cast("bigint"))


def joined(high: Column, low: Column, given: ValueType) -> Column:
    """The sum as a double, of the sums of the halves."""
    from pyspark.sql import functions as F

    total = high.cast("double") * F.lit(float(2**32)) + low.cast("double")
    return total * F.lit(1 / _GRID) if _is_real(given) else total


def whole_arrow(x: pa.Array, given: ValueType) -> tuple[I64, npt.NDArray[np.bool_]]:
    """As `whole`: int64 [n], and where there is a value, bool [n]."""
    if not _is_real(given):
        there = x.is_valid().to_numpy(zero_copy_only=False)
        return x.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False), there
    values = x.cast(pa.float64()).to_numpy(zero_copy_only=False)
    there = np.isfinite(values)
    clipped = np.clip(np.where(there, values, 0.0), -_MOST, _MOST)
    return np.rint(clipped * _GRID).astype(np.int64), there


def halves_arrow(q: I64) -> tuple[I64, I64]:
    """As `halves`."""
    return q >> 32, q & _LOW


def joined_arrow(high: I64, low: I64, given: ValueType) -> npt.NDArray[np.float64]:
    """As `joined`."""
    total = high.astype(np.float64) * float(2**32) + low.astype(np.float64)
    return total * (1 / _GRID) if _is_real(given) else total
