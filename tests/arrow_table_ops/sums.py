"""Exact sums of numbers on a grid, as headrace.features.table_ops.trailing has them, by NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.features.table_ops.trailing import _GRID, _LOW, _MOST, is_real
from headrace.features.types import ValueType
from tests.arrow_table_ops.windows import I64


def to_grid(x: pa.Array, input_type: ValueType) -> tuple[I64, npt.NDArray[np.bool_]]:
    """Return integers on the grid of exact sums, int64 [n], and the mask of rows with a value, bool [n]."""
    if not is_real(input_type):
        has_value = x.is_valid().to_numpy(zero_copy_only=False)
        return x.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False), has_value
    values = x.cast(pa.float64()).to_numpy(zero_copy_only=False)
    has_value = np.isfinite(values)
    clipped = np.clip(np.where(has_value, values, 0.0), -_MOST, _MOST)
    return np.rint(clipped * _GRID).astype(np.int64), has_value


def halves(q: I64) -> tuple[I64, I64]:
    """Split integers into their high and low halves, each int64 [n]."""
    return q >> 32, q & _LOW


def joined(high: I64, low: I64, input_type: ValueType) -> npt.NDArray[np.float64]:
    """Join the sums of high and low halves to doubles: float64 [n]."""
    total = high.astype(np.float64) * float(2**32) + low.astype(np.float64)
    return total * (1 / _GRID) if is_real(input_type) else total
