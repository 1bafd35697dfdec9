"""Spark's `xxhash64` (XXH64, Collet, seed 42) of whole columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.udfs.arrow import text_column
from headrace.udfs.library import host

I64 = npt.NDArray[np.int64]


def xxhash64_integers(values: I64, seed: I64 | None = None) -> I64:
    """Hash a bigint column as Spark's xxhash64 does. int64 [n] -> int64 [n].

    `seed`: of each row the hash of the columns before this one, int64 [n].

    Raises:
        UserError: the library was not built.
    """
    values, out = np.ascontiguousarray(values, np.int64), np.empty(len(values), np.int64)
    seeds = _seeds(seed, len(values))
    host().xxhash64_integers(values.ctypes.data, len(values), _address(seeds), out.ctypes.data)
    return out


def xxhash64_strings(values: pa.StringArray, seed: I64 | None = None) -> I64:
    """Hash a string column; a null's hash is the seed.

    pa.string [n] -> int64 [n]. `seed`, errors: see `xxhash64_integers`.
    """
    out = np.empty(len(values), np.int64)
    seeds = _seeds(seed, len(values))
    host().xxhash64_text(text_column(values), len(values), _address(seeds), out.ctypes.data)
    return out


def _seeds(seed: I64 | None, rows: int) -> I64 | None:
    if seed is None:
        return None
    if len(seed) != rows:
        raise ValueError(f"{rows} values, {len(seed)} seeds")
    return np.ascontiguousarray(seed, np.int64)


def _address(seeds: I64 | None) -> int | None:
    return None if seeds is None else seeds.ctypes.data
