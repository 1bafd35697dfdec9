"""The rows of a part of the dataset that one row group of a lake file has, and the part's columns made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.dataset.parquet import lists
from headrace.features.engines.arrow import kernels
from headrace.features.engines.arrow.lake_file import LakeRowGroup
from headrace.schema import Feature

Array = npt.NDArray[Any]
#: Names of what a transform leaves of a row group's rows, part by part (write_lake): their numbers, where each part
#: begins and the last one ends, their hashes; rows that lack a value, of each of `source_sets` and by part; labels.
ORDER, EDGES, HASHES, MISSING, LABEL = "order", "edges", "hashes", "missing", "label"

#: Bytes of one array of texts, whose offsets have 32 bits; some room is left for them.
MOST_TEXT = (1 << 31) - (1 << 27)


def placed(values: Sequence[Values], places: Sequence[kernels.Rows]) -> pa.Array:
    """A column of the part: of each source its rows' values, each to its place."""
    out = np.empty(sum(map(len, places)), values[0].values.dtype)
    for found, mine in zip(values, places, strict=True):
        kernels.scatter(found.values, found.index, mine, out)
    return pa.array(out)


def carried(values: pa.Array, type_: pa.DataType) -> pa.Array:
    """An input column's values as the dataset stores them: a timestamp becomes its microseconds."""
    return values.cast(type_)


def gathered(sources: Sequence[pa.Array], order: pa.Array) -> pa.Array | pa.ChunkedArray:
    """Rows of arrays that stand one behind the other; texts in several arrays where one cannot hold them (2 GiB)."""
    if not pa.types.is_string(sources[0].type) or sum(a.nbytes for a in sources) <= MOST_TEXT:
        return pa.concat_arrays(sources).take(order)
    whole = pa.concat_arrays([a.cast(pa.large_string()) for a in sources]).take(order)
    ends = np.frombuffer(whole.buffers()[1], np.int64, len(whole) + 1)
    edges = [0]
    while edges[-1] < len(whole):
        fit = int(np.searchsorted(ends, ends[edges[-1]] + MOST_TEXT, "right")) - 1
        edges.append(max(fit, edges[-1] + 1))
    return pa.chunked_array([whole.slice(a, b - a).cast(pa.string()) for a, b in pairwise(edges)])


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
        self._mine = slice(start, end)
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

    def column(self, name: str) -> pa.Array:
        """An input column's values, a value a row."""
        column = self.row_group.column(name)
        if f"carried.{name}" in self._arrays:
            values = pa.py_buffer(self._arrays[f"carried.{name}"][self._mine])
            return pa.Array.from_buffers(column.values.type, len(self.rows), [None, values])
        if column.indices is not None and f"index.{name}" in self._arrays:
            return column.values.take(pa.array(self._index(name)))
        return column.take(self.rows)

    def missing(self, sets: int) -> npt.NDArray[np.int64]:
        """Of each of so many `source_sets`: rows that lack a value. int64 [sets]."""
        return self._arrays[MISSING].reshape(sets, -1)[:, self._part]

    def _index(self, name: str) -> kernels.Indices:
        return self._arrays[f"index.{name}"][self._mine]
