"""Vectors of a run's items as mapped files, which Spark tasks write, and an index of them by Faiss.

Vectors are numbered from 0 in ascending order of the items' rows. Items of which the model knows nothing have none, so
numbers and rows differ where there are such items.

The index has inverted lists of cells in half precision, and a search looks at the nearest cells. The inner product is
searched as a distance: each item's vector gets one more column, so that all have the length of the longest (Bachrach et
al., "Speeding Up the Xbox Recommender System Using a Euclidean Transformation for Inner-Product Spaces", RecSys 2014).
Cells then hold items that the same users like, whatever the lengths of their vectors.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.features.functions.spark_expressions import col
from headrace.score.joined_tables import Partitioning, parts_of
from headrace.score.top_k import Blocks, TopItems, best_items, longest
from headrace.score.vectors import ModelVectors, map_vectors
from headrace.storage import Location


@dataclass(frozen=True)
class VectorPart:
    """Two files: vectors, float32 [rows, D], and their items' rows, int32 [rows]; without a header, in C order."""

    vectors: str
    item_rows: str
    rows: int


@dataclass(frozen=True)
class ItemVectors:
    """A handle on the files; small and picklable, so that tasks are given it as it is."""

    #: Where the files are, visible to all executors.
    folder: Location
    #: D; 0 where there is no vector.
    width: int
    #: Parts in order.
    parts: tuple[VectorPart, ...]
    #: The largest Euclidean length.
    longest: float
    #: Items of which the model knows nothing.
    unknown: int

    @staticmethod
    def write(
        spark: SparkSession,
        items: DataFrame,
        row: str,
        columns: tuple[str, ...],
        vectors: ModelVectors,
        folder: Location,
    ) -> ItemVectors:
        """Ask the model for all items' vectors, by Spark tasks.

        The folder appears when it is whole; one that is there is replaced. The caller removes it.

        Args:
            spark: the session.
            items: one row for each item.
            row: the column with its number: int, not null, all different.
            columns: those that the model's features read.
            vectors: the model.
            folder: seen by all executors.

        Raises:
            UserError: the model is in no retrieval form, or gives vectors that are not finite.
        """
        # mapInArrow reads a dot in a column's name as a field's: numbers travel, the task puts the names back.
        chosen = items.select(col(row), *[col(c) for c in columns]).toDF(*[f"c{i}" for i in range(1 + len(columns))])
        if not vectors.joined:
            chosen = chosen.repartitionByRange(spark.sparkContext.defaultParallelism, "c0").sortWithinPartitions("c0")

        def cut() -> Partitioning:
            count, end = chosen.agg(F.count(F.lit(1)), F.max("c0") + 1).collect()[0]
            return Partitioning.by_range(F.col("c0"), end or 1, parts_of(spark, count))

        with folder.new_folder() as building:
            work, schema = (
                _Write(building, vectors),
                "first int, name string, rows int, width int, longest double, unknown int",
            )
            written = map_vectors(spark, vectors, chosen, (row, *columns), cut, work, schema).collect()
            parts = sorted((r for r in written if r["rows"]), key=lambda r: int(r["first"]))
            handle = ItemVectors(
                folder,
                max((int(r["width"]) for r in parts), default=0),
                tuple(VectorPart(*_files(r["name"]), r["rows"]) for r in parts),
                max((r["longest"] for r in parts), default=0.0),
                sum(r["unknown"] for r in written),
            )
        return handle

    @staticmethod
    def of_arrays(parts: Iterable[tuple[NDArray[np.int32], NDArray[np.float32]]], folder: Location) -> ItemVectors:
        """Write vectors from arrays (item rows int32 [n] ascending, vectors float32 [n, D]), without Spark."""
        written, width, largest = [], 0, 0.0
        with folder.new_folder() as building:
            for rows, vectors in parts:
                with _new_part(building) as (name, add):
                    add(rows, vectors)
                written.append(VectorPart(*_files(name), len(rows)))
                width, largest = vectors.shape[1], max(largest, longest(vectors))
        return ItemVectors(folder, width, tuple(written), largest, 0)

    @property
    def rows(self) -> int:
        """Return the number of vectors."""
        return sum(p.rows for p in self.parts)

    def blocks(self) -> Blocks:
        """Return the mapped vectors in blocks: (number of the first one, float32 [n, D])."""
        return _mapped(self)[0]

    def item_rows(self, numbers: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
        """Return the items' rows by number: int32 of the same shape."""
        rows = _mapped(self)[1]
        return numbers.astype(np.int32) if rows is None else rows[numbers]

    def numbers(self, item_rows: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
        """Return the numbers of items' rows: int32 of the same shape, -1 for items without a vector."""
        rows = _mapped(self)[1]
        if rows is None:
            return np.where((item_rows >= 0) & (item_rows < self.rows), item_rows, -1).astype(np.int32)
        positions = np.searchsorted(rows, item_rows)
        inside = np.minimum(positions, max(len(rows) - 1, 0))
        return (
            np.where(rows[inside] == item_rows, inside, -1).astype(np.int32)
            if len(rows)
            else np.full_like(positions, -1)
        )


@dataclass(frozen=True)
class _Write:
    """Spark task that writes its partition, in order, as a part."""

    folder: Location
    vectors: ModelVectors

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        first, rows, width, largest, unknown = -1, 0, 0, 0.0, 0
        with _new_part(self.folder) as (name, add):
            for batch in batches:
                if not batch.num_rows:
                    continue
                vectors, known = self.vectors.known_vectors(batch)
                item_rows = batch.column(0).to_numpy(zero_copy_only=False)[known]
                vectors = np.ascontiguousarray(vectors[known])
                unknown += int(len(known) - len(item_rows))
                if not len(item_rows):
                    continue
                first = int(item_rows[0]) if first < 0 else first
                rows, width, largest = rows + len(item_rows), vectors.shape[1], max(largest, longest(vectors))
                add(item_rows.astype(np.int32), vectors)
        names = ("first", "name", "rows", "width", "longest", "unknown")
        types = (pa.int32(), pa.string(), pa.int32(), pa.int32(), pa.float64(), pa.int32())
        values = (first, name, rows, width, largest, unknown)
        yield pa.RecordBatch.from_arrays([pa.array([v], t) for v, t in zip(values, types, strict=True)], list(names))


@contextmanager
def _new_part(folder: Location) -> Iterator[tuple[str, Callable[[NDArray[np.int32], NDArray[np.float32]], None]]]:
    """Give a part's name, and a function that adds items' rows and vectors; the part exists when the block ends well.

    A task that runs twice writes another part: the same name, written again, is a changed file in most stores.
    """
    part = str(uuid.uuid4())
    with ExitStack() as stack:
        paths = [stack.enter_context((folder / name).new_file()) for name in _files(part)]
        files = [stack.enter_context(path.open("wb")) for path in paths]

        def add(item_rows: NDArray[np.int32], vectors: NDArray[np.float32]) -> None:
            for file, values in zip(files, (vectors, item_rows), strict=True):
                file.write(np.ascontiguousarray(values).tobytes())

        yield part, add


def _files(part: str) -> tuple[str, str]:
    return f"vectors-{part}.float32", f"item-rows-{part}.int32"


@lru_cache(maxsize=4)
def _mapped(vectors: ItemVectors) -> tuple[Blocks, NDArray[np.int32] | None]:
    """Map the files and keep them open, since tasks read them repeatedly; rows are None if they equal the numbers."""
    blocks, rows, first = [], [], 0
    for part in vectors.parts:
        shape = (part.rows, vectors.width)
        blocks.append((first, _map(vectors.folder / part.vectors, np.float32, shape)))
        rows.append(_map(vectors.folder / part.item_rows, np.int32, (part.rows,)))
        first += part.rows
    # Rows ascend and differ: if the first is 0 and the last is the count minus 1, no row is missing.
    if not rows or (int(rows[0][0]) == 0 and int(rows[-1][-1]) == first - 1):
        return blocks, None
    return blocks, np.concatenate(rows)


def _map(file: Location, dtype: type[np.generic], shape: tuple[int, ...]) -> NDArray[Any]:
    return np.memmap(file.local_path(), dtype, mode="r", shape=shape).view(np.ndarray)


#: Training items per cell, and passes over them.
_ITEMS_OF_A_CELL, _PASSES = 64, 10
#: Items added to the index at once.
_ADD_ROWS = 65_536
#: Users searched for at once.
_SEARCH_ROWS = 1_024
#: Faiss is fast on half precision if the number of columns is a multiple of this.
_LANES = 16


@dataclass(frozen=True)
class IvfIndex:
    """A handle on a built index; small and picklable, so that tasks are given it as it is."""

    vectors: ItemVectors
    #: File that Faiss wrote, visible to all executors.
    file: Location
    cells: int


def cells_of(items: int) -> int:
    """Return the number of cells: 2 sqrt(items).

    Twice as many took 2.7 times as long to build and hardly less to search.
    """
    return max(1, min(int(2 * math.sqrt(items)), items // _ITEMS_OF_A_CELL))


def build_index(vectors: ItemVectors, file: Location, threads: int) -> IvfIndex:
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


def search_index(index: IvfIndex, queries: NDArray[np.float32], k: int, probes: int, threads: int) -> TopItems:
    """Find about the k best items of each user: those in the cells nearest to the user's vector.

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
        top = TopItems(labels.astype(np.int32), np.where(labels < 0, -np.inf, -distances).astype(np.float32))
        items.append(_completed(index, part, top, threads))
        scores.append(top.scores)
    return TopItems(np.concatenate(items), np.concatenate(scores))


def fewest_probes(recall_of: Callable[[int], float], enough: float, cells: int) -> int | None:
    """Return the fewest probes, to an eighth, that reach a recall; None if all cells do not.

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


def recall_share(numbers: NDArray[np.int32], best: NDArray[np.int32]) -> float:
    """Return the share of the best items, [U, k] each with -1 for none, that are among those found."""
    hits = sum(len(np.intersect1d(f, b[b >= 0], assume_unique=False)) for f, b in zip(numbers, best, strict=True))
    n_best = int((best >= 0).sum())
    return hits / n_best if n_best else 1.0


def _completed(index: IvfIndex, queries: NDArray[np.float32], top: TopItems, threads: int) -> NDArray[np.int32]:
    """Return the items found, followed by the best others where there are too few."""
    k, items = top.items.shape[1], top.items
    short = np.flatnonzero((items < 0).any(axis=1))
    if not len(short) or (items[short] >= 0).sum(axis=1).min(initial=k) >= index.vectors.rows:
        return items
    all_ = best_items(queries[short], index.vectors.blocks(), k, threads=threads).items
    for user, best in zip(short, all_, strict=True):
        near = items[user][items[user] >= 0]
        further = best[(best >= 0) & ~np.isin(best, near)]
        items[user, len(near) : len(near) + len(further)] = further[: k - len(near)]
    return items


def _width(columns: int) -> int:
    """Return the index's number of columns: one more than the vectors', and zeros."""
    return -(-(columns + 1) // _LANES) * _LANES


def _users(queries: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the queries scaled to length 1, which changes no order, with 0 in the further columns."""
    columns = queries.shape[1]
    out = np.zeros((len(queries), _width(columns)), np.float32)
    lengths = np.sqrt(np.einsum("nd,nd->n", queries, queries, dtype=np.float64))
    out[:, :columns] = queries / np.where(lengths > 0, lengths, 1)[:, None]
    return out


def _lengthened(vectors: NDArray[np.float32], longest: float) -> NDArray[np.float32]:
    """Return vectors divided by the longest length, with a column that makes their length 1: float32 [n, columns]."""
    columns = vectors.shape[1]
    out = np.zeros((len(vectors), _width(columns)), np.float32)
    scaled = out[:, :columns]
    scaled[:] = vectors / np.float32(longest or 1)
    out[:, columns] = np.sqrt(np.maximum(1 - np.einsum("nd,nd->n", scaled, scaled, dtype=np.float64), 0))
    return out


def _rows(vectors: ItemVectors) -> Iterator[NDArray[np.float32]]:
    for _, block in vectors.blocks():
        for start in range(0, len(block), _ADD_ROWS):
            yield block[start : start + _ADD_ROWS]


def _sample(vectors: ItemVectors, sample_rows: int) -> NDArray[np.float32]:
    """Return evenly spaced vectors, lengthened: at most `sample_rows`."""
    step = -(-vectors.rows // sample_rows)
    parts = [block[-first % step :: step] for first, block in vectors.blocks()]
    return _lengthened(np.concatenate(parts), vectors.longest)


@lru_cache(maxsize=2)
def _opened(index: IvfIndex) -> Any:
    """Open an index with mapped lists, which all workers of a host share and read on demand."""
    import faiss

    opened: Any = faiss.read_index(str(index.file.local_path()), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    # The prefetching threads cost half of a search's time, although everything is in memory.
    lists: Any = faiss.downcast_InvertedLists(opened.invlists)
    lists.prefetch_nthread = 0
    return opened
