"""The vectors of a run's items as files that are mapped: made by Spark tasks, at no time in the driver's memory.

Vectors are numbered from 0 in ascending order of the items' rows. Items of which the model knows nothing have none, so
numbers and rows differ where there are such items.
"""

from __future__ import annotations

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
from headrace.score.candidates.vectors.exact import Blocks, longest
from headrace.score.joined.parts import Parts, parts_of
from headrace.score.vectors.map_vectors import map_vectors
from headrace.score.vectors.model_vectors import ModelVectors
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
    #: Those that follow each other.
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

        def cut() -> Parts:
            count, end = chosen.agg(F.count(F.lit(1)), F.max("c0") + 1).collect()[0]
            return Parts.by_range(F.col("c0"), end or 1, parts_of(spark, count))

        with folder.new_folder() as building:
            work, schema = (
                _Write(building, vectors),
                "first int, name string, rows int, width int, longest double, unknown int",
            )
            found = map_vectors(spark, vectors, chosen, (row, *columns), cut, work, schema).collect()
            parts = sorted((r for r in found if r["rows"]), key=lambda r: int(r["first"]))
            handle = ItemVectors(
                folder,
                max((int(r["width"]) for r in parts), default=0),
                tuple(VectorPart(*_files(r["name"]), r["rows"]) for r in parts),
                max((r["longest"] for r in parts), default=0.0),
                sum(r["unknown"] for r in found),
            )
        return handle

    @staticmethod
    def of_arrays(parts: Iterable[tuple[NDArray[np.int32], NDArray[np.float32]]], folder: Location) -> ItemVectors:
        """The same of arrays (item rows int32 [n] ascending, vectors float32 [n, D]), without Spark."""
        made, width, largest = [], 0, 0.0
        with folder.new_folder() as building:
            for rows, vectors in parts:
                with _new_part(building) as (name, add):
                    add(rows, vectors)
                made.append(VectorPart(*_files(name), len(rows)))
                width, largest = vectors.shape[1], max(largest, longest(vectors))
        return ItemVectors(folder, width, tuple(made), largest, 0)

    @property
    def rows(self) -> int:
        """How many vectors."""
        return sum(p.rows for p in self.parts)

    def blocks(self) -> Blocks:
        """The vectors, mapped: (number of the first one, float32 [n, D])."""
        return _mapped(self)[0]

    def item_rows(self, numbers: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
        """The items' rows of numbers: int32 of the same shape."""
        rows = _mapped(self)[1]
        return numbers.astype(np.int32) if rows is None else rows[numbers]

    def numbers(self, item_rows: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
        """The numbers of items' rows: int32 of the same shape, -1 of items that have no vector."""
        rows = _mapped(self)[1]
        if rows is None:
            return np.where((item_rows >= 0) & (item_rows < self.rows), item_rows, -1).astype(np.int32)
        at = np.searchsorted(rows, item_rows)
        inside = np.minimum(at, max(len(rows) - 1, 0))
        return np.where(rows[inside] == item_rows, inside, -1).astype(np.int32) if len(rows) else np.full_like(at, -1)


@dataclass(frozen=True)
class _Write:
    """What a Spark task does: its partition, in order, becomes a part."""

    folder: Location
    vectors: ModelVectors

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        first, rows, width, largest, unknown = -1, 0, 0, 0.0, 0
        with _new_part(self.folder) as (name, add):
            for batch in batches:
                if not batch.num_rows:
                    continue
                vectors, known = self.vectors.of_known(batch)
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
    """A part's name, and what adds items' rows and their vectors to it; it is there when the block ends well.

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
    """Kept open, for tasks ask for it again and again; rows are None where they are the numbers."""
    blocks, rows, first = [], [], 0
    for part in vectors.parts:
        shape = (part.rows, vectors.width)
        blocks.append((first, _map(vectors.folder / part.vectors, np.float32, shape)))
        rows.append(_map(vectors.folder / part.item_rows, np.int32, (part.rows,)))
        first += part.rows
    # Ascending and different: where the first and the last one are as many apart as there are rows, none is missing.
    if not rows or (int(rows[0][0]) == 0 and int(rows[-1][-1]) == first - 1):
        return blocks, None
    return blocks, np.concatenate(rows)


def _map(file: Location, dtype: type[np.generic], shape: tuple[int, ...]) -> NDArray[Any]:
    return np.memmap(file.local_path(), dtype, mode="r", shape=shape).view(np.ndarray)
