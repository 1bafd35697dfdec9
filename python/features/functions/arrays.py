"""Arrow arrays as NumPy's and back, and lists with other elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from headrace.compute import pc


def one_chunk(x: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array; copied only where it has several chunks."""
    if x.num_chunks == 1:
        return x.chunk(0)
    return pa.concat_arrays(x.chunks) if x.num_chunks else pa.array([], x.type)


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """Return all rows as one batch."""
    return pa.RecordBatch.from_arrays([one_chunk(c) for c in table.columns], table.schema.names)


def nan_to_null(x: pa.Array) -> pa.Array:
    """Floating-point numbers with null for NaN."""
    return pc.if_else(pc.is_nan(x), pa.scalar(None, x.type), x)


def input_values(x: pa.Array) -> pa.Array:
    """Return an input column as operators see it: NaN is null, a null list is empty."""
    if not pa.types.is_list(x.type):
        return nan_to_null(x) if pa.types.is_floating(x.type) else x
    if x.null_count:
        x = pc.if_else(x.is_valid(), x, pa.scalar([], x.type))
    return with_elements(x, nan_to_null(x.flatten())) if pa.types.is_floating(x.type.value_type) else x


def is_missing(x: pa.Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return a mask that is True where a value of `input_values` is missing: null, an empty list. bool [n]."""
    none = pc.equal(pc.list_value_length(x), 0) if pa.types.is_list(x.type) else x.is_null()
    return np.asarray(none.to_numpy(zero_copy_only=False), np.bool_)


def with_elements(lists: pa.ListArray, elements: pa.Array) -> pa.ListArray:
    """Return lists of the same lengths with other elements. `lists` has no null list."""
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), elements)


def doubles(x: pa.Array) -> pa.Array:
    """Return any numbers as float64, rounded to nearest (bigint above 2**53), nulls kept."""
    if pa.types.is_boolean(x.type):
        x = x.cast(pa.int8())
    return x.cast(pa.float64(), safe=False)


def to_numpy(x: pa.Array) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return float64 with NaN for null."""
    return np.ascontiguousarray(x.to_numpy(zero_copy_only=False), np.float64)


def from_numpy(x: np.ndarray[Any, np.dtype[np.float64]]) -> pa.Array:
    """Return float64 with null for NaN."""
    return pa.array(x, pa.float64(), from_pandas=True)
