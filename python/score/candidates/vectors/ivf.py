"""An index of item vectors by Faiss: inverted lists of cells, half precision, of which a search looks at the nearest.

The inner product is searched as a distance: each item's vector gets one more column, so that all have the length of the
longest (Bachrach et al., "Speeding Up the Xbox Recommender System Using a Euclidean Transformation for Inner-Product
Spaces", RecSys 2014). Cells then hold items that the same users like, whatever the lengths of their vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.score.candidates.vectors.exact import Found, best_items
from headrace.score.candidates.vectors.item_vectors import ItemVectors
from headrace.storage import Location

#: Items that a cell is learned from, and passes over them.
_ITEMS_OF_A_CELL, _PASSES = 64, 10
#: Items that are added at a time.
_ADD_ROWS = 65_536
#: Users that are searched for at a time.
_SEARCH_ROWS = 1_024
#: Faiss computes with vectors of half precision quickly where their columns are a multiple of it.
_LANES = 16


@dataclass(frozen=True)
class IvfIndex:
    """A handle on a built index; small and picklable, so that tasks are given it as it is."""

    vectors: ItemVectors
    #: What Faiss has written, visible to all executors.
    file: Location
    cells: int


def cells_of(items: int) -> int:
    """How many: 2 sqrt(items). Twice as many took 2.7 times as long to make and hardly less to search."""
    return max(1, min(int(2 * math.sqrt(items)), items // _ITEMS_OF_A_CELL))


def build(vectors: ItemVectors, file: Location, threads: int) -> IvfIndex:
    """Make the index of vectors and write it; in memory is the index, about 2 (D + 17) bytes an item.

    Args:
        vectors: at least one.
        file: replaced.
        threads: that may work at once.
    """
    import faiss

    faiss.omp_set_num_threads(threads)
    cells, width = cells_of(vectors.rows), _width(vectors.width)
    quantizer = faiss.IndexFlatL2(width)
    index = faiss.IndexIVFScalarQuantizer(
        quantizer, width, cells, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_L2, False
    )
    index.cp.niter, index.cp.max_points_per_centroid = _PASSES, _ITEMS_OF_A_CELL
    index.train(_sample(vectors, cells * _ITEMS_OF_A_CELL))
    for part in _rows(vectors):
        index.add(_lengthened(part, vectors.longest))
    with file.new_file() as path:
        faiss.write_index(index, str(path))
    return IvfIndex(vectors, file, cells)


def search(index: IvfIndex, queries: NDArray[np.float32], k: int, probes: int, threads: int) -> Found:
    """About the k best items of each user: those among the cells nearest to the user's vector.

    A user whose cells have fewer than k items gets the best of all others besides, behind them.

    Args:
        index: its file is mapped.
        queries: users' vectors, float32 [U, D], finite.
        k: at least 1.
        probes: cells that are looked at.
        threads: that may work at once.

    Returns:
        Numbers of items, best first as half precision orders them, and minus their squared distances in the lengthened
        space; -1 and minus infinity where all items together are fewer than k.
    """
    import faiss

    faiss.omp_set_num_threads(threads)
    opened = _opened(index)
    opened.nprobe = min(probes, index.cells)
    items, scores = [np.empty((0, k), np.int32)], [np.empty((0, k), np.float32)]
    for start in range(0, len(queries), _SEARCH_ROWS):
        part = queries[start : start + _SEARCH_ROWS]
        distances, labels = opened.search(_users(part), k)
        found = Found(labels.astype(np.int32), np.where(labels < 0, -np.inf, -distances).astype(np.float32))
        items.append(_completed(index, part, found, threads))
        scores.append(found.scores)
    return Found(np.concatenate(items), np.concatenate(scores))


def fewest_probes(recall_of: Callable[[int], float], enough: float, cells: int) -> int | None:
    """So few probes that recall is enough, to an eighth; None: all cells are not enough.

    Args:
        recall_of: by the number of probes; rises.
        enough: the recall that is wanted.
        cells: the most probes.
    """
    low, high = 0, 1
    while recall_of(high) < enough:
        if high == cells:
            return None
        low, high = high, min(2 * high, cells)
    while high - low > max(1, high // 8):
        middle = (low + high) // 2
        low, high = (low, middle) if recall_of(middle) >= enough else (middle, high)
    return high


def recall(found: NDArray[np.int32], best: NDArray[np.int32]) -> float:
    """The share of the best items, [U, k] each with -1 for none, that are among those found."""
    hits = sum(len(np.intersect1d(f, b[b >= 0], assume_unique=False)) for f, b in zip(found, best, strict=True))
    wanted = int((best >= 0).sum())
    return hits / wanted if wanted else 1.0


def _completed(index: IvfIndex, queries: NDArray[np.float32], found: Found, threads: int) -> NDArray[np.int32]:
    """The items found, and behind them the best others where there are too few."""
    k, items = found.items.shape[1], found.items
    short = np.flatnonzero((items < 0).any(axis=1))
    if not len(short) or (items[short] >= 0).sum(axis=1).min(initial=k) >= index.vectors.rows:
        return items
    all_ = best_items(queries[short], index.vectors.blocks(), k, threads=threads).items
    for user, best in zip(short, all_, strict=True):
        own = items[user][items[user] >= 0]
        others = best[(best >= 0) & ~np.isin(best, own)]
        items[user, len(own) : len(own) + len(others)] = others[: k - len(own)]
    return items


def _width(columns: int) -> int:
    """Those of the index: one more, and zeros."""
    return -(-(columns + 1) // _LANES) * _LANES


def _users(queries: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of length 1, which changes no order, and 0 in the further columns."""
    columns = queries.shape[1]
    out = np.zeros((len(queries), _width(columns)), np.float32)
    lengths = np.sqrt(np.einsum("nd,nd->n", queries, queries, dtype=np.float64))
    out[:, :columns] = queries / np.where(lengths > 0, lengths, 1)[:, None]
    return out


def _lengthened(vectors: NDArray[np.float32], longest: float) -> NDArray[np.float32]:
    """Divided by the longest one's length, with a column that makes the length 1: float32 [n, columns]."""
    columns = vectors.shape[1]
    out = np.zeros((len(vectors), _width(columns)), np.float32)
    own = out[:, :columns]
    own[:] = vectors / np.float32(longest or 1)
    out[:, columns] = np.sqrt(np.maximum(1 - np.einsum("nd,nd->n", own, own, dtype=np.float64), 0))
    return out


def _rows(vectors: ItemVectors) -> Iterator[NDArray[np.float32]]:
    for _, block in vectors.blocks():
        for start in range(0, len(block), _ADD_ROWS):
            yield block[start : start + _ADD_ROWS]


def _sample(vectors: ItemVectors, most: int) -> NDArray[np.float32]:
    """Every so-manyth vector, lengthened: at most that many."""
    step = -(-vectors.rows // most)
    parts = [block[-first % step :: step] for first, block in vectors.blocks()]
    return _lengthened(np.concatenate(parts), vectors.longest)


@lru_cache(maxsize=2)
def _opened(index: IvfIndex) -> Any:
    """Its lists are mapped: shared by all workers of a host, and read where they are looked at."""
    import faiss

    opened: Any = faiss.read_index(str(index.file.local_path()), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    # Its threads that read lists ahead cost half of a search's time, and find everything in memory.
    lists: Any = faiss.downcast_InvertedLists(opened.invlists)
    lists.prefetch_nthread = 0
    return opened
