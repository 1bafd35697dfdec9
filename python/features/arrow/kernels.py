"""Columns of a batch whose values are kept once each, as a dictionary and a number for each row, and loops over them.

The loops are in C++ (native/cpp/dictionary.cpp) where `make native` has built it, which lets other threads run; else by
NumPy and Arrow, with the same results.

`dictionary_columns` takes a column chunk's own dictionary from the Parquet file (native/cpp/dictionary_chunk.cpp).
Arrow's decoder looks up each text of each row anew, and returns integers as they are, to be numbered again. Chunks that
are stored in another way are left to Arrow.

Of Criteo's 26 categories most have far fewer values than rows, and Parquet stores them as a dictionary and numbers. An
operator that treats every value alone (`Op.by_value`) gives the same result on the dictionary, at a fraction of the
cost; the rows follow by one gather at the end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.dataset import native
from headrace.features.ops.base import State
from headrace.features.vocabulary.keyed_tables import KeyedTable
from headrace.features.vocabulary.lookup import Lookup
from headrace.features.workflow.workflow import BoundOp

Array = npt.NDArray[Any]
#: Numbers of values: uint8, uint16 or int32.
Indices = npt.NDArray[Any]
#: Numbers of rows, or of places.
Rows = npt.NDArray[np.int32]

#: Largest range of integers that are numbered by a table.
_MOST_RANGE = 1 << 22
#: Texts to count at once: their table takes 64 MiB (96 while it grows). And their bytes, within Arrow's 32-bit offsets.
_TEXTS_AT_ONCE, _BYTES_AT_ONCE = 1 << 20, 1 << 28


def scatter(values: Array, index: Indices | None, places: Rows, out: Array) -> None:
    """Set out[places] = values[index]; without an index out[places] = values.

    Args:
        values: [n], of out's dtype.
        index: [m], within `values`.
        places: [m], within `out`, none twice.
        out: is filled at `places`.
    """
    lib = native.library()
    values = np.ascontiguousarray(values, out.dtype)
    if lib is not None and lib.headrace_scatter(
        address(values),
        out.itemsize,
        None if index is None else address(index),
        0 if index is None else index.itemsize,
        address(places),
        len(places),
        address(out),
    ):
        return
    out[places] = values if index is None else values[index]


def take(values: Array, rows: Rows) -> Array:
    """Return values[rows]: of one dimension, of 1, 2, 4 or 8 bytes each."""
    lib = native.library()
    values = np.ascontiguousarray(values)
    out = np.empty(len(rows), values.dtype)
    if lib is None or not lib.headrace_take(address(values), out.itemsize, address(rows), len(rows), address(out)):
        return values[rows]
    return out


def row_order(
    hashes: npt.NDArray[np.int64], part: Indices | None, parts: int
) -> tuple[Rows, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return rows by part, hash and number, but those of other parts than 0..parts-1.

    Args:
        hashes: [n].
        part: of each row [n]; None: 0.

    Returns:
        The rows; their hashes; where among them each part begins and the last one ends, int64 [parts + 1].

    Raises:
        MemoryError: there is none left for 32 bytes a row.
    """
    lib, n = native.library(), len(hashes)
    if lib is None:
        order = np.argsort(hashes, kind="stable")
        edges = np.array([0, n])
        if part is not None:
            order = order[np.argsort(part[order], kind="stable")]
            edges = np.searchsorted(part[order], np.arange(parts + 1))
        order = order[: edges[-1]]
        return order.astype(np.int32), hashes[order], edges
    hashes = np.ascontiguousarray(hashes)
    part = None if part is None else np.ascontiguousarray(part)
    rows, sorted_, edges = np.empty(n, np.int32), np.empty(n, np.int64), np.empty(parts + 1, np.int64)
    if not lib.headrace_row_order(
        address(hashes),
        None if part is None else address(part),
        0 if part is None else part.itemsize,
        n,
        parts,
        address(rows),
        address(sorted_),
        address(edges),
    ):
        raise MemoryError(f"no memory to sort {n} rows")
    return rows[: edges[-1]], sorted_[: edges[-1]], edges


def count(index: Indices, mask: npt.NDArray[np.bool_] | None, size: int) -> npt.NDArray[np.int64]:
    """Return how many of the rows that `mask` has (None: all) have each of the values 0..size-1. int64 [size]."""
    lib = native.library()
    if lib is None or size > len(index):
        return np.bincount(index if mask is None else index[mask], minlength=size)
    tables = 4 if 4 * size <= len(index) else 1
    counts = np.zeros(tables * size, np.int64)
    index = np.ascontiguousarray(index)
    mask = None if mask is None else np.ascontiguousarray(mask)
    masked = None if mask is None else address(mask)
    done = lib.headrace_count(address(index), index.itemsize, masked, len(index), size, tables, address(counts))
    assert done
    return counts[:size]


def narrow(index: pa.Array, null: int, size: int) -> Indices:
    """Return Arrow's int32 indices of a dictionary in as few bytes as hold 0..size-1, that of a null being `null`."""
    dtype = index_type(size)
    lib = native.library()
    if lib is None or index.type != pa.int32():
        wide: Indices = pc.fill_null(index, null).to_numpy(zero_copy_only=False)
        return wide.astype(dtype)
    validity, values = index.buffers()
    out = np.empty(len(index), dtype)
    done = lib.headrace_narrow(
        values.address + 4 * index.offset,
        validity.address if validity is not None and index.null_count else None,
        index.offset,
        len(index),
        null,
        dtype.itemsize,
        address(out),
    )
    assert done
    return out


def index_type(size: int) -> np.dtype[Any]:
    """Return the dtype in which numbers 0..size-1 are stored."""
    return np.dtype(np.uint8 if size <= 1 << 8 else np.uint16 if size <= 1 << 16 else np.int32)


def used(column: pa.DictionaryArray) -> pa.DictionaryArray:
    """Return the same values, in a dictionary of those that a row has."""
    index, dictionary = column.indices, column.dictionary
    is_used = np.bincount(index.drop_null().to_numpy(), minlength=len(dictionary)) > 0
    used_numbers = np.flatnonzero(is_used)
    if len(used_numbers) == len(dictionary):
        return column
    number = np.cumsum(is_used, dtype=np.int32) - np.int32(1)
    # The index of a null is ignored.
    new_index = (
        number[pc.fill_null(index, 0).to_numpy(zero_copy_only=False)]
        if len(used_numbers)
        else np.zeros(len(index), np.int32)
    )
    mask = index.is_null().to_numpy(zero_copy_only=False) if index.null_count else None
    return pa.DictionaryArray.from_arrays(
        pa.array(new_index, mask=mask), dictionary.take(pa.array(used_numbers)), safe=False
    )


def dictionary_encode(values: pa.Array) -> pa.DictionaryArray:
    """Return `values.dictionary_encode(null_encoding="encode")`, the indices in as few bytes as hold them."""
    encoded = _by_table(values)
    if encoded is None:
        by_arrow = values.dictionary_encode(null_encoding="encode")
        encoded = by_arrow.indices, by_arrow.dictionary
    index, dictionary = encoded
    return pa.DictionaryArray.from_arrays(pa.array(narrow(index, 0, len(dictionary))), dictionary, safe=False)


def _by_table(values: pa.Array) -> tuple[pa.Array, pa.Array] | None:
    lib = native.library()
    if lib is None or values.type not in (pa.int32(), pa.int64()) or len(values) == values.null_count:
        return None
    ends = pc.min_max(values).as_py()
    size = ends["max"] - ends["min"] + 1
    if size > _MOST_RANGE:
        return None
    width = values.type.bit_width // 8
    most = min(size + 1, len(values))
    numbers, index = np.full(size, -1, np.int32), np.empty(len(values), np.int32)
    dictionary, null_at = np.empty(most, values.type.to_pandas_dtype()), np.empty(1, np.int64)
    validity, data = values.buffers()
    size_used = lib.headrace_encode_integers(
        data.address + width * values.offset,
        width,
        validity.address if validity is not None and values.null_count else None,
        values.offset,
        len(values),
        ends["min"],
        address(numbers),
        most,
        address(index),
        address(dictionary),
        address(null_at),
    )
    assert size_used > 0
    mask = np.zeros(size_used, np.bool_)
    if null_at[0] >= 0:
        mask[null_at[0]] = True
    return pa.array(index), pa.array(dictionary[:size_used], values.type, mask=mask)


def counted_texts(parts: Sequence[tuple[pa.Array, pa.Array, pa.Array]], least: int) -> pa.Table | None:
    """Return (key, rows, day): each text of the parts, its rows and its first day; those with at least `least` rows.

    The groups are in any order. Memory does not grow with the texts, but with those that come out: where there are many
    they are counted by parts of their hash, one after the other.

    Args:
        parts: (key string, rows int64, day int64) each, no nulls.
        least: rows that a text must have.

    Returns:
        None where the library is not there.

    Raises:
        MemoryError: there is none left for the table.
    """
    lib = native.library()
    if lib is None:
        return None
    texts, size = sum(len(key) for key, _, _ in parts), sum(key.nbytes for key, _, _ in parts)
    rounds = max(1, -(-texts // _TEXTS_AT_ONCE), -(-size // _BYTES_AT_ONCE))
    tables = [_round(lib, parts, least, i, rounds) for i in range(rounds)]
    return pa.concat_tables(tables)


def _round(
    lib: Any, parts: Sequence[tuple[pa.Array, pa.Array, pa.Array]], least: int, number: int, rounds: int
) -> pa.Table:
    # Most parts have no text twice, so expect as many texts as the largest part has.
    counts = lib.headrace_text_counts(max((len(key) for key, _, _ in parts), default=0) // rounds)
    if not counts:
        raise MemoryError("no memory to count texts")
    try:
        for key, rows, day in parts:
            _, offsets, data = key.buffers()
            if len(key) and not lib.headrace_text_counts_add(
                counts,
                offsets.address + 4 * key.offset,
                data.address if data is not None else None,
                address(rows.to_numpy()),
                address(day.to_numpy()),
                len(key),
                number,
                rounds,
            ):
                raise MemoryError("no memory to count texts")
        size = np.zeros(1, np.int64)
        n = lib.headrace_text_counts_size(counts, least, address(size))
        if size[0] >= 2**31:
            raise MemoryError(f"{n} texts whose hashes are alike take {size[0]} bytes; a column holds 2 GiB")
        offsets, data = np.empty(n + 1, np.int32), np.empty(size[0], np.uint8)
        sums, days = np.empty(n, np.int64), np.empty(n, np.int64)
        lib.headrace_text_counts_take(counts, least, address(offsets), address(data), address(sums), address(days))
    finally:
        lib.headrace_text_counts_free(counts)
    keys = pa.StringArray.from_buffers(n, pa.py_buffer(offsets), pa.py_buffer(data))
    return pa.table({"key": keys, "rows": pa.array(sums), "day": pa.array(days)})


def address(x: Array) -> int:
    """Return the address of an array's first element."""
    return int(x.__array_interface__["data"][0])


#: Parquet's numbers of physical types and of compressions.
_PHYSICAL_TYPES = {"INT32": (1, pa.int32()), "INT64": (2, pa.int64()), "BYTE_ARRAY": (6, pa.string())}
_CODECS = {"UNCOMPRESSED": 0, "SNAPPY": 1}


def dictionary_columns(
    file: pq.ParquetFile, fd: int, group: int, requested: Mapping[str, pa.DataType]
) -> Mapping[str, pa.DictionaryArray]:
    """Return columns of a row group of which each value is kept once; those that are left out are Arrow's to read.

    Args:
        file: the file, for what its footer says.
        fd: the same, to be read from.
        group: the row group.
        requested: names of columns that may be returned, with the types that they must have there.

    Returns:
        Texts, int32 and int64: no value twice in a dictionary, a null in it (the last) where a row has one, numbers of
        as few bytes as hold them. A dictionary may have values that no row has.
    """
    lib = native.library()
    if lib is None:
        return {}
    footer, columns = file.metadata.row_group(group), {}
    schema, stored = file.schema_arrow, file.schema
    for i in range(footer.num_columns):
        name, leaf = stored.column(i).path, stored.column(i)
        # A struct's field has its path as its name.
        if name not in requested or schema.get_field_index(name) < 0:
            continue
        if leaf.max_repetition_level or leaf.max_definition_level > 1:
            continue
        chunk = footer.column(i)
        number, type_ = _PHYSICAL_TYPES.get(chunk.physical_type, (0, None))
        declared = schema.field(name).type
        if pa.types.is_dictionary(declared):
            declared = declared.value_type
        if (
            not declared == type_ == requested[name]
            or chunk.compression not in _CODECS
            or not chunk.has_dictionary_page
        ):
            continue
        start, size = chunk.dictionary_page_offset, chunk.total_compressed_size
        optional = leaf.max_definition_level
        read = lib.headrace_chunk_read(fd, start, size, footer.num_rows, number, _CODECS[chunk.compression], optional)
        if read:
            try:
                columns[name] = _chunk_column(lib, read, footer.num_rows, declared)
            finally:
                lib.headrace_chunk_free(read)
    return columns


def _chunk_column(lib: ctypes.CDLL, chunk: int, rows: int, type_: pa.DataType) -> pa.DictionaryArray:
    """Return the column that a chunk was decoded to."""
    counts = np.zeros(2, np.int64)
    values = lib.headrace_chunk_size(chunk, address(counts[:1]), address(counts[1:]))
    size, nulls = counts.tolist()
    index = np.empty(rows, index_type(values + bool(nulls)))
    offsets, data = np.empty(values + 1, np.int32), np.empty(size, np.uint8)
    lib.headrace_chunk_take(chunk, index.itemsize, address(index), address(offsets), address(data))
    parts = [pa.py_buffer(data)] if type_ != pa.string() else [pa.py_buffer(offsets), pa.py_buffer(data)]
    dictionary = pa.Array.from_buffers(type_, values, [None, *parts])
    if nulls:
        dictionary = pa.concat_arrays([dictionary, pa.nulls(1, type_)])
    return pa.DictionaryArray.from_arrays(pa.array(index), dictionary, safe=False)


#: Bytes of texts to decode at once, one for each row: dictionary-encoded texts may exceed memory, and the 2 GiB of an
#: Arrow array, once decoded.
DECODED_TEXT = 256 << 20


@dataclass(frozen=True)
class DictionaryColumn:
    """A column: its values, and for each row where among them its value is (None: a value a row, in order)."""

    values: pa.Array
    indices: Indices | None = None
    #: Whether `values` are distinct.
    distinct: bool = False

    def decode(self) -> pa.Array:
        """Return a value for each row."""
        return self.values if self.indices is None else self.values.take(pa.array(self.indices))

    def take(self, rows: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> pa.Array:
        """Return the values of some rows."""
        return self.values.take(pa.array(rows if self.indices is None else self.indices[rows]))

    def __len__(self) -> int:
        return len(self.values if self.indices is None else self.indices)

    def part(self, start: int, end: int) -> DictionaryColumn:
        """Return the rows from `start` to `end`."""
        if self.indices is None:
            return DictionaryColumn(self.values.slice(start, end - start), None, self.distinct)
        return DictionaryColumn(self.values, self.indices[start:end], self.distinct)

    def text_bytes(self) -> npt.NDArray[np.int64]:
        """Return bytes of each row's text. int64 [rows]."""
        if not len(self.values):
            return np.zeros(len(self), np.int64)
        ends = np.frombuffer(self.values.buffers()[1], np.int32)[self.values.offset :][: len(self.values) + 1]
        sizes = np.diff(ends) if self.indices is None else ends[1:][self.indices] - ends[:-1][self.indices]
        return sizes.astype(np.int64)


def text_ranges(columns: Iterable[DictionaryColumn], rows: int) -> list[tuple[int, int]]:
    """Return ranges of rows whose texts, when they are decoded, are together at most DECODED_TEXT a range.

    A row at least.

    Args:
        columns: those that are decoded. What has a value a row already counts for nothing.
        rows: of each of them.
    """
    texts = [c for c in columns if c.indices is not None and pa.types.is_string(c.values.type)]
    if sum(_most_text(c) for c in texts) <= DECODED_TEXT:
        return [(0, rows)]
    return ranges_of(np.sum([c.text_bytes() for c in texts], 0))


def _most_text(column: DictionaryColumn) -> int:
    """Return bytes of the decoded texts, at most; looks at the rows only where they are fewer than the values."""
    if len(column) < len(column.values):
        return int(column.text_bytes().sum())
    return len(column) * int(DictionaryColumn(column.values).text_bytes().max(initial=0))


def ranges_of(sizes: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return ranges of rows, each as long as its sizes add up to at most DECODED_TEXT; a row at least. int64 [rows]."""
    ends, edges = np.cumsum(sizes), [0]
    while edges[-1] < len(sizes):
        bytes_before = int(ends[edges[-1] - 1]) if edges[-1] else 0
        edges.append(max(int(np.searchsorted(ends, bytes_before + DECODED_TEXT, "right")), edges[-1] + 1))
    return list(pairwise(edges))


def apply_op(
    step: BoundOp,
    columns: Mapping[str, DictionaryColumn],
    state: Mapping[str, State],
    lookup: Callable[[str], Lookup],
    table: Callable[[str], KeyedTable],
    identity: pa.Array | None,
) -> dict[str, DictionaryColumn]:
    """Return a chain's columns after one step, by the Arrow kernels of its operator; see `BoundOp.arrow`."""
    if not step.op.by_value:
        pieces: dict[str, list[pa.Array]] = {}
        rows = max((len(columns[name]) for name in step.inputs), default=0)
        for start, end in text_ranges((columns[name] for name in step.inputs), rows):
            decoded = {name: columns[name].part(start, end).decode() for name in step.inputs}
            passed = {name: columns[name].values for name in step.passthrough}
            of_rows = None if identity is None else identity.slice(start, end - start)
            for name, x in step.arrow(decoded | passed, state, lookup, table, of_rows).items():
                pieces.setdefault(name, []).append(x)
        return {
            name: columns[name] if name in step.passthrough else DictionaryColumn(_joined(arrays))
            for name, arrays in pieces.items()
        }
    out = step.arrow({name: column.values for name, column in columns.items()}, state, _distinct(lookup), table, None)
    made_of = {name: arrays for name, (arrays,) in step.op.sources(step.inputs).items()} | {
        name: name for name in step.passthrough
    }
    return {name: DictionaryColumn(x, columns[made_of[name]].indices) for name, x in out.items()}


def _joined(pieces: list[pa.Array]) -> pa.Array:
    return pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)


def _distinct(lookup: Callable[[str], Lookup]) -> Callable[[str], Any]:
    return lambda name: lookup(name).distinct
