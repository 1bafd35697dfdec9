"""Sums over events that come out the same whatever the order: integers in two halves.

An integer is summed as it is. A real number is taken on a grid of 2**-20 (about a millionth), at most 2**42 (4.4e12)
from zero; what is no finite number is no value. Each is cut into q = high * 2**32 + low; both halves of a thousand
million values sum within 64 bits, so adding and taking away again is exact, which a sum of doubles is not.

Not learn.exact_sums, whose digits lie where the data's least and greatest number put them: that takes a look at all
events before the first window, and a window sum for each digit, where one grid takes two and knows no data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column

_GRID = float(2**20)
_MOST = float(2**42)
_LOW = 2**32 - 1

I64 = npt.NDArray[np.int64]


def is_real(input_type: ValueType) -> bool:
    """Whether it is summed on the grid."""
    return input_type.element in ("float", "double", "decimal")


def whole(x: Column, input_type: ValueType) -> Column:
    """A number as a bigint on its grid; null where it is no finite number."""
    from pyspark.sql import functions as F

    if not is_real(input_type):
        return x.cast("int").cast("bigint") if input_type.element == "boolean" else x.cast("bigint")
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


def joined(high: Column, low: Column, input_type: ValueType) -> Column:
    """The sum as a double, of the sums of the halves."""
    from pyspark.sql import functions as F

    total = high.cast("double") * F.lit(float(2**32)) + low.cast("double")
    return total * F.lit(1 / _GRID) if is_real(input_type) else total
