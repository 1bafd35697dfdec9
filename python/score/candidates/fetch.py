"""Filters of candidates, and rounds of requests to sources until enough items pass the filters.

A source returns the first items of each user's order, and filters remove some of them. So the first request is for k
items plus the number of items that are blocked for the user, unless the source leaves these out itself. Users who then
have fewer than k items, of a source that has more, get further rounds. The rounds end when no such user is left. Each
user then has k items of a source, or all of its items that pass the filters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.config import BlockedFilter, CandidateSource, Score, SeenFilter, WhereFilter
from headrace.errors import UserError
from headrace.features.functions.spark_expressions import col
from headrace.features.table_ops.preparation import prepared_columns
from headrace.features.types import declared
from headrace.score.candidates.shared_lists import read_table
from headrace.score.candidates.source import (
    BLOCKED,
    FETCH,
    USER,
    CandidateContext,
    ItemRanking,
    condition,
    fault_of,
    pairs_of,
)
from headrace.score.columns import context_scalars
from headrace.score.items import ITEM_ROW
from headrace.score.ranking import ITEMS


@dataclass(frozen=True)
class FilteredSides:
    """Users and items that pass the filters of one side, and the conditions that need both sides."""

    users: DataFrame
    items: DataFrame
    #: (key in the spec, expression)
    pairs: tuple[tuple[str, str], ...]


def filter_sides(context: CandidateContext) -> FilteredSides:
    """Apply the filters that look at users alone, or at items alone.

    Raises:
        UserError: Spark cannot analyse an expression with the columns of users and items, or a table lacks a column.
    """
    users, items, score = context.users, context.items, context.score
    constants = constant_columns(context)
    pairs: list[tuple[str, str]] = []
    for i, entry in enumerate(score.filters):
        spec_path = f"score.filters[{i}]"
        if isinstance(entry, WhereFilter):
            # An expression belongs to a side if Spark can analyse it with that side's columns alone.
            if fault_of(users.withColumns(constants), entry.where) is None:
                users = _filtered(users, constants, entry.where)
            elif fault_of(items.withColumns(constants), entry.where) is None:
                items = _filtered(items, constants, entry.where)
            elif (fault := fault_of(users.crossJoin(items).withColumns(constants), entry.where)) is not None:
                raise UserError(f"{spec_path}.where: {fault}")
            else:
                pairs.append((f"{spec_path}.where", entry.where))
        elif isinstance(entry, BlockedFilter) and entry.user is None:
            assert entry.item is not None
            items = _without_keys(items, score.item.key, _keys(context, entry, entry.item, spec_path))
        elif isinstance(entry, BlockedFilter) and entry.item is None:
            assert entry.user is not None
            users = _without_keys(users, score.user.key, _keys(context, entry, entry.user, spec_path))
    return FilteredSides(users, items, tuple(pairs))


def _filtered(side: DataFrame, constants: dict[str, Column], expression: str) -> DataFrame:
    return side.withColumns(constants).where(F.coalesce(F.expr(expression), F.lit(False))).drop(*constants)


def _keys(context: CandidateContext, entry: BlockedFilter, column: str, spec_path: str) -> DataFrame:
    return read_table(context, entry, [column], spec_path).select(col(column).alias("__blocked_key"))


def _without_keys(side: DataFrame, key: str, keys: DataFrame) -> DataFrame:
    type_ = dict(side.dtypes)[key]
    return side.join(keys, col(key) == F.col("__blocked_key").try_cast(type_), "left_anti")


def constant_columns(context: CandidateContext) -> dict[str, Column]:
    """Return `score.context` as columns."""
    spec, score = context.ctx.spec, context.score
    types = {c.name: str(declared(c)) for c in prepared_columns(spec)}
    return {n: F.lit(v.as_py()).cast(types[n]) for n, v in context_scalars(spec, score).items()}


def blocked_pairs(context: CandidateContext) -> DataFrame | None:
    """Return distinct (USER, ITEM_ROW) that users have seen or bought or that tables block; None without such a filter.

    Args:
        context: of the run, with the items that pass `filter_sides`.
    """
    score = context.score
    entries = [(f"score.filters[{i}]", entry) for i, entry in enumerate(score.filters)]
    if score.exclude_seen:
        expression = "true" if score.exclude_seen == "any_label" else None
        entries.append(("score.exclude_seen", SeenFilter(where=expression)))
    pairs = []
    for spec_path, entry in entries:
        if isinstance(entry, SeenFilter):
            pairs.append(pairs_of(context, entry, spec_path).select(USER, ITEM_ROW))
        elif isinstance(entry, BlockedFilter) and entry.user is not None and entry.item is not None:
            pairs.append(_listed_pairs(context, entry, score, spec_path))
    return reduce(DataFrame.unionByName, pairs).distinct() if pairs else None


def _listed_pairs(context: CandidateContext, entry: BlockedFilter, score: Score, spec_path: str) -> DataFrame:
    assert entry.user is not None
    assert entry.item is not None
    rows = read_table(context, entry, [entry.user, entry.item], spec_path)
    types = dict(context.users.dtypes) | dict(context.items.dtypes)
    user, item = col(entry.user).try_cast(types[score.user.key]), col(entry.item).try_cast(types[score.item.key])
    keys = context.items.select(col(score.item.key).alias("__item"), F.col(ITEM_ROW))
    pairs = rows.select(user.alias(USER), item.alias("__item")).distinct().join(keys, "__item")
    return pairs.where(F.col(USER).isNotNull()).select(USER, ITEM_ROW)


def meeting_conditions(
    context: CandidateContext, pairs: DataFrame, conditions: tuple[tuple[str, str], ...]
) -> DataFrame:
    """Return the pairs for which all conditions are true, with their columns.

    Args:
        context: of the run.
        pairs: the users' columns, ITEM_ROW, and perhaps others.
        conditions: of `filter_sides`.
    """
    columns, constants = pairs.columns, constant_columns(context)
    wide = pairs.join(context.items, ITEM_ROW).withColumns(constants)
    true = [condition(wide, expression, spec_path) for spec_path, expression in conditions]
    return wide.where(reduce(Column.__and__, true)).select(*[col(c) for c in columns])


log = logging.getLogger("headrace.score")

#: Column: True if the user has no events.
IS_NEW = "__is_new"
#: First-round limit of a source, as a multiple of k. Users with more blocked items are served in a further round, so
#: that a few of them do not enlarge everybody's lists.
_FIRST_ROUND_FACTOR = 4
#: Factor by which the next round asks for more, if conditions remove an unknown number of items.
_NEXT_ROUND_FACTOR = 4


@dataclass
class FetchFacts:
    """Figures of fetching from one source."""

    #: For each round: the users for whom items were fetched, and those who still lack items that the source may have.
    rounds: list[dict[str, int]] = field(default_factory=list)
    #: Items that the source returned, and those of them that filters removed.
    items: int = 0
    filtered: int = 0


@dataclass(frozen=True)
class SourceRequest:
    """A source of candidates with its settings and its order of items."""

    name: str
    source: CandidateSource
    ranking: ItemRanking

    def serves(self) -> Column:
        """Return a boolean column: the source serves the user."""
        if self.source.users == "all":
            return F.lit(True)
        return F.col(IS_NEW) if self.source.users == "new" else ~F.col(IS_NEW)


class CandidateFetcher:
    """Fetches the items of all sources for all users."""

    def __init__(
        self,
        context: CandidateContext,
        requests: Sequence[SourceRequest],
        conditions: tuple[tuple[str, str], ...],
        n_items: int,
    ) -> None:
        """Take the run's sources and conditions.

        Args:
            context: of the run, with the users and items of `filter_sides`.
            requests: the sources.
            conditions: conditions on pairs of a user and an item.
            n_items: number of items in the context.
        """
        self._context, self._requests, self._conditions, self._n_items = context, requests, conditions, n_items
        self._rounds = 0
        self.facts: Mapping[str, FetchFacts] = {r.name: FetchFacts() for r in requests}

    def run(self, users: DataFrame) -> DataFrame:
        """Return the users with a column of items for each source, `list_column(i)`: at most k that pass the filters.

        Args:
            users: the context's users, with the columns BLOCKED and IS_NEW.
        """
        limits = {
            i: min(_FIRST_ROUND_FACTOR * request.source.k, self._n_items) for i, request in enumerate(self._requests)
        }
        fetches = {
            i: F.when(request.serves(), F.least(self._sufficient(i), F.lit(limits[i]))).otherwise(0)
            for i, request in enumerate(self._requests)
        }
        frame, done = users, []
        while True:
            frame = self._persist(self._meet_conditions(self._fetch_round(frame, fetches, limits), list(limits)))
            limits = self._count(frame, list(limits))
            if not limits:
                break
            lacks = reduce(Column.__or__, [self._lacks(i) for i in limits])
            done.append(frame.where(~lacks))
            frame = frame.where(lacks)
            fetches = {i: F.when(self._lacks(i), self._next_fetch(i)).otherwise(0) for i in limits}
        frame = reduce(DataFrame.unionByName, [*done, frame])
        cut = {list_column(i): F.slice(list_column(i), 1, request.source.k) for i, request in enumerate(self._requests)}
        columns = [c for c in users.columns if c not in (BLOCKED, IS_NEW)]
        return frame.select(*[col(c) for c in columns], *[x.alias(name) for name, x in cut.items()])

    def _fetch_round(self, users: DataFrame, fetches: Mapping[int, Column], limits: Mapping[int, int]) -> DataFrame:
        """Run a round: fetch items that are not blocked. Other sources and users keep their lists."""
        # All sources' limits are computed before the first source changes the columns that they read.
        users = users.withColumns({_round_column(i): fetch for i, fetch in fetches.items()})
        for i, limit in limits.items():
            with_items = self._requests[i].ranking.first(users.withColumn(FETCH, F.col(_round_column(i))), limit)
            columns = {
                list_column(i): F.array_except(ITEMS, BLOCKED),
                _fetch_column(i): F.col(FETCH),
                _returned_column(i): F.size(ITEMS),
            }
            existing = set(users.columns)
            is_fetched = F.col(FETCH) > 0
            users = with_items.withColumns(
                {c: F.when(is_fetched, x).otherwise(F.col(c)) if c in existing else x for c, x in columns.items()}
            ).drop(ITEMS, FETCH)
        return users

    def _sufficient(self, i: int) -> Column:
        """Return the number of items of a source among which at least k are not blocked."""
        k = F.lit(self._requests[i].source.k)
        return k if getattr(self._requests[i].ranking, "leaves_out_blocked", False) else k + F.size(BLOCKED)

    def _next_fetch(self, i: int) -> Column:
        """Return the number of items to fetch in the next round; it suffices if no condition removes items."""
        needed = self._sufficient(i)
        if self._conditions:
            needed = F.greatest(needed, F.col(_fetch_column(i)) * _NEXT_ROUND_FACTOR)
        return F.least(needed, F.lit(self._n_items))

    def _meet_conditions(self, frame: DataFrame, sources: Sequence[int]) -> DataFrame:
        """Return the round's lists without items whose pairs fail a condition; each pair is evaluated once."""
        if not self._conditions:
            return frame
        frame, context = self._persist(frame), self._context
        none = F.array().cast("array<int>")
        new = {i: F.when(F.col(_round_column(i)) > 0, F.col(list_column(i))).otherwise(none) for i in sources}
        distinct_items = F.array_distinct(F.flatten(F.array(*new.values())))
        pairs = frame.select(*[col(c) for c in context.users.columns], F.explode(distinct_items).alias(ITEM_ROW))
        passing = meeting_conditions(context, pairs, self._conditions).groupBy(
            col(context.user_key).alias("__pair_user")
        )
        frame = frame.join(
            passing.agg(F.collect_list(ITEM_ROW).alias("__passing_items")),
            col(context.user_key) == F.col("__pair_user"),
            "left",
        )
        lists = {
            list_column(i): F.when(
                F.col(_round_column(i)) > 0, F.array_intersect(list_column(i), F.coalesce("__passing_items", none))
            ).otherwise(F.col(list_column(i)))
            for i in sources
        }
        return frame.withColumns(lists).drop("__pair_user", "__passing_items")

    def _lacks(self, i: int) -> Column:
        """Return a boolean column: the user has fewer than k items of a source that may have more."""
        fetched, k = F.col(_fetch_column(i)), self._requests[i].source.k
        may_have_more = (F.col(_returned_column(i)) >= fetched) & (fetched < self._n_items) & (fetched > 0)
        return (F.size(list_column(i)) < k) & may_have_more

    def _count(self, frame: DataFrame, sources: Sequence[int]) -> dict[int, int]:
        """Return the sources of which users lack items, with the largest number that one of them needs next."""
        sums: list[Column] = []
        for i in sources:
            is_fetched, returned = F.col(_round_column(i)) > 0, F.col(_returned_column(i))
            counted = (F.lit(1), self._lacks(i).cast("long"), returned, returned - F.size(list_column(i)))
            sums += [F.sum(F.when(is_fetched, x)) for x in counted]
            sums.append(F.max(F.when(self._lacks(i), self._next_fetch(i))))
        row = [int(x or 0) for x in frame.agg(*[s.alias(str(n)) for n, s in enumerate(sums)]).collect()[0]]
        limits = {}
        for n, i in enumerate(sources):
            users, lacking_users, fetched, filtered, next_limit = row[5 * n : 5 * n + 5]
            facts = self.facts[self._requests[i].name]
            facts.rounds.append({"users": users, "lacking": lacking_users})
            facts.items, facts.filtered = facts.items + fetched, facts.filtered + filtered
            if lacking_users:
                limits[i] = next_limit
                name = self._requests[i].name
                log.info(
                    "score: source '%s': %s users are asked for up to %s items",
                    name,
                    f"{lacking_users:,}",
                    f"{next_limit:,}",
                )
        return limits

    def _persist(self, frame: DataFrame) -> DataFrame:
        self._rounds += 1
        return self._context.keep(("round", self._rounds), lambda: frame)


def list_column(i: int) -> str:
    """Return the name of the column of source i's items."""
    return f"__list_{i}"


def _fetch_column(i: int) -> str:
    return f"__fetch_{i}"


def _round_column(i: int) -> str:
    return f"__round_{i}"


def _returned_column(i: int) -> str:
    return f"__returned_{i}"


def facts_of(fetched: Mapping[str, FetchFacts]) -> dict[str, dict[str, Any]]:
    """Return the figures of sources for the manifest."""
    return {name: {"fetched": f.items, "filtered": f.filtered, "rounds": f.rounds} for name, f in fetched.items()}
