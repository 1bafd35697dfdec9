"""The order of a dataset's rows: by part, by the hash of their identity, and those of one hash by file and line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.engines.arrow import kernels
from headrace.features.engines.arrow.dictionary import DictionaryColumn
from headrace.features.engines.arrow.lake_file import FILE, LINE

Array = npt.NDArray[Any]


class Identified(Protocol):
    """Rows that have the columns FILE and LINE."""

    def column(self, name: str) -> DictionaryColumn:
        """One of them."""
        ...


class RowOrder(NamedTuple):
    """Rows in order: those of part k are `rows[edges[k]:edges[k + 1]]`."""

    rows: kernels.Rows
    #: Of each of `rows`.
    hashes: npt.NDArray[np.int64]
    #: int64 [parts + 1].
    edges: npt.NDArray[np.int64]


def row_order(
    hashes: npt.NDArray[np.int64],
    sources: Sequence[tuple[Identified, Array]],
    part: kernels.Indices | None = None,
    parts: int = 1,
) -> RowOrder:
    """Rows by part, hash, file and line.

    Args:
        hashes: of the given rows of the row groups, one row group behind the other.
        sources: row groups, and numbers of rows of each.
        part: of each row; rows of other parts than 0..parts-1 are left out. None: all are of part 0.
    """
    rows, sorted_, edges = kernels.row_order(hashes, part, parts)
    ties = np.flatnonzero(sorted_[1:] == sorted_[:-1])
    if len(ties):  # hardly ever, but where rows are made of one
        tied = np.unique(np.concatenate([ties, ties + 1]))
        these = rows[tied]
        file, line = _identities(sources, these)
        keys = (these, line, file, hashes[these], *([] if part is None else [part[these]]))
        rows[tied] = these[np.lexsort(keys)]
    return RowOrder(rows, sorted_, edges)


def _identities(sources: Sequence[tuple[Identified, Array]], rows: Array) -> tuple[Array, Array]:
    """(rank of its source file, source line) of rows, numbered through the row groups' given rows. int64 [n], twice."""
    starts = np.cumsum([0, *(len(mine) for _, mine in sources)])
    files, lines, places = [], [], []
    for (row_group, mine), start, end in zip(sources, starts[:-1], starts[1:], strict=True):
        place = np.flatnonzero((rows >= start) & (rows < end))
        at = mine[rows[place] - start]
        files.append(row_group.column(FILE).take(at).cast(pa.string()))
        lines.append(row_group.column(LINE).take(at).cast(pa.int64()))
        places.append(place)
    # Arrow orders texts by their UTF-8 bytes.
    encoded = pc.fill_null(pa.chunked_array(files), "").combine_chunks().dictionary_encode()
    rank = np.empty(len(encoded.dictionary), np.int64)
    rank[pc.sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(rank))
    back = np.argsort(np.concatenate(places))
    line = pc.fill_null(pa.chunked_array(lines), -1).to_numpy()
    return rank[encoded.indices.to_numpy()][back], line[back]
