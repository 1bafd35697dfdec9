"""Asking sources for enough: as many items as are left when the filters have gone over them.

A source gives each user the first items of its order, and filters leave some of them out. So a source is asked for k
items, and as many more as are blocked for the user if it does not leave these out itself; where that is not enough, for
more, in rounds, for those users alone who have fewer than k although the source has more. At the end each user has k
items of a source, or all that the filters leave of it: the rounds end when a count of the others is 0.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.config import CandidateSource
from headrace.features.functions.spark_expressions import col
from headrace.score.candidates.filters import of_conditions
from headrace.score.candidates.source import BLOCKED, FETCH, ItemRanking, SourceContext
from headrace.score.items import ITEM_ROW
from headrace.score.rank.blocks import ITEMS

log = logging.getLogger("headrace.score")

#: boolean: whether the user has no events.
IS_NEW = "__is_new"
#: The most that most users are asked for at once, by k: users of whose items more are blocked are asked in a round of
#: their own.
_FIRST = 4
#: How many times as many a user is asked for in the next round, where conditions leave out nobody knows how many.
_MORE = 4


@dataclass
class Fetched:
    """What came of a source."""

    #: Users by round: how many were asked, and how many then had fewer than k though the source had more.
    rounds: list[dict[str, int]] = field(default_factory=list)
    #: Items that it gave, and those of them that filters left out.
    items: int = 0
    filtered: int = 0


@dataclass(frozen=True)
class Asked:
    """A source and what is wanted of it."""

    name: str
    source: CandidateSource
    ranking: ItemRanking

    def serves(self) -> Column:
        """Whether it serves a user."""
        if self.source.users == "all":
            return F.lit(True)
        return F.col(IS_NEW) if self.source.users == "new" else ~F.col(IS_NEW)


class Fetching:
    """Fetches the items of all sources for all users."""

    def __init__(
        self, context: SourceContext, asked: Sequence[Asked], conditions: tuple[tuple[str, str], ...], n_items: int
    ) -> None:
        """Args:
        context: of the run; users and items after `filter_sides`.
        asked: the sources.
        conditions: on pairs.
        n_items: of the context.
        """
        self._context, self._asked, self._conditions, self._n_items = context, asked, conditions, n_items
        self._kept = 0
        self.facts: Mapping[str, Fetched] = {a.name: Fetched() for a in asked}

    def run(self, users: DataFrame) -> DataFrame:
        """The users with a column of items for each source, `list_column(i)`: allowed ones, k at most.

        Args:
            users: the context's, with BLOCKED and IS_NEW.
        """
        most = {i: min(_FIRST * a.source.k, self._n_items) for i, a in enumerate(self._asked)}
        fetches = {
            i: F.when(a.serves(), F.least(self._needed(i), F.lit(most[i]))).otherwise(0)
            for i, a in enumerate(self._asked)
        }
        frame, done = users, []
        while True:
            frame = self._keep(self._meet_conditions(self._ask(frame, fetches, most), list(most)))
            most = self._count(frame, list(most))
            if not most:
                break
            lacks = reduce(Column.__or__, [self._lacks(i) for i in most])
            done.append(frame.where(~lacks))
            frame = frame.where(lacks)
            fetches = {i: F.when(self._lacks(i), self._more(i)).otherwise(0) for i in most}
        frame = reduce(DataFrame.unionByName, [*done, frame])
        cut = {list_column(i): F.slice(list_column(i), 1, a.source.k) for i, a in enumerate(self._asked)}
        kept = [c for c in users.columns if c not in (BLOCKED, IS_NEW)]
        return frame.select(*[col(c) for c in kept], *[x.alias(name) for name, x in cut.items()])

    def _ask(self, users: DataFrame, fetches: Mapping[int, Column], most: Mapping[int, int]) -> DataFrame:
        """A round: the items of some sources that are not blocked; what others, and users not asked for, have stays."""
        # How many are wanted is said by what is known before any source has answered.
        users = users.withColumns({_now_column(i): fetch for i, fetch in fetches.items()})
        for i, limit in most.items():
            given = self._asked[i].ranking.first(users.withColumn(FETCH, F.col(_now_column(i))), limit)
            found = {
                list_column(i): F.array_except(ITEMS, BLOCKED),
                _asked_column(i): F.col(FETCH),
                _came_column(i): F.size(ITEMS),
            }
            before = set(users.columns)
            asked = F.col(FETCH) > 0
            users = given.withColumns(
                {c: F.when(asked, x).otherwise(F.col(c)) if c in before else x for c, x in found.items()}
            ).drop(ITEMS, FETCH)
        return users

    def _needed(self, i: int) -> Column:
        """Items of a source among which k are not blocked."""
        k = F.lit(self._asked[i].source.k)
        return k if getattr(self._asked[i].ranking, "leaves_out_blocked", False) else k + F.size(BLOCKED)

    def _more(self, i: int) -> Column:
        """How many to ask for in the next round: enough where nothing but BLOCKED leaves items out."""
        needed = self._needed(i)
        if self._conditions:
            needed = F.greatest(needed, F.col(_asked_column(i)) * _MORE)
        return F.least(needed, F.lit(self._n_items))

    def _meet_conditions(self, frame: DataFrame, sources: Sequence[int]) -> DataFrame:
        """The round's lists without the items of pairs for which a condition does not hold; looks at each pair once."""
        if not self._conditions:
            return frame
        frame, context = self._keep(frame), self._context
        none = F.array().cast("array<int>")
        new = {i: F.when(F.col(_now_column(i)) > 0, F.col(list_column(i))).otherwise(none) for i in sources}
        every = F.array_distinct(F.flatten(F.array(*new.values())))
        pairs = frame.select(*[col(c) for c in context.users.columns], F.explode(every).alias(ITEM_ROW))
        held = of_conditions(context, pairs, self._conditions).groupBy(col(context.user_key).alias("__of"))
        frame = frame.join(
            held.agg(F.collect_list(ITEM_ROW).alias("__held")), col(context.user_key) == F.col("__of"), "left"
        )
        lists = {
            list_column(i): F.when(
                F.col(_now_column(i)) > 0, F.array_intersect(list_column(i), F.coalesce("__held", none))
            ).otherwise(F.col(list_column(i)))
            for i in sources
        }
        return frame.withColumns(lists).drop("__of", "__held")

    def _lacks(self, i: int) -> Column:
        """Whether a user has fewer than k items of a source that may have more."""
        asked, k = F.col(_asked_column(i)), self._asked[i].source.k
        more = (F.col(_came_column(i)) >= asked) & (asked < self._n_items) & (asked > 0)
        return (F.size(list_column(i)) < k) & more

    def _count(self, frame: DataFrame, sources: Sequence[int]) -> dict[int, int]:
        """The sources that users lack items of, with the most that one of these users is to be asked for next."""
        sums: list[Column] = []
        for i in sources:
            now, came = F.col(_now_column(i)) > 0, F.col(_came_column(i))
            counted = (F.lit(1), self._lacks(i).cast("long"), came, came - F.size(list_column(i)))
            sums += [F.sum(F.when(now, x)) for x in counted]
            sums.append(F.max(F.when(self._lacks(i), self._more(i))))
        row = [int(x or 0) for x in frame.agg(*[s.alias(str(n)) for n, s in enumerate(sums)]).collect()[0]]
        most = {}
        for n, i in enumerate(sources):
            users, lacking, fetched, filtered, more = row[5 * n : 5 * n + 5]
            facts = self.facts[self._asked[i].name]
            facts.rounds.append({"users": users, "lacking": lacking})
            facts.items, facts.filtered = facts.items + fetched, facts.filtered + filtered
            if lacking:
                most[i] = more
                name = self._asked[i].name
                log.info("score: source '%s': %s users are asked for up to %s items", name, f"{lacking:,}", f"{more:,}")
        return most

    def _keep(self, frame: DataFrame) -> DataFrame:
        self._kept += 1
        return self._context.keep(("round", self._kept), lambda: frame)


def list_column(i: int) -> str:
    """The column of the items of source i."""
    return f"__list_{i}"


def _asked_column(i: int) -> str:
    return f"__asked_{i}"


def _now_column(i: int) -> str:
    return f"__now_{i}"


def _came_column(i: int) -> str:
    return f"__came_{i}"


def facts_of(fetched: Mapping[str, Fetched]) -> dict[str, dict[str, Any]]:
    """For the manifest."""
    return {name: {"fetched": f.items, "filtered": f.filtered, "rounds": f.rounds} for name, f in fetched.items()}
