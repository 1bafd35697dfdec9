"""Windows of the past by NumPy: events by key in order of time, by binary searches, and exact sums on a grid."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.functions.timestamps import DAY_MICROS
from headrace.features.table_ops.base import FILE, LINE, QUERY
from headrace.features.table_ops.trailing import _GRID, _LOW, _MOST, is_real
from headrace.features.types import ValueType
from headrace.udfs.arrow import xxhash64_strings

I64 = npt.NDArray[np.int64]
Bits = npt.NDArray[np.bool_]


def column_array(table: pa.Table, name: str) -> pa.Array:
    """A column as one array."""
    x = table.column(name)
    if isinstance(x, pa.ChunkedArray):
        x = x.combine_chunks()
        if isinstance(x, pa.ChunkedArray):
            x = x.chunk(0) if x.num_chunks else pa.array([], x.type)
    return x


def replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    """The table with a column set, at its place or at the end."""
    position = table.schema.get_field_index(name)
    return table.append_column(name, values) if position < 0 else table.set_column(position, name, values)


def micros_of(x: pa.Array, input_type: ValueType) -> tuple[I64, Bits]:
    """Microseconds since 1970, and whether there is a time: int64 [n], bool [n]."""
    known = pc.is_valid(x).to_numpy(zero_copy_only=False)
    if input_type.element == "date":
        return x.cast(pa.int32()).fill_null(0).to_numpy().astype(np.int64) * DAY_MICROS, known
    return x.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).fill_null(0).to_numpy(), known


def codes_of(columns: Sequence[pa.Array], rows: int) -> I64:
    """One number for each distinct combination of values; -1 where one of them is null. [n] -> int64 [n]."""
    out = np.zeros(rows, np.int64)
    for x in columns:
        encoded = x.dictionary_encode()
        code = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        none = (code < 0) | (out < 0)
        _, out = np.unique(out * (len(encoded.dictionary) + 1) + code, return_inverse=True)
        out = np.where(none, -1, out.astype(np.int64))
    return out


def places(rows: int, files: pa.Array, lines: pa.Array) -> tuple[I64, I64]:
    """Numbers that sort rows by file (its UTF-8 bytes, as Spark does) and by line: each int64 [n]."""
    encoded = files.dictionary_encode()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    rank = np.empty(len(order) + 1, np.int64)
    rank[order] = np.arange(len(order))
    rank[-1] = -1
    return rank[encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)], lines.fill_null(-1).to_numpy()


class Past:
    """The events of a table, by key in order of time, file and line."""

    def __init__(self, table: pa.Table, keys: Sequence[str], time: str, type_: ValueType) -> None:
        """`table` has the keys, the time and META."""
        n = table.num_rows
        t, timed = micros_of(column_array(table, time), type_)
        group = codes_of([column_array(table, k) for k in keys], n)
        #: By row: the group (-1: a key or the time is null, so nothing is before it), and the time.
        self.group: I64 = np.where(timed, group, -1)
        self.time: I64 = t
        self.known: Bits = self.group >= 0
        query = column_array(table, QUERY).is_valid().to_numpy(zero_copy_only=False)
        self.event: Bits = self.known & ~query
        file, line = places(n, column_array(table, FILE), column_array(table, LINE))
        rows = np.flatnonzero(self.event)
        #: Rows of the events, in order.
        self.rows: I64 = rows[np.lexsort((line[rows], file[rows], t[rows], self.group[rows]))]

    def select(self, keep: Bits) -> Selected:
        """The events among the rows [n] that `keep` [n] is true for."""
        return Selected(self, self.rows[keep[self.rows]])

    @cached_property
    def all(self) -> Selected:
        """All events."""
        return Selected(self, self.rows)


class Selected:
    """Some of the events, in order."""

    def __init__(self, past: Past, rows: I64) -> None:
        self.past, self.rows = past, rows
        self._times = np.unique(past.time[rows])
        self._width = len(self._times) + 1
        rank = np.searchsorted(self._times, past.time[rows])
        self._sorted = past.group[rows] * self._width + rank

    def counts_before(self, back: int = 0) -> I64:
        """For each row [n]: how many of these events, in their order, come before (its key, its time - back).

        The events of its own key among them are those from `start` on.
        """
        return self.counts_at(self.past.group, self.past.time - back)

    def counts_at(self, group: I64, time: I64) -> I64:
        """Return how many of these events come before (group, time): int64 [n]."""
        rank = np.searchsorted(self._times, time)
        return np.searchsorted(self._sorted, group * self._width + rank)

    @cached_property
    def start(self) -> I64:
        """For each row [n]: how many of these events come before its key's first."""
        return np.searchsorted(self._sorted, self.past.group * self._width)

    def sums(self, values: I64, start: I64, end: I64) -> I64:
        """Sums of the events' values [n by row] over the places start..end-1, exactly (int64 arithmetic)."""
        total = np.concatenate([np.zeros(1, np.int64), np.cumsum(values[self.rows])])
        return np.where(self.past.known, total[end] - total[start], 0)


def take(x: pa.Array, rows: I64, exists: Bits) -> pa.Array:
    """x[rows], null where `exists` is not."""
    return x.take(pa.array(np.where(exists, rows, 0), mask=~exists))


def nan_to_null(x: pa.Array) -> pa.Array:
    """NaN is no value."""
    return pc.if_else(pc.is_nan(x), pa.scalar(None, x.type), x) if pa.types.is_floating(x.type) else x


def nulled(values: npt.NDArray[Any], exists: Bits, type_: pa.DataType) -> pa.Array:
    """An array with nulls where `exists` is not."""
    return pa.array(values, type_, mask=~exists)


def hashes(x: pa.Array) -> I64:
    """Spark's `xxhash64` of texts, of null as of the empty one. [n] -> int64 [n]."""
    if not len(x):
        return np.zeros(0, np.int64)
    return xxhash64_strings(pa.concat_arrays([pc.fill_null(x, "").cast(pa.string())]))


def newest_at(group: I64, time: I64, of_group: I64, of_time: I64, inclusive: bool) -> I64:
    """For each row [n] the place of the newest of m versions of its group before its time, or at it; -1 without one.

    `of_group`, `of_time` [m] are in order of (group, time); groups below 0 have no version and are no version.
    """
    times = np.unique(of_time)
    width = len(times) + 1
    keys = of_group * width + np.searchsorted(times, of_time)
    rank = np.searchsorted(times, time, "right" if inclusive else "left")
    end = np.searchsorted(keys, group * width + rank)
    start = np.searchsorted(keys, group * width)
    return np.where((group >= 0) & (end > start), end - 1, -1)


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
