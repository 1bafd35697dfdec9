"""What Spark tasks do with vectors of items: find users' best ones, make the index, see how many it misses."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.score.candidates.vectors import ivf
from headrace.score.candidates.vectors.exact import best_items, check_products, longest
from headrace.score.candidates.vectors.item_vectors import ItemVectors
from headrace.score.candidates.vectors.ivf import IvfIndex
from headrace.score.vectors.model_vectors import ModelVectors
from headrace.storage import Location

#: Users whose items are in memory at a time.
_ROWS = 4_096


@dataclass(frozen=True)
class Searched:
    """What is searched, and how."""

    items: ItemVectors
    threads: int
    #: None: all items are compared.
    index: IvfIndex | None = None
    #: Cells of the index that are looked at.
    probes: int = 0

    def best(self, queries: NDArray[np.float32], k: int) -> NDArray[np.int32]:
        """The items' numbers: int32 [U, k], -1 behind the last one."""
        if self.index is not None:
            return ivf.search(self.index, queries, k, self.probes, self.threads).items
        return best_items(queries, self.items.blocks(), k, threads=self.threads).items


@dataclass(frozen=True)
class FindItems:
    """Users to the same rows with their items' rows beside them, int32 lists, best first."""

    #: The columns of the batches, which travel without names.
    names: tuple[str, ...]
    #: The one that says how many items are wanted.
    fetch: str
    users: ModelVectors
    searched: Searched

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for start in range(0, batch.num_rows, _ROWS):
                part = batch.slice(start, _ROWS)
                lists = self._lists(pa.RecordBatch.from_arrays(part.columns, list(self.names)))
                yield pa.RecordBatch.from_arrays([*part.columns, lists], [*part.schema.names, "items"])

    def _lists(self, batch: pa.RecordBatch) -> pa.ListArray:
        fetch = batch.column(self.fetch).to_numpy(zero_copy_only=False)
        asked = np.flatnonzero(fetch > 0)
        lengths, values = np.zeros(len(fetch), np.int64), np.empty(0, np.int32)
        if len(asked):
            found = self._found(batch.take(pa.array(asked)), fetch[asked])
            kept = found >= 0
            lengths[asked], values = kept.sum(axis=1), self.searched.items.item_rows(found[kept])
        offsets = np.append(0, lengths.cumsum()).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, pa.int32()))

    def _found(self, batch: pa.RecordBatch, fetch: NDArray[np.int32]) -> NDArray[np.int32]:
        """The items' numbers: int32 [users, most], -1 behind the last one that is wanted."""
        queries, known = self.users.of_known(batch)
        check_products(longest(queries), self.searched.items.longest)
        found = np.full((len(queries), int(fetch.max())), -1, np.int32)
        # A few users of whom much is blocked are asked for more: the others are not searched for as much.
        doublings = np.ceil(np.log2(fetch))
        for doubling in np.unique(doublings[known]):
            users = np.flatnonzero(known & (doublings == doubling))
            most = int(fetch[users].max())
            found[users, :most] = self.searched.best(np.ascontiguousarray(queries[users]), most)
        found[np.arange(found.shape[1]) >= fetch[:, None]] = -1
        return found


@dataclass(frozen=True)
class BuildIndex:
    """In one task: the index of all items."""

    items: ItemVectors
    file: Location
    threads: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            tick = time.perf_counter()
            built = ivf.build(self.items, self.file, self.threads)
            yield pa.RecordBatch.from_pydict(
                {
                    "cells": pa.array([built.cells], pa.int32()),
                    "bytes": pa.array([self.file.size()], pa.int64()),
                    "seconds": [time.perf_counter() - tick],
                }
            )


@dataclass(frozen=True)
class MeasureRecall:
    """In one task: of some users, by how many probes the index finds the wanted share of their best items."""

    names: tuple[str, ...]
    users: ModelVectors
    #: With an index.
    searched: Searched
    k: int
    #: The share.
    enough: float

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        index = self.searched.index
        assert index is not None
        parts = []
        for batch in batches:
            if batch.num_rows:
                vectors, known = self.users.of_known(pa.RecordBatch.from_arrays(batch.columns, list(self.names)))
                parts.append(vectors[known])
        queries = np.concatenate(parts) if parts else np.empty((0, self.searched.items.width), np.float32)
        check_products(longest(queries), self.searched.items.longest)
        tick = time.perf_counter()
        best = best_items(queries, self.searched.items.blocks(), self.k, threads=self.searched.threads).items
        exact_seconds = time.perf_counter() - tick
        tried: dict[int, tuple[float, float]] = {}

        def recall_of(probes: int) -> float:
            tick = time.perf_counter()
            found = ivf.search(index, queries, self.k, probes, self.searched.threads).items
            seconds = time.perf_counter() - tick
            tried[probes] = ivf.recall(found, best), seconds
            return tried[probes][0]

        probes = ivf.fewest_probes(recall_of, self.enough, index.cells)
        recall, seconds = tried[probes or index.cells]
        yield pa.RecordBatch.from_pydict(
            {
                "users": pa.array([len(queries)], pa.int32()),
                "probes": pa.array([probes], pa.int32()),
                "recall": [recall],
                "seconds": [seconds],
                "exact_seconds": [exact_seconds],
            }
        )
