"""The rows of a part of the dataset that one row group of a lake file has, and the part's columns made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.dataset.parquet import lists
from headrace.features.engines.arrow import kernels
from headrace.features.engines.arrow.dictionary import DictionaryColumn, ranges_of, text_ranges
from headrace.features.engines.arrow.lake_file import LakeRowGroup
from headrace.schema import Feature

Array = npt.NDArray[Any]
#: Names of what a transform leaves of a row group's rows, part by part (write_lake): their numbers, where each part
#: begins and the last one ends, their hashes; rows that lack a value, of each of `source_sets` and by part; labels.
ORDER, EDGES, HASHES, MISSING, LABEL = "order", "edges", "hashes", "missing", "label"


def placed(values: Sequence[Values], places: Sequence[kernels.Rows]) -> pa.Array:
    """A column of the part: of each source its rows' values, each to its place."""
    out = np.empty(sum(map(len, places)), values[0].values.dtype)
    for found, mine in zip(values, places, strict=True):
        kernels.scatter(found.values, found.index, mine, out)
    return pa.array(out)


def gathered(
    sources: Sequence[DictionaryColumn], order: kernels.Rows, type_: pa.DataType
) -> pa.Array | pa.ChunkedArray:
    """Rows of columns that stand one behind the other, as the dataset stores them.

    Args:
        sources: the columns, of one type.
        order: numbers of rows, through all sources.
        type_: what they become: of timestamps their microseconds.

    Returns:
        Where they are many texts several arrays, of which each is small: one holds 2 GiB of them at most.
    """
    sizes = np.concatenate([s.text_bytes() for s in sources]) if pa.types.is_string(type_) else np.zeros(0, np.int64)
    ranges = ranges_of(sizes[order]) if len(sizes) else []
    if len(ranges) <= 1:
        return pa.concat_arrays([s.decode().cast(type_) for s in sources]).take(pa.array(order))
    return pa.chunked_array([_taken(sources, order[a:b]) for a, b in ranges], type_)


def _taken(sources: Sequence[DictionaryColumn], rows: kernels.Rows) -> pa.Array:
    """Some rows, numbered through the sources."""
    pieces, places, start = list[pa.Array](), list[npt.NDArray[np.intp]](), 0
    for source in sources:
        mine = np.flatnonzero((rows >= start) & (rows < start + len(source)))
        pieces.append(source.take(rows[mine] - start))
        places.append(mine)
        start += len(source)
    return pa.concat_arrays(pieces).take(pa.array(np.argsort(np.concatenate(places))))


def by_part(arrays: Mapping[str, Array], label: str) -> dict[str, Array]:
    """Of what a transform leaves of a row group, the arrays [rows] that are in the order of the parts.

    Args:
        arrays: see `headrace.features.engines.arrow.transform.transformed`.
        label: the label's column.
    """
    kinds = ("index", "row", "carried")
    lists = {f"row.{name.split('.', 1)[1]}" for name in arrays if name.startswith("row_offsets.")}
    names = {ORDER, HASHES} | {name for name in arrays if name.split(".", 1)[0] in kinds} - lists
    if f"index.{label}" not in arrays:
        names.add(LABEL)
    return {name: array for name, array in arrays.items() if name in names}


@dataclass(frozen=True)
class Values:
    """A column's values of a part's rows of a row group: one for each number of `index`, or (None) for each row."""

    values: Array
    index: kernels.Indices | None


class PartRows:
    """The rows of a part that one row group has, in the order of their hashes."""

    def __init__(self, row_group: LakeRowGroup, part: int, start: int, end: int, arrays: Mapping[str, Array]) -> None:
        """`arrays`: what `transformed` gave of the row group; `by_part` arrays have the rows from `start` to `end`."""
        self.row_group, self._part, self._arrays = row_group, part, arrays
        self._start, self._mine = start, slice(start, end)
        self.rows: kernels.Rows = arrays[ORDER][self._mine]
        self.hashes: npt.NDArray[np.int64] = arrays[HASHES][self._mine]

    def output(self, feature: Feature) -> Values:
        """A feature's values; of lists see `output_lists`."""
        by_value = self._arrays.get(f"value.{feature.name}")
        if by_value is None:
            found = self._arrays[f"row.{feature.name}"][self._mine]
            # Codes are kept in as few bytes as hold them.
            return Values(found.astype(np.int32) if found.dtype.kind == "u" else found, None)
        return Values(by_value, self._index(feature.sources[0]))

    def label(self, name: str) -> Values:
        """The label's, float32; NaN of null."""
        if f"index.{name}" in self._arrays:
            return Values(self._arrays[LABEL], self._index(name))
        return Values(self._arrays[LABEL][self._mine], None)

    def output_lists(self, feature: Feature) -> pa.ListArray:
        """A list feature's lists, without the zeros at their ends."""
        rows, kind = self.rows.astype(np.intp), "row"
        if f"value.{feature.name}" in self._arrays:
            rows, kind = self._index(feature.sources[0]).astype(np.intp), "value"
        offsets, values = (self._arrays[f"{k}.{feature.name}"] for k in (f"{kind}_offsets", kind))
        return lists.from_arrays(*lists.take(offsets, values, rows))

    def column(self, name: str) -> DictionaryColumn:
        """An input column's values."""
        column = self.row_group.column(name)
        if f"carried.{name}" in self._arrays:
            values = pa.py_buffer(self._arrays[f"carried.{name}"][self._mine])
            return DictionaryColumn(pa.Array.from_buffers(column.values.type, len(self.rows), [None, values]))
        if column.indices is None:
            return DictionaryColumn(column.values, self.rows)
        mine = self._index(name) if f"index.{name}" in self._arrays else column.indices[self.rows]
        return DictionaryColumn(column.values, mine)

    def pieces(self, columns: Sequence[str]) -> Iterator[PartRows]:
        """The rows in pieces, of each of which the texts of some input columns can be decoded."""
        for a, b in text_ranges(map(self.column, columns), len(self.rows)):
            yield PartRows(self.row_group, self._part, self._start + a, self._start + b, self._arrays)

    def missing(self, sets: int) -> npt.NDArray[np.int64]:
        """Of each of so many `source_sets`: rows that lack a value. int64 [sets]."""
        return self._arrays[MISSING].reshape(sets, -1)[:, self._part]

    def _index(self, name: str) -> kernels.Indices:
        return self._arrays[f"index.{name}"][self._mine]
