"""The source `vectors`: each user's items of the greatest dot products, exact or by an index of measured recall."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, IntegerType, StructField, StructType

from headrace.compute.jagged import JaggedArray
from headrace.config import Score, VectorSource
from headrace.errors import UserError
from headrace.features.functions.spark_expressions import col
from headrace.score.candidates.item_vectors import (
    ItemVectors,
    IvfIndex,
    build_index,
    fewest_probes,
    recall_share,
    search_index,
)
from headrace.score.candidates.source import BLOCKED, FETCH, CandidateContext
from headrace.score.columns import context_scalars
from headrace.score.items import ITEM_ROW
from headrace.score.joined_tables import Partitioning, joined_tables, parts_of
from headrace.score.ranking import ITEMS
from headrace.score.top_k import best_items, check_products, longest
from headrace.score.vectors import ModelVectors, Side, map_vectors
from headrace.storage import Location

#: Users in memory at once, and items that they fetch together.
_ROWS, _ITEMS = 4_096, 1 << 22
#: Users by whom recall is measured, and the fewest that suffice.
_RECALL_USERS, _LEAST_RECALL_USERS = 256, 32


@dataclass(frozen=True)
class VectorSearch:
    """Vectors to search, and the method."""

    items: ItemVectors
    threads: int
    #: None: all items are compared.
    index: IvfIndex | None = None
    #: Cells of the index that a search reads.
    probes: int = 0

    def best(self, queries: NDArray[np.float32], k: int, excluded: JaggedArray | None = None) -> NDArray[np.int32]:
        """Return the items' numbers: int32 [U, k], -1 behind the last one.

        Args:
            queries: users' vectors, float32 [U, D].
            k: of each user.
            excluded: for each user, numbers of items that are not wanted; an index gives them, too.
        """
        if self.index is not None:
            return search_index(self.index, queries, k, self.probes, self.threads).items
        return best_items(queries, self.items.blocks(), k, excluded=excluded, threads=self.threads).items


@dataclass(frozen=True)
class FindItems:
    """Users to the same rows, columns c0, c1, ..., with their items' rows behind them, int32 lists, best first."""

    #: Column with the number of items to fetch.
    fetch: str
    users: ModelVectors
    search: VectorSearch
    #: Column with the rows of blocked items, int32 lists, or None. An index ignores it.
    blocked: str | None = None
    #: Largest output batch, in items of all its users; a single user may exceed it.
    items_at_once: int = _ITEMS

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            fetch = batch.column(self.fetch).to_numpy(zero_copy_only=False).astype(np.int64)
            start, ends = 0, np.append(0, fetch.cumsum())
            while start < batch.num_rows:
                batch_end = int(np.searchsorted(ends, ends[start] + self.items_at_once, "right")) - 1
                stop = min(max(start + 1, batch_end), start + _ROWS)
                part, lists = batch.slice(start, stop - start), self._lists(batch, fetch, start, stop)
                numbered = [f"c{i}" for i in range(part.num_columns)]
                yield pa.RecordBatch.from_arrays([*part.columns, lists], [*numbered, "items"])
                start = stop

    def _lists(self, batch: pa.RecordBatch, fetch: NDArray[np.int64], start: int, stop: int) -> pa.ListArray:
        """Return the items' rows of the users from start to stop."""
        lengths, parts = np.zeros(stop - start, np.int64), []
        requesting = np.flatnonzero(fetch[start:stop] > 0)
        if len(requesting):
            for users, numbers in self._search(batch.take(pa.array(start + requesting)), fetch[start + requesting]):
                is_item = numbers >= 0
                lengths[requesting[users]] = is_item.sum(axis=1)
                parts.append((requesting[users], self.search.items.item_rows(numbers[is_item])))
        offsets = np.append(0, lengths.cumsum())
        values = np.empty(offsets[-1], np.int32)
        for users, rows in parts:
            n = lengths[users]
            # The user's offset plus the position within the user's list.
            values[np.repeat(offsets[users] - n.cumsum() + n, n) + np.arange(len(rows))] = rows
        return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))

    def _search(
        self, batch: pa.RecordBatch, fetch: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32]]]:
        """Yield (rows of some users, their items' numbers: int32 [users, width], then -1)."""
        queries, known = self.users.known_vectors(batch)
        check_products(longest(queries), self.search.items.longest)
        # Users with many blocked items fetch more. Searching by powers of two spares the others that time
        # and memory.
        doublings = np.ceil(np.log2(fetch))
        for doubling in np.unique(doublings[known]):
            users = np.flatnonzero(known & (doublings == doubling))
            width = int(fetch[users].max())
            numbers = self.search.best(np.ascontiguousarray(queries[users]), width, self._excluded(batch, users))
            numbers[np.arange(width) >= fetch[users, None]] = -1
            yield users, numbers

    def _excluded(self, batch: pa.RecordBatch, users: NDArray[np.int64]) -> JaggedArray | None:
        """Return the numbers of the items that are blocked for some of the users; -1 for items without a vector."""
        if self.blocked is None or self.search.index is not None:
            return None
        lists = batch.column(self.blocked).take(pa.array(users))
        offsets = np.append(0, pc.list_value_length(lists).to_numpy().cumsum()).astype(np.int64)
        return JaggedArray(offsets, self.search.items.numbers(lists.flatten().to_numpy()))


@dataclass(frozen=True)
class BuildIndex:
    """Spark task that builds the index of all items, in a file for each attempt."""

    items: ItemVectors
    threads: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            tick = time.perf_counter()
            folder = self.items.folder
            file = folder.parent / f"{folder.name}-{uuid.uuid4()}.faiss"
            built = build_index(self.items, file, self.threads)
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
    """Spark task that measures, for some users, how many probes find the required share of their best items.

    The users are the first ones, up to 256, of whom the model knows something; of fewer than 32 nothing is measured:
    `probes` and `recall` are null.
    """

    users: ModelVectors
    #: Its index is not None.
    search: VectorSearch
    k: int
    #: Required recall.
    enough: float

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        index = self.search.index
        assert index is not None
        queries = np.empty((0, self.search.items.width), np.float32)
        for batch in batches:
            for start in range(0, batch.num_rows, _ROWS):
                if len(queries) < _RECALL_USERS:
                    vectors, known = self.users.known_vectors(batch.slice(start, _ROWS))
                    queries = np.concatenate([queries, vectors[known]])[:_RECALL_USERS]
        if len(queries) < _LEAST_RECALL_USERS:
            yield _measured(len(queries), None, None, 0.0, 0.0)
            return
        check_products(longest(queries), self.search.items.longest)
        tick = time.perf_counter()
        best = best_items(queries, self.search.items.blocks(), self.k, threads=self.search.threads).items
        exact_seconds = time.perf_counter() - tick
        measurements: dict[int, tuple[float, float]] = {}

        def recall_of(probes: int) -> float:
            tick = time.perf_counter()
            approximate = search_index(index, queries, self.k, probes, self.search.threads).items
            seconds = time.perf_counter() - tick
            measurements[probes] = recall_share(approximate, best), seconds
            return measurements[probes][0]

        probes = fewest_probes(recall_of, self.enough, index.cells)
        recall, seconds = measurements[probes or index.cells]
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


log = logging.getLogger("headrace.score")

#: `index: auto` builds an index from so many items on; it takes at most 0.6 of the time of a full comparison.
_AUTO_ITEMS = 1_000_000
#: Users sampled to measure recall: the model may know few of those that a table lists.
_SAMPLE_USERS = 16_384


class VectorItems:
    """See the module, and headrace.score.candidates.source.ItemRanking."""

    def __init__(self, context: CandidateContext, source: VectorSource, spec_path: str) -> None:
        self._context, self._source, self._spec_path = context, source, spec_path
        #: How it was searched, for the manifest.
        self.facts: dict[str, Any] = {}

    @property
    def leaves_out_blocked(self) -> bool:
        """See ItemRanking. A comparison of all items does; of an index some more are asked for instead."""
        return self._search_method.index is None

    def first(self, users: DataFrame, limit: int) -> DataFrame:
        """See ItemRanking."""
        if not self._search_method.items.rows:
            return users.withColumn(ITEMS, F.array().cast("array<int>"))
        # mapInArrow reads a dot in a column's name as a field's: numbers travel, the task knows the names.
        numbered = users.toDF(*[f"c{i}" for i in range(len(users.columns))])
        schema = StructType([*numbered.schema.fields, StructField("items", ArrayType(IntegerType()))])
        blocked = BLOCKED if BLOCKED in users.columns else None
        vectors = self._vectors("user")
        work = FindItems(FETCH, vectors, self._search_method, blocked)
        cut = partial(self._parts, numbered, users)
        with_items = map_vectors(self._context.spark, vectors, numbered, users.columns, cut, work, schema)
        return with_items.toDF(*users.columns, ITEMS)

    def _parts(self, numbered: DataFrame, users: DataFrame) -> Partitioning:
        """Cut users by their keys, in as many parts as all of them have."""
        key = F.col(numbered.columns[users.columns.index(self._score.user.key)])
        return Partitioning.by_hash(key, parts_of(self._context.spark, self._users))

    @cached_property
    def _users(self) -> int:
        return self._context.users.count()

    @cached_property
    def _search_method(self) -> VectorSearch:
        items = self._items
        self.facts |= {"items": items.rows, "unknown_items": items.unknown, "dimensions": items.width, "index": "exact"}
        if items.unknown:
            log.info(
                "%s: %s items of which the model learned nothing are left out", self._spec_path, f"{items.unknown:,}"
            )
        exact = VectorSearch(items, self._threads)
        use_index = self._source.index == "ivf" or (self._source.index == "auto" and items.rows >= _AUTO_ITEMS)
        return self._with_index(exact) if use_index and items.rows else exact

    @cached_property
    def _items(self) -> ItemVectors:
        score = self._score
        return ItemVectors.write(
            self._context.spark,
            self._context.items,
            ITEM_ROW,
            (score.item.key, *score.item.columns),
            self._vectors("item"),
            self._context.run_folder / f"vectors-{self._spec_path}",
        )

    def _with_index(self, exact: VectorSearch) -> VectorSearch:
        """Return the index, with as many probes as its recall needs."""
        spark, items = self._context.spark, exact.items
        # The task runs alone, so it uses all cores of its executor.
        cores = int(spark.sparkContext.getConf().get("spark.executor.cores") or spark.sparkContext.defaultParallelism)
        (built,) = (
            spark.range(0, 1, 1, 1)
            .mapInArrow(BuildIndex(items, cores), "file string, cells int, bytes long, seconds double")
            .collect()
        )
        file = items.folder.parent / built["file"]
        index = IvfIndex(items, file, built["cells"])
        log.info(
            "%s: an index of %s items in %s cells, %.0f MiB, in %.1f s",
            self._spec_path,
            f"{items.rows:,}",
            f"{index.cells:,}",
            built["bytes"] / 2**20,
            built["seconds"],
        )
        key = col(self._score.user.key)
        sample = self._context.users.orderBy(F.xxhash64(key), key).limit(_SAMPLE_USERS)
        numbered = sample.toDF(*[f"c{i}" for i in range(len(sample.columns))])
        vectors = self._vectors("user")
        measured = MeasureRecall(
            vectors, VectorSearch(items, self._threads, index), min(self._source.k, items.rows), self._source.min_recall
        )
        schema = "users int, probes int, recall double, seconds double, exact_seconds double"
        single_part = Partitioning(
            F.lit(0), 1, F.xxhash64(numbered.columns[sample.columns.index(self._score.user.key)])
        )
        measurement = map_vectors(
            spark, vectors, numbered.coalesce(1), sample.columns, lambda: single_part, measured, schema
        )
        (result,) = measurement.collect()
        if result["recall"] is None:
            # The model knows few users, so few searches will follow.
            log.info(
                "%s: all items are compared: the model knows %d of %d users, too few to measure an index by",
                self._spec_path,
                result["users"],
                _SAMPLE_USERS,
            )
            file.remove_quietly()
            self.facts["recall_users"] = result["users"]
            return exact
        reached, users = round(result["recall"], 4), result["users"]
        self.facts |= {
            "index": "ivf",
            "cells": index.cells,
            "probes": result["probes"],
            "bytes": built["bytes"],
            "build_seconds": round(built["seconds"], 2),
            "recall": reached,
            "recall_at": measured.k,
            "recall_users": result["users"],
            "users_per_second": {
                "index": round(users / result["seconds"], 1),
                "exact": round(users / result["exact_seconds"], 1),
            },
        }
        if result["probes"] is None:
            raise UserError(
                f"{self._spec_path}: the index finds {reached} of the best {measured.k} items even when it looks at "
                f"all of its cells, less than min_recall {self._source.min_recall}: set index: exact"
            )
        log.info(
            "%s: recall at %d of %d users is %.4f, with %d of %d cells; %.0f users/s, all items compared: %.0f users/s",
            self._spec_path,
            measured.k,
            result["users"],
            reached,
            result["probes"],
            index.cells,
            users / result["seconds"],
            users / result["exact_seconds"],
        )
        return VectorSearch(items, self._threads, index, result["probes"])

    @property
    def _score(self) -> Score:
        assert self._context.ctx.spec.score is not None
        return self._context.ctx.spec.score

    @property
    def _threads(self) -> int:
        return int(self._context.spark.sparkContext.getConf().get("spark.task.cpus") or 1)

    @property
    def _model(self) -> Location:
        """The saved model's folder."""
        ctx, chosen = self._context.ctx, self._context.model
        # Trees have no vectors; take those of the day's network.
        trees = chosen.stage in ("baseline", "second_stage")
        return ctx.ws.locate((ctx.upstream["train"].output("model") if trees else chosen.output).name)

    @cached_property
    def _joined(self) -> frozenset[str]:
        ctx = self._context.ctx
        return joined_tables(self._score.embeddings, self._model, ctx.ws.mapped(ctx.spec.pipeline), gpu=False)

    def _vectors(self, side: Side) -> ModelVectors:
        ctx, score = self._context.ctx, self._score
        return ModelVectors(
            model=self._model,
            threads=self._threads,
            side=side,
            user_columns=(score.user.key, *score.user.columns),
            item_columns=(score.item.key, *score.item.columns),
            context=context_scalars(ctx.spec, score),
            maps=self._context.maps,
            joined=self._joined,
        )
