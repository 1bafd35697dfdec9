"""The candidates of a run's users: sources, filters and their union."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, IntegerType, StructField, StructType

from headrace.config import Candidates
from headrace.errors import UserError
from headrace.features.functions.spark_expressions import col
from headrace.features.layout.split import SPLIT
from headrace.score.candidates.expressions import expression_errors
from headrace.score.candidates.fetch import IS_NEW, Asked, Fetching, facts_of, list_column
from headrace.score.candidates.filters import Sides, blocked_pairs, filter_sides, of_conditions
from headrace.score.candidates.pair_events import USER
from headrace.score.candidates.rankings import RANKINGS
from headrace.score.candidates.source import BLOCKED, SourceContext
from headrace.score.candidates.union import Quotas, flat, unite
from headrace.score.entities import with_activity
from headrace.score.items import ITEM_ROW
from headrace.score.rank.blocks import ITEMS, SOURCES

log = logging.getLogger("headrace.score")

_COUNTS = "__counts"
#: Users that are united at a time, in a task.
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
    #: Of rows with the user's and the item's key, how many no filter should have let through: counted anew.
    violations: Callable[[DataFrame], int]


@contextmanager
def candidates_of_users(context: SourceContext) -> Iterator[UserCandidates]:
    """What `score.candidates` gives each user; computed once, and kept to the end of the context.

    Args:
        context: all users and items of the run. `items` may lack `events` and `first_event`.

    Raises:
        UserError: a filter's expression or table does not fit, or a value is none that an expression can take; or
            filters leave no user or no item.
    """
    candidates = context.score.candidates
    assert candidates is not None
    context = replace(context, items=_with_events(context), kept={})
    try:
        with expression_errors(context.score):
            made = _made(context, candidates)
        yield made
    finally:
        context.release()


def _made(context: SourceContext, candidates: Candidates) -> UserCandidates:
    sides = filter_sides(context)
    context = replace(context, users=sides.users, items=context.keep("items", lambda: sides.items))
    asked = [
        Asked(name, source, RANKINGS[source.kind](context, source, f"score.candidates.sources.{name}"))
        for name, source in candidates.sources.items()
    ]
    n_items = context.items.count()
    if not n_items:
        raise UserError("score.filters leave no item for anybody")
    pairs = blocked_pairs(context)
    blocked = None if pairs is None else context.keep("blocked", lambda: pairs)
    users = context.keep("users", lambda: _with_blocked(context, blocked))
    fetching = Fetching(context, asked, sides.pairs, n_items)
    lists = fetching.run(users)
    quotas = Quotas(candidates.limit, tuple(candidates.places().values()))
    united = context.keep("united", lambda: _united(lists, len(asked), quotas))
    facts = _facts(united, [a.name for a in asked], candidates.limit)
    for name, more in facts_of(fetching.facts).items():
        facts["sources"][name] |= more
    for a in asked:
        facts["sources"][a.name] |= getattr(a.ranking, "facts", {})
    if not facts["candidates"]:
        raise UserError("score.filters leave no item for any user, or the sources have none")
    log.info("score: %s candidates of %s users", f"{facts['candidates']:,}", f"{facts['users']:,}")
    return UserCandidates(
        united.drop(_COUNTS), tuple(candidates.sources), facts, lambda rows: _violations(context, sides, blocked, rows)
    )


def _with_events(context: SourceContext) -> DataFrame:
    """The items with `events` and `first_event`, which they may have already."""
    if "events" in context.items.columns:
        return context.items
    return with_activity(context.ctx.spec, context.active.events, context.items, context.score.item.key)


def _with_blocked(context: SourceContext, blocked: DataFrame | None) -> DataFrame:
    """The users with BLOCKED and IS_NEW."""
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
    """The users with ITEMS, SOURCES and _COUNTS in place of the sources' lists."""
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
    """Users with a list for each source -> the same columns `names`, items, sources, and counts of overlaps."""
    found = unite([flat(batch.column(list_column(i))) for i in range(n_sources)], quotas)
    offsets = pa.array(found.offsets.astype(np.int32))
    counts = np.concatenate([found.shared.reshape(batch.num_rows, -1), found.alone], axis=1)
    ends = np.arange(batch.num_rows + 1, dtype=np.int32) * counts.shape[1]
    return pa.RecordBatch.from_arrays(
        [
            *[batch.column(n) for n in names],
            pa.ListArray.from_arrays(offsets, pa.array(found.items)),
            pa.ListArray.from_arrays(offsets, pa.array(found.sources)),
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
    every = [*firsts, *sums, *of_source]
    row = [int(x or 0) for x in united.agg(*[s.alias(str(i)) for i, s in enumerate(every)]).collect()[0]]
    users, candidates, fewer, none = row[:4]
    shared, alone, without = row[4 : 4 + n * n], row[4 + n * n : 4 + n * n + n], row[4 + n * n + n :]
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
                "shared": {other: shared[i * n + j] for j, other in enumerate(names) if j != i},
                "users_without": without[i],
            }
            for i, name in enumerate(names)
        },
    }


def _violations(context: SourceContext, sides: Sides, blocked: DataFrame | None, rows: DataFrame) -> int:
    """How many of some pairs of keys the filters should have left out."""
    user, item = context.user_key, context.score.item.key
    pairs = rows.select(col(user).alias(USER), col(item).alias("__item"))
    keys = context.items.select(col(item).alias("__item"), F.col(ITEM_ROW))
    kept = pairs.join(keys, "__item").join(context.users, F.col(USER) == col(user))
    if blocked is not None:
        kept = kept.join(blocked, [USER, ITEM_ROW], "left_anti")
    kept = kept.select(*[col(c) for c in context.users.columns], F.col(ITEM_ROW))
    if sides.pairs:
        kept = of_conditions(context, kept, sides.pairs)
    with expression_errors(context.score):
        return pairs.count() - kept.count()
