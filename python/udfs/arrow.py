"""The column functions over Arrow arrays, without a copy of what goes in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.udfs.library import ColumnLibrary, NativeColumn, host

I32 = npt.NDArray[np.int32]
Bits = npt.NDArray[np.uint8]


def ngrams(
    text: pa.Array, n: int, buckets: int, most: int | None = None, library: ColumnLibrary | None = None
) -> pa.ListArray:
    """Codes 1..buckets of each `n` characters that follow each other, in their order; null for null.

    A text of fewer characters is one n-gram, an empty one has none. The code of a gram is that of `hash_bucket` of it:
    1 + pmod(xxhash64(gram), buckets). Ill-formed UTF-8 counts as U+FFFD, as Python's errors="replace" has it.

    Args:
        text: string or binary [rows].
        n: 1..8.
        buckets: 1..2**31 - 1.
        most: the first so many of a row; None: all.

    Returns:
        list<int32> [rows].

    Raises:
        ValueError: a parameter outside its range.
    """
    lib, rows = library or host(), len(text)
    column, bits = text_column(text), _bits(text)
    offsets = np.empty(rows + 1, np.int32)
    lib.ngrams_offsets(column, rows, n, most or 0, _address(offsets), _address(bits))
    return _lists(offsets, bits, lambda out: lib.ngrams(column, rows, n, most or 0, buckets, _address(offsets), out))


def cross(columns: Sequence[pa.Array], buckets: int, most: int, library: ColumnLibrary | None = None) -> pa.ListArray:
    """Codes 1..buckets of every combination of one value of each column, the first column's value changing slowest.

    Null values of lists are left out. Null where one of the columns is null. Of scalars (lists of one) the code is that
    of `hashed_cross`: 1 + pmod(xxhash64(a, b, ...), buckets).

    Args:
        columns: int64 or list<int64> [rows] each, 1 to 8.
        buckets: 1..2**31 - 1.
        most: the first so many of a row, at least 1.

    Returns:
        list<int32> [rows].

    Raises:
        ValueError: a parameter outside its range.
        OverflowError: rows x most does not fit 32-bit offsets.
    """
    lib, rows = library or host(), len(columns[0])
    if any(len(x) != rows for x in columns):
        raise ValueError("columns of different lengths")
    ids = [ids_column(x) for x in columns]
    offsets, bits = np.empty(rows + 1, np.int32), np.zeros((rows + 7) // 8, np.uint8)
    lib.cross_offsets(ids, rows, most, _address(offsets), _address(bits))
    return _lists(offsets, bits, lambda out: lib.cross(ids, rows, most, buckets, _address(offsets), out))


def minhash(ids: pa.Array, hashes: int, library: ColumnLibrary | None = None) -> pa.FixedSizeListArray:
    """MinHash signatures of lists as sets (Broder, On the resemblance and containment of documents, 1997).

    Number j is the least, as signed integers, of xxhash64(j, id) over the ids that are not null. The share of equal
    numbers of two signatures estimates the Jaccard similarity of their sets. Null where a row has no id.

    Args:
        ids: list<int64> [rows].
        hashes: 1..1024.

    Returns:
        fixed_size_list<int64>[hashes] [rows].

    Raises:
        ValueError: a parameter outside its range.
        OverflowError: rows x hashes does not fit 32 bits.
    """
    lib, rows = library or host(), len(ids)
    out = np.zeros((rows, max(hashes, 0)), np.int64)
    bits = np.zeros((rows + 7) // 8, np.uint8)
    lib.minhash(ids_column(ids), rows, hashes, _address(out), _address(bits))
    return pa.Array.from_buffers(
        pa.list_(pa.int64(), hashes), rows, [pa.py_buffer(bits)], children=[pa.array(out.ravel())]
    )


def text_column(text: pa.Array) -> NativeColumn:
    """Return a string or binary array as a column of the interface; `text` must outlive it."""
    if not (pa.types.is_string(text.type) or pa.types.is_binary(text.type)):
        raise TypeError(f"takes string and binary arrays, not {text.type}")
    validity, offsets, data = text.buffers()
    return NativeColumn(
        offsets.address + 4 * text.offset if offsets is not None else _address(_ZERO),
        data.address if data is not None else None,
        data.size if data is not None else 0,
        validity.address if validity is not None else None,
        text.offset,
    )


def ids_column(ids: pa.Array) -> NativeColumn:
    """Return an int64 or list<int64> array as a column of the interface; `ids` must outlive it."""
    if pa.types.is_int64(ids.type):
        validity, data = ids.buffers()
        return NativeColumn(
            None,
            data.address + 8 * ids.offset if data is not None else None,
            len(ids),
            validity.address if validity is not None else None,
            ids.offset,
        )
    if not (pa.types.is_list(ids.type) and pa.types.is_int64(ids.type.value_type)):
        raise TypeError(f"takes int64 and list<int64> arrays, not {ids.type}")
    validity, offsets = ids.buffers()[:2]
    # The values as they are, not cut to the slice: offsets point into them.
    values = ids.values
    bits, data = values.buffers()
    return NativeColumn(
        offsets.address + 4 * ids.offset if offsets is not None else _address(_ZERO),
        data.address + 8 * values.offset if data is not None else None,
        len(values),
        validity.address if validity is not None else None,
        ids.offset,
        bits.address if bits is not None else None,
        values.offset,
    )


#: Offsets of an array without rows, which may lack them.
_ZERO = np.zeros(2, np.int32)


def _address(array: npt.NDArray[np.generic]) -> int:
    return array.ctypes.data


def _bits(x: pa.Array) -> Bits:
    return np.zeros((len(x) + 7) // 8, np.uint8)


def _lists(offsets: I32, bits: Bits, write: Callable[[int], None]) -> pa.ListArray:
    values = np.empty(int(offsets[-1]), np.int32)
    write(_address(values))
    return pa.Array.from_buffers(
        pa.list_(pa.int32()), len(offsets) - 1, [pa.py_buffer(bits), pa.py_buffer(offsets)], children=[pa.array(values)]
    )


I64 = npt.NDArray[np.int64]


def xxhash64_integers(values: I64, seed: I64 | None = None) -> I64:
    """Hash a bigint column as Spark's xxhash64 does. int64 [n] -> int64 [n].

    `seed`: of each row the hash of the columns before this one, int64 [n].

    Raises:
        UserError: the library was not built.
    """
    values, out = np.ascontiguousarray(values, np.int64), np.empty(len(values), np.int64)
    seeds = _seeds(seed, len(values))
    host().xxhash64_integers(values.ctypes.data, len(values), _seeds_address(seeds), out.ctypes.data)
    return out


def xxhash64_strings(values: pa.StringArray, seed: I64 | None = None) -> I64:
    """Hash a string column; a null's hash is the seed.

    pa.string [n] -> int64 [n]. `seed`, errors: see `xxhash64_integers`.
    """
    out = np.empty(len(values), np.int64)
    seeds = _seeds(seed, len(values))
    host().xxhash64_text(text_column(values), len(values), _seeds_address(seeds), out.ctypes.data)
    return out


def _seeds(seed: I64 | None, rows: int) -> I64 | None:
    if seed is None:
        return None
    if len(seed) != rows:
        raise ValueError(f"{rows} values, {len(seed)} seeds")
    return np.ascontiguousarray(seed, np.int64)


def _seeds_address(seeds: I64 | None) -> int | None:
    return None if seeds is None else seeds.ctypes.data
