"""Covisitation: similarities of items by their common users, and sums of them over each user's newest items.

`headrace.config.Covisitation` defines the similarities and names their source. They count pairs among each user's
newest items, so a user adds at most history * (history - 1) / 2 pairs. A popular item's users are sampled down to about
`users_per_item` by a hash of the user. The hash is the same for all items, so two popular items keep the same users. A
pair's count is divided by the share of users that the more popular item keeps, and is right on average. Similarities
are whole numbers, so their sums do not depend on the order in which Spark adds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from headrace.config import Covisitation
from headrace.features.functions.spark_expressions import col
from headrace.score.candidates.shared_lists import with_own_lists
from headrace.score.candidates.source import FETCH, PAIR_TIME, USER, CandidateContext, pairs_of
from headrace.score.items import ITEM_ROW
from headrace.score.ranking import ITEMS

#: Resolution of the share of users that an item keeps.
_STEPS = 1 << 20
#: Fixed-point value of a similarity of 1.
_UNIT = 1 << 40
_NEIGHBORS, _SCORES, _LIMIT = "__neighbors", "__similarities", "__limit"
#: Most neighbours that a task sums at once.
_BLOCK = 1 << 20


class CovisitedItems:
    """Candidates by item-to-item collaborative filtering; see the module."""

    def __init__(self, context: CandidateContext, source: Covisitation, spec_path: str) -> None:
        self._context, self._source, self._spec_path = context, source, spec_path

    def first(self, users: DataFrame, limit: int) -> DataFrame:
        """Return the users with their first items, at most FETCH of each, in ITEMS; see `ItemRanking`."""
        key = self._context.user_key
        requesting = users.where(F.col(FETCH) > 0).select(
            col(key).alias("__requesting_user"), F.col(FETCH).alias(_LIMIT)
        )
        matches = requesting.join(self._history, F.col("__requesting_user") == F.col(USER)).select(
            USER, _LIMIT, ITEM_ROW
        )
        matches = matches.join(self._similar, ITEM_ROW)
        # Join lists of neighbours to users and sum them in a task: a row for each neighbour would be far more data.
        lists = matches.groupBy(USER).agg(
            F.first(_LIMIT).alias(_LIMIT), F.collect_list(F.struct(_NEIGHBORS, _SCORES)).alias("e")
        )
        lists = lists.select(
            USER, _LIMIT, *[F.flatten(F.col(f"e.{name}")).alias(name) for name in (_NEIGHBORS, _SCORES)]
        )
        type_ = dict(self._history.dtypes)[USER]
        summed = lists.mapInArrow(_sum_batches, f"{USER} {type_}, __list array<int>")
        listed = with_own_lists(users, key, summed, USER)
        return listed.withColumn(ITEMS, F.coalesce("__list", F.array().cast("array<int>"))).drop("__list")

    @cached_property
    def _history(self) -> DataFrame:
        """Return (USER, ITEM_ROW): each user's newest items."""
        newest = Window.partitionBy(USER).orderBy(F.desc(PAIR_TIME), F.asc(ITEM_ROW))
        pairs = pairs_of(self._context, self._source, self._spec_path)
        placed = pairs.withColumn("__place", F.row_number().over(newest))
        history = placed.where(F.col("__place") <= self._source.history).select(USER, ITEM_ROW)
        return self._context.keep((self._spec_path, "history"), lambda: history)

    @cached_property
    def _similar(self) -> DataFrame:
        """Return (ITEM_ROW, neighbours array<int>, similarities array<bigint>): each item's most similar ones."""
        n, neighbor, common = F.col("__n"), "__other", F.col("__common")
        counts = self._history.groupBy(ITEM_ROW).agg(F.count(F.lit(1)).alias("__n"))
        counts = counts.withColumn("__share", share_of_users(self._source.users_per_item, n))
        thinned = self._history.join(counts, ITEM_ROW).where(
            F.pmod(F.xxhash64(F.lit("users of an item"), F.col(USER)), F.lit(_STEPS)) < F.col("__share")
        )
        entry = F.struct(F.col(ITEM_ROW).alias("item"), n.alias("n"), F.col("__share").alias("share"))
        baskets = thinned.groupBy(USER).agg(F.sort_array(F.collect_list(entry)).alias("b"))
        pairs = baskets.select(F.explode(_pairs_within(F.col("b"))).alias("p")).select("p.*")
        pair_counts = pairs.groupBy("a", "b").agg(F.count(F.lit(1)).alias("__seen_together"))
        pair_counts = pair_counts.select(
            F.col("a.item").alias(ITEM_ROW),
            F.col("b.item").alias(neighbor),
            F.col("a.n").alias("__n"),
            F.col("b.n").alias("__m"),
            (F.col("__seen_together") * _STEPS / F.least("a.share", "b.share")).alias("__common"),
        )
        similarity = F.least(F.lit(1.0), self._similarity(common, n, F.col("__m")))
        if self._source.shrinkage:
            similarity = similarity * common / (common + F.lit(self._source.shrinkage))
        scaled = pair_counts.select(ITEM_ROW, neighbor, F.floor(similarity * F.lit(float(_UNIT))).alias("__similarity"))
        symmetric = scaled.unionByName(
            scaled.select(F.col(neighbor).alias(ITEM_ROW), F.col(ITEM_ROW).alias(neighbor), "__similarity")
        )
        order = Window.partitionBy(ITEM_ROW).orderBy(F.desc("__similarity"), F.asc(neighbor))
        best = symmetric.withColumn("__place", F.row_number().over(order)).where(
            F.col("__place") <= self._source.neighbors
        )
        entries = F.sort_array(F.collect_list(F.struct("__place", neighbor, "__similarity")))
        similar = best.groupBy(ITEM_ROW).agg(entries.alias("e"))
        similar = similar.select(
            ITEM_ROW, F.col(f"e.{neighbor}").alias(_NEIGHBORS), F.col("e.__similarity").alias(_SCORES)
        )
        return self._context.keep((self._spec_path, "similar"), lambda: similar)

    def _similarity(self, common: Column, n: Column, m: Column) -> Column:
        if self._source.similarity == "cosine":
            return common / F.sqrt(n.cast("double") * m)
        # With thinned counts, the estimated union may be smaller than the intersection.
        return common / F.greatest(common, n + m - common)


def share_of_users(users_per_item: int, n: Column) -> Column:
    """Return the share, in 2^20 steps, of an item's n users (bigint) that keeps about `users_per_item`: int, >= 1."""
    # A double, since Spark's product of two ints is an int and would overflow.
    steps = F.floor(F.lit(float(users_per_item * _STEPS)) / n)
    return F.greatest(F.lit(1), F.least(F.lit(_STEPS), steps)).cast("int")


def _pairs_within(basket: Column) -> Column:
    """Return all pairs of entries of a sorted list, each with the lower one first: array<struct<a, b>>."""
    return F.flatten(
        F.transform(
            basket,
            lambda a: F.transform(
                F.filter(basket, lambda b: b["item"] > a["item"]), lambda b: F.struct(a.alias("a"), b.alias("b"))
            ),
        )
    )


@dataclass(frozen=True)
class Neighbors:
    """Lists of items and similarities, one for each of n users; an item may be in a list several times."""

    #: int64 [n + 1]
    offsets: NDArray[np.int64]
    #: int32 [N]
    items: NDArray[np.int32]
    #: int64 [N], positive
    similarities: NDArray[np.int64]


def best_neighbors(lists: Neighbors, limits: NDArray[np.integer[Any]]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the items with the greatest sums of similarities, for each user.

    Args:
        lists: neighbours of n users.
        limits: largest number of items of each user, int [n].

    Returns:
        (offsets int64 [n + 1], items int32): by descending sum; of equal sums the lower item first.
    """
    n = len(lists.offsets) - 1
    users = np.repeat(np.arange(n), np.diff(lists.offsets))
    order = np.lexsort((lists.items, users))
    users, items = users[order], lists.items[order]
    group_starts = np.flatnonzero(np.r_[True, (users[1:] != users[:-1]) | (items[1:] != items[:-1])][: len(users)])
    sums = np.add.reduceat(lists.similarities[order], group_starts) if len(group_starts) else np.empty(0, np.int64)
    users, items = users[group_starts], items[group_starts]
    best = np.lexsort((items, -sums, users))
    users, items = users[best], items[best]
    starts = np.searchsorted(users, np.arange(n))
    is_listed = np.arange(len(users)) - starts[users] < np.asarray(limits)[users]
    return np.r_[0, np.cumsum(np.bincount(users[is_listed], minlength=n))].astype(np.int64), items[is_listed]


def _sum_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Map (user, limit, items list<int32>, similarities list<int64>) to (user, best items list<int32>)."""
    for batch in batches:
        user, limits, items, similarities = batch.columns
        ends = np.asarray(items.offsets).astype(np.int64)
        start = 0
        while start < batch.num_rows:
            # As many users as fit the block, and at least one.
            stop = max(start + 1, int(np.searchsorted(ends, ends[start] + _BLOCK, "right")) - 1)
            user_items = items.slice(start, stop - start)
            offsets = ends[start : stop + 1] - ends[start]
            lists = Neighbors(
                offsets, np.asarray(user_items.flatten()), np.asarray(similarities.slice(start, stop - start).flatten())
            )
            best_offsets, best = best_neighbors(lists, np.asarray(limits.slice(start, stop - start)))
            yield pa.RecordBatch.from_arrays(
                [
                    user.slice(start, stop - start),
                    pa.ListArray.from_arrays(pa.array(best_offsets.astype(np.int32)), pa.array(best, pa.int32())),
                ],
                [USER, "__list"],
            )
            start = stop
