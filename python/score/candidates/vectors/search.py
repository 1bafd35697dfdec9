"""What Spark tasks do with vectors of items: find users' best ones, make the index, see how many it misses."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headrace.jagged import JaggedArray
from headrace.score.candidates.vectors import ivf
from headrace.score.candidates.vectors.exact import best_items, check_products, longest
from headrace.score.candidates.vectors.item_vectors import ItemVectors
from headrace.score.candidates.vectors.ivf import IvfIndex
from headrace.score.vectors.model_vectors import ModelVectors

#: Users, and items that they ask for together, that are in memory at a time.
_ROWS, _ITEMS = 4_096, 1 << 22
#: Users by whom recall is measured, and fewer than say nothing of it.
_SAMPLE_USERS, _LEAST_USERS = 256, 32


@dataclass(frozen=True)
class Searched:
    """What is searched, and how."""

    items: ItemVectors
    threads: int
    #: None: all items are compared.
    index: IvfIndex | None = None
    #: Cells of the index that are looked at.
    probes: int = 0

    def best(self, queries: NDArray[np.float32], k: int, excluded: JaggedArray | None = None) -> NDArray[np.int32]:
        """The items' numbers: int32 [U, k], -1 behind the last one.

        Args:
            queries: users' vectors, float32 [U, D].
            k: of each user.
            excluded: for each user, numbers of items that are not wanted; an index gives them, too.
        """
        if self.index is not None:
            return ivf.search(self.index, queries, k, self.probes, self.threads).items
        return best_items(queries, self.items.blocks(), k, excluded=excluded, threads=self.threads).items


@dataclass(frozen=True)
class FindItems:
    """Users to the same rows, columns c0, c1, ..., with their items' rows behind them, int32 lists, best first."""

    #: The column that says how many items are wanted.
    fetch: str
    users: ModelVectors
    searched: Searched
    #: The one with the items' rows that are not wanted, int32 lists; None: there is none. An index does not look at it.
    blocked: str | None = None
    #: The most items that the users of a batch that is made ask for together; one user may ask for more.
    items_at_once: int = _ITEMS

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            fetch = batch.column(self.fetch).to_numpy(zero_copy_only=False).astype(np.int64)
            start, asked = 0, np.append(0, fetch.cumsum())
            while start < batch.num_rows:
                most = int(np.searchsorted(asked, asked[start] + self.items_at_once, "right")) - 1
                stop = min(max(start + 1, most), start + _ROWS)
                part, lists = batch.slice(start, stop - start), self._lists(batch, fetch, start, stop)
                numbered = [f"c{i}" for i in range(part.num_columns)]
                yield pa.RecordBatch.from_arrays([*part.columns, lists], [*numbered, "items"])
                start = stop

    def _lists(self, batch: pa.RecordBatch, fetch: NDArray[np.int64], start: int, stop: int) -> pa.ListArray:
        """The items' rows of the users from start to stop."""
        lengths, parts = np.zeros(stop - start, np.int64), []
        asked = np.flatnonzero(fetch[start:stop] > 0)
        if len(asked):
            for users, found in self._found(batch.take(pa.array(start + asked)), fetch[start + asked]):
                kept = found >= 0
                lengths[asked[users]] = kept.sum(axis=1)
                parts.append((asked[users], self.searched.items.item_rows(found[kept])))
        offsets = np.append(0, lengths.cumsum())
        values = np.empty(offsets[-1], np.int32)
        for users, rows in parts:
            n = lengths[users]
            # The place of each within its user's list, behind the user's offset.
            values[np.repeat(offsets[users] - n.cumsum() + n, n) + np.arange(len(rows))] = rows
        return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))

    def _found(
        self, batch: pa.RecordBatch, fetch: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32]]]:
        """(rows of some users, their items' numbers: int32 [users, most], -1 behind the last one that is wanted)."""
        queries, known = self.users.of_known(batch)
        check_products(longest(queries), self.searched.items.longest)
        # A few users of whom much is blocked are asked for more: the others are not searched for as much, nor have they
        # as much room.
        doublings = np.ceil(np.log2(fetch))
        for doubling in np.unique(doublings[known]):
            users = np.flatnonzero(known & (doublings == doubling))
            most = int(fetch[users].max())
            found = self.searched.best(np.ascontiguousarray(queries[users]), most, self._excluded(batch, users))
            found[np.arange(most) >= fetch[users, None]] = -1
            yield users, found

    def _excluded(self, batch: pa.RecordBatch, users: NDArray[np.int64]) -> JaggedArray | None:
        """The numbers of the items that are blocked for some of the users; -1 of those that have no vector."""
        if self.blocked is None or self.searched.index is not None:
            return None
        lists = batch.column(self.blocked).take(pa.array(users))
        offsets = np.append(0, pc.list_value_length(lists).to_numpy().cumsum()).astype(np.int64)
        return JaggedArray(offsets, self.searched.items.numbers(lists.flatten().to_numpy()))


@dataclass(frozen=True)
class BuildIndex:
    """In one task: the index of all items, in a file of its own for each attempt."""

    items: ItemVectors
    threads: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            tick = time.perf_counter()
            folder = self.items.folder
            file = folder.parent / f"{folder.name}-{uuid.uuid4()}.faiss"
            built = ivf.build(self.items, file, self.threads)
            yield pa.RecordBatch.from_pydict(
                {
                    "file": [file.name],
                    "cells": pa.array([built.cells], pa.int32()),
                    "bytes": pa.array([file.size()], pa.int64()),
                    "seconds": [time.perf_counter() - tick],
                }
            )


@dataclass(frozen=True)
class MeasureRecall:
    """In one task: of some users, by how many probes the index finds the wanted share of their best items.

    The users are the first ones, up to 256, of whom the model knows something; of fewer than 32 nothing is measured:
    `probes` and `recall` are null.
    """

    users: ModelVectors
    #: With an index.
    searched: Searched
    k: int
    #: The share.
    enough: float

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        index = self.searched.index
        assert index is not None
        queries = np.empty((0, self.searched.items.width), np.float32)
        for batch in batches:
            for start in range(0, batch.num_rows, _ROWS):
                if len(queries) < _SAMPLE_USERS:
                    vectors, known = self.users.of_known(batch.slice(start, _ROWS))
                    queries = np.concatenate([queries, vectors[known]])[:_SAMPLE_USERS]
        if len(queries) < _LEAST_USERS:
            yield _measured(len(queries), None, None, 0.0, 0.0)
            return
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
        yield _measured(len(queries), probes, recall, seconds, exact_seconds)


def _measured(
    users: int, probes: int | None, recall: float | None, seconds: float, exact_seconds: float
) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "users": pa.array([users], pa.int32()),
            "probes": pa.array([probes], pa.int32()),
            "recall": pa.array([recall], pa.float64()),
            "seconds": [seconds],
            "exact_seconds": [exact_seconds],
        }
    )
