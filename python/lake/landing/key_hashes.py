"""Hashes of rows' key columns, the same for equal keys however they were read, and their files.

The hashes of a data file's rows stand in the folder of a load. Those of any range are read without the rest.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.storage import Location
from headrace.udfs.xxhash64 import xxhash64_integers, xxhash64_strings

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
#: Of the file's name: the same hashes in ascending order, of rows that have a key.
_SORTED = ".sorted.npy"


def key_hashes(columns: Sequence[pa.ChunkedArray | pa.Array]) -> tuple[I64, npt.NDArray[np.bool_]]:
    """Return (hash, whether the row has a key: none of its columns is null) of scalar key columns. int64, bool [rows].

    Raises:
        UserError: the library of column functions was not built.
    """
    seed: I64 | None = None
    has_key = np.ones(len(columns[0]), np.bool_)
    for column in columns:
        array = _single_array(column)
        if array.null_count:
            has_key &= array.is_valid().to_numpy(zero_copy_only=False)
        if pa.types.is_string(array.type):
            seed = xxhash64_strings(array, seed)
        else:
            seed = xxhash64_integers(_integers(array), seed)
    assert seed is not None
    return seed, has_key


def _single_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.nulls(0, column.type)])


def _integers(array: pa.Array) -> I64:
    """Return numbers, booleans and times as int64; doubles by their bits, 0.0 and -0.0 alike."""
    if pa.types.is_floating(array.type):
        values = pc.fill_null(array.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False) + 0.0
        return np.ascontiguousarray(values).view(np.int64)
    if pa.types.is_date(array.type):
        array = array.cast(pa.int32())
    numbers: I64 = pc.fill_null(array.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    return numbers


def save_hashes(folder: Location, hashes: Sequence[I64], keyed: Sequence[Mask]) -> str:
    """Save the hashes of a file's rows, given in pieces (headrace.lake.landing.key_hashes). Returns their name."""
    name = f"hashes-{uuid.uuid4()}.npz"
    every, of_key = np.concatenate([np.zeros(0, np.int64), *hashes]), np.concatenate([np.zeros(0, np.bool_), *keyed])
    with (folder / name).new_file() as place, open(place, "wb") as file:
        np.savez(file, hashes=every, keyed=of_key)
    ordered = every if of_key.all() else every[of_key]
    ordered.sort()
    save_array(folder / (name + _SORTED), ordered)
    return name


def save_array(place: Location, values: I64) -> None:
    """Save an array in NumPy's format, under just that name."""
    with place.new_file() as path, open(path, "wb") as file:
        np.save(file, values)


def load_hashes(folder: Location, name: str) -> tuple[I64, Mask]:
    """Return (hash, whether it has a key) of each row. int64, bool [rows]."""
    with np.load((folder / name).local_path()) as saved:
        return saved["hashes"], saved["keyed"]


def hashes_of_share(folder: Location, name: str, share: int, shares: int) -> I64:
    """Return the hashes of rows with a key in one of `shares` equal ranges of all hashes; int64, ascending, mapped."""
    ordered = np.load((folder / (name + _SORTED)).local_path(), mmap_mode="r")
    first, last = (
        len(ordered) if k == shares else int(np.searchsorted(ordered, np.int64(k * (1 << 64) // shares - (1 << 63))))
        for k in (share, share + 1)
    )
    hashes: I64 = ordered[first:last]
    return hashes
