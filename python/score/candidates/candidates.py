"""The candidates of a run's users: sources, filters, and the union of the sources' lists by quotas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, IntegerType, StructField, StructType

from headrace.config import Candidates
from headrace.errors import UserError
from headrace.features.functions.spark_expressions import col
from headrace.features.layout.split import SPLIT
from headrace.score.candidates.covisitation import CovisitedItems
from headrace.score.candidates.fetch import (
    IS_NEW,
    CandidateFetcher,
    FilteredSides,
    SourceRequest,
    blocked_pairs,
    facts_of,
    filter_sides,
    list_column,
    meeting_conditions,
)
from headrace.score.candidates.shared_lists import ListedItems, PopularItems, RecentItems, UnseenItems
from headrace.score.candidates.source import BLOCKED, USER, CandidateContext, ItemRanking, expression_errors
from headrace.score.candidates.vector_source import VectorItems
from headrace.score.entities import with_activity
from headrace.score.items import ITEM_ROW
from headrace.score.ranking import ITEMS, SOURCES


@dataclass(frozen=True)
class Quotas:
    """Number of places in a list, by source and by kind of user."""

    #: The most candidates of a user.
    limit: int
    #: Reserved places by source, in the order of the spec: its best candidates get them, whatever other sources give.
    #: Their sum is at most `limit`.
    places: tuple[int, ...]


@dataclass(frozen=True)
class United:
    """Lists of n users: offsets int64 [n + 1] over items int32 [N] and sources int32 [N]; and what they are made of."""

    offsets: NDArray[np.int64]
    items: NDArray[np.int32]
    #: Bit i: source i gave the item.
    sources: NDArray[np.int32]
    #: int32 [n, sources, sources]: a user's candidates that both sources gave; on the diagonal, one source.
    shared: NDArray[np.int32]
    #: int32 [n, sources]: a user's candidates that no other source gave.
    alone: NDArray[np.int32]


def unite(lists: Sequence[tuple[NDArray[np.int64], NDArray[np.int32]]], quotas: Quotas) -> United:
    """Return the union of the items that the sources give each user.

    First come the kept places: the first `places[i]` of each source i. Sources fill the others in their order, each by
    its own. The list is in the same order: by the first source that gave an item, and by its order.

    Args:
        lists: for each source (offsets int64 [n + 1], items int32), a user's items distinct and best first.
        quotas: the places.
    """
    n, n_sources = len(lists[0][0]) - 1, len(lists)
    lengths = [np.diff(offsets) for offsets, _ in lists]
    users = np.concatenate([np.repeat(np.arange(n), length) for length in lengths])
    items = np.concatenate([values[offsets[0] : offsets[-1]] for offsets, values in lists]).astype(np.int32)
    source = np.repeat(np.arange(n_sources), [int(length.sum()) for length in lengths])
    place = np.concatenate([_places(v) for v in lengths])
    has_place = place < np.asarray(quotas.places)[source]
    # One entry per user and item: the place in its first source, with the bits and reserved places of all its sources.
    order = np.lexsort((source, items, users))
    users, items, source, place, has_place = users[order], items[order], source[order], place[order], has_place[order]
    first = np.flatnonzero(np.r_[True, (users[1:] != users[:-1]) | (items[1:] != items[:-1])][: len(users)])
    bits = np.int32(1) << source.astype(np.int32)
    if len(first):
        bits, has_place = np.bitwise_or.reduceat(bits, first), np.logical_or.reduceat(has_place, first)
    users, items, source, place = users[first], items[first], source[first], place[first]
    # Reserved places come first, then the sources in order, each by its own order.
    order = np.lexsort((place, source, ~has_place, users))
    starts = np.searchsorted(users, np.arange(n))
    chosen = np.zeros(len(users), bool)
    chosen[order] = np.arange(len(users)) - starts[users[order]] < quotas.limit
    order = np.lexsort((place, source, users))
    order = order[chosen[order]]
    users, items, bits = users[order], items[order], bits[order]
    offsets = np.r_[0, np.cumsum(np.bincount(users, minlength=n))].astype(np.int64)
    shared, alone = _overlaps(users, bits, n, n_sources)
    return United(offsets, items, bits, shared, alone)


def _places(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Return the position of each entry within its list: 0, 1, ..."""
    ends: NDArray[np.int64] = np.cumsum(lengths)
    places: NDArray[np.int64] = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)
    return places


def _overlaps(
    users: NDArray[np.int64], bits: NDArray[np.int32], n: int, n_sources: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    is_from = [(bits >> s) & 1 == 1 for s in range(n_sources)]
    shared = np.zeros((n, n_sources, n_sources), np.int32)
    alone = np.zeros((n, n_sources), np.int32)
    for s in range(n_sources):
        alone[:, s] = np.bincount(users[bits == 1 << s], minlength=n)
        for t in range(s, n_sources):
            shared[:, s, t] = shared[:, t, s] = np.bincount(users[is_from[s] & is_from[t]], minlength=n)
    return shared, alone


def flat(lists: pa.ListArray) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return (offsets int64 [n + 1] from 0, values int32) of an Arrow array of lists without nulls."""
    offsets = np.asarray(lists.offsets).astype(np.int64)
    return offsets - offsets[0], np.asarray(lists.flatten()).astype(np.int32)


#: Constructors of sources by `kind`: (context of the run, the source's section, its place in the spec).
RANKINGS: Mapping[str, Callable[[CandidateContext, Any, str], ItemRanking]] = {
    "vectors": VectorItems,
    "covisitation": CovisitedItems,
    "popular": PopularItems,
    "recent": RecentItems,
    "new_items": UnseenItems,
    "table": ListedItems,
}


log = logging.getLogger("headrace.score")

_COUNTS = "__counts"
#: Users whose lists a task unites at once.
_USERS_AT_ONCE = 1024


@dataclass(frozen=True)
class UserCandidates:
    """The candidates of all users."""

    #: One row for each user: the key, the user's columns, `__items` and `__sources` (both array<int>, not null).
    frame: DataFrame
    #: Names of the sources by their bits.
    names: tuple[str, ...]
    #: For the manifest: how many candidates, of which sources, and what filters left out.
    facts: dict[str, Any]
    #: Counts rows (user key, item key) that the filters should have removed, by applying all filters again.
    violations: Callable[[DataFrame], int]


@contextmanager
def candidates_of_users(context: CandidateContext) -> Iterator[UserCandidates]:
    """Give the candidates of each user; they are computed once, and kept to the end of the context.

    Args:
        context: all users and items of the run. `items` may lack `events` and `first_event`.

    Raises:
        UserError: a filter's expression or table does not fit, or a value is none that an expression can take; or
            filters leave no user or no item.
    """
    candidates = context.score.candidates
    assert candidates is not None
    context = replace(context, items=_with_events(context), frames={})
    try:
        with expression_errors(context.score):
            user_candidates = _compute_candidates(context, candidates)
        yield user_candidates
    finally:
        context.release()


def _compute_candidates(context: CandidateContext, candidates: Candidates) -> UserCandidates:
    sides = filter_sides(context)
    context = replace(context, users=sides.users, items=context.keep("items", lambda: sides.items))
    requests = [
        SourceRequest(name, source, RANKINGS[source.kind](context, source, f"score.candidates.sources.{name}"))
        for name, source in candidates.sources.items()
    ]
    n_items = context.items.count()
    if not n_items:
        raise UserError("score.filters leave no item for anybody")
    pairs = blocked_pairs(context)
    blocked = None if pairs is None else context.keep("blocked", lambda: pairs)
    users = context.keep("users", lambda: _with_blocked(context, blocked))
    fetching = CandidateFetcher(context, requests, sides.pairs, n_items)
    lists = fetching.run(users)
    quotas = Quotas(candidates.limit, tuple(candidates.places().values()))
    united = context.keep("united", lambda: _united(lists, len(requests), quotas))
    facts = _facts(united, [a.name for a in requests], candidates.limit)
    for name, fetch_facts in facts_of(fetching.facts).items():
        facts["sources"][name] |= fetch_facts
    for a in requests:
        facts["sources"][a.name] |= getattr(a.ranking, "facts", {})
    if not facts["candidates"]:
        raise UserError("score.filters leave no item for any user, or the sources have none")
    log.info("score: %s candidates of %s users", f"{facts['candidates']:,}", f"{facts['users']:,}")
    return UserCandidates(
        united.drop(_COUNTS), tuple(candidates.sources), facts, lambda rows: _violations(context, sides, blocked, rows)
    )


def _with_events(context: CandidateContext) -> DataFrame:
    """Return the items with `events` and `first_event`, which they may have already."""
    if "events" in context.items.columns:
        return context.items
    return with_activity(context.ctx.spec, context.active.events, context.items, context.score.item.key)


def _with_blocked(context: CandidateContext, blocked: DataFrame | None) -> DataFrame:
    """Return the users with BLOCKED and IS_NEW."""
    users, key = context.users, col(context.user_key)
    if blocked is None:
        users = users.withColumn(BLOCKED, F.array().cast("array<int>"))
    else:
        lists = blocked.groupBy(F.col(USER).alias("__of")).agg(F.collect_list(ITEM_ROW).alias("__those"))
        users = users.join(lists, key == F.col("__of"), "left")
        users = users.withColumn(BLOCKED, F.coalesce("__those", F.array().cast("array<int>"))).drop("__of", "__those")
    if context.score.user.from_ is None:
        return users.withColumn(IS_NEW, F.lit(False))
    active = context.active.events.where(F.col(SPLIT) == "train").select(key.alias("__of")).distinct()
    return users.join(active, key == F.col("__of"), "left").withColumn(IS_NEW, F.col("__of").isNull()).drop("__of")


def _united(lists: DataFrame, n_sources: int, quotas: Quotas) -> DataFrame:
    """Return the users with ITEMS, SOURCES and _COUNTS in place of the sources' lists."""
    columns = [f for f in lists.schema.fields if not f.name.startswith("__list_")]
    # mapInArrow reads a dot in a column's name as a field's: numbers travel.
    numbered = lists.select(
        *[col(f.name).alias(f"c{i}") for i, f in enumerate(columns)], *[F.col(list_column(i)) for i in range(n_sources)]
    )
    names = [f"c{i}" for i in range(len(columns))]
    added = [StructField(name, ArrayType(IntegerType())) for name in (ITEMS, SOURCES, _COUNTS)]
    schema = StructType([*(StructField(n, f.dataType) for n, f in zip(names, columns, strict=True)), *added])

    def work(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for start in range(0, batch.num_rows, _USERS_AT_ONCE):
                yield unite_batch(batch.slice(start, _USERS_AT_ONCE), names, n_sources, quotas)

    united = numbered.mapInArrow(work, schema)
    return united.toDF(*[f.name for f in columns], ITEMS, SOURCES, _COUNTS)


def unite_batch(batch: pa.RecordBatch, names: Sequence[str], n_sources: int, quotas: Quotas) -> pa.RecordBatch:
    """Unite the sources' lists of a batch: its columns `names`, items, sources, and counts of overlaps."""
    united = unite([flat(batch.column(list_column(i))) for i in range(n_sources)], quotas)
    offsets = pa.array(united.offsets.astype(np.int32))
    counts = np.concatenate([united.shared.reshape(batch.num_rows, -1), united.alone], axis=1)
    ends = np.arange(batch.num_rows + 1, dtype=np.int32) * counts.shape[1]
    return pa.RecordBatch.from_arrays(
        [
            *[batch.column(n) for n in names],
            pa.ListArray.from_arrays(offsets, pa.array(united.items)),
            pa.ListArray.from_arrays(offsets, pa.array(united.sources)),
            pa.ListArray.from_arrays(pa.array(ends), pa.array(counts.reshape(-1).astype(np.int32))),
        ],
        [*names, ITEMS, SOURCES, _COUNTS],
    )


def _facts(united: DataFrame, names: Sequence[str], limit: int) -> dict[str, Any]:
    n = len(names)
    size = F.size(ITEMS)
    sums = [F.sum(F.element_at(_COUNTS, i + 1)) for i in range(n * n + n)]
    of_source = [F.sum((F.element_at(_COUNTS, i * n + i + 1) == 0).cast("long")) for i in range(n)]
    firsts = [F.count(F.lit(1)), F.sum(size), F.sum((size < limit).cast("long")), F.sum((size == 0).cast("long"))]
    aggregates = [*firsts, *sums, *of_source]
    row = [int(x or 0) for x in united.agg(*[s.alias(str(i)) for i, s in enumerate(aggregates)]).collect()[0]]
    users, candidates, fewer, none = row[:4]
    shared, alone, users_without = row[4 : 4 + n * n], row[4 + n * n : 4 + n * n + n], row[4 + n * n + n :]
    return {
        "users": users,
        "candidates": candidates,
        "limit": limit,
        "users_with_fewer": fewer,
        "users_with_none": none,
        "sources": {
            name: {
                "candidates": shared[i * n + i],
                "alone": alone[i],
                "shared": {other_name: shared[i * n + j] for j, other_name in enumerate(names) if j != i},
                "users_without": users_without[i],
            }
            for i, name in enumerate(names)
        },
    }


def _violations(context: CandidateContext, sides: FilteredSides, blocked: DataFrame | None, rows: DataFrame) -> int:
    """Return how many of some pairs of keys the filters should have left out."""
    user, item = context.user_key, context.score.item.key
    pairs = rows.select(col(user).alias(USER), col(item).alias("__item"))
    keys = context.items.select(col(item).alias("__item"), F.col(ITEM_ROW))
    allowed = pairs.join(keys, "__item").join(context.users, F.col(USER) == col(user))
    if blocked is not None:
        allowed = allowed.join(blocked, [USER, ITEM_ROW], "left_anti")
    allowed = allowed.select(*[col(c) for c in context.users.columns], F.col(ITEM_ROW))
    if sides.pairs:
        allowed = meeting_conditions(context, allowed, sides.pairs)
    with expression_errors(context.score):
        return pairs.count() - allowed.count()
