"""A hash of a row's key columns, the same for equal keys however they were read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.udfs.xxhash64 import xxhash64_integers, xxhash64_strings

I64 = npt.NDArray[np.int64]


def key_hashes(columns: Sequence[pa.ChunkedArray | pa.Array]) -> tuple[I64, npt.NDArray[np.bool_]]:
    """(hash, whether the row has a key: none of its columns is null) of scalar key columns. int64, bool [rows].

    Raises:
        UserError: the library of column functions was not built.
    """
    seed: I64 | None = None
    whole = np.ones(len(columns[0]), np.bool_)
    for column in columns:
        array = _one(column)
        if array.null_count:
            whole &= array.is_valid().to_numpy(zero_copy_only=False)
        if pa.types.is_string(array.type):
            seed = xxhash64_strings(array, seed)
        else:
            seed = xxhash64_integers(_integers(array), seed)
    assert seed is not None
    return seed, whole


def _one(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.nulls(0, column.type)])


def _integers(array: pa.Array) -> I64:
    """Numbers, booleans and times as int64; doubles by their bits, 0.0 and -0.0 alike."""
    if pa.types.is_floating(array.type):
        values = pc.fill_null(array.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False) + 0.0
        return np.ascontiguousarray(values).view(np.int64)
    if pa.types.is_date(array.type):
        array = array.cast(pa.int32())
    found: I64 = pc.fill_null(array.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    return found
