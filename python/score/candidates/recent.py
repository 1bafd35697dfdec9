"""The newest items, and those that nobody has met."""

from __future__ import annotations

from functools import cached_property

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from headrace.config import NewItems, Recent
from headrace.features.functions.spark_expressions import col
from headrace.score.candidates.lists import LIST, cut, lists_of, one_group, with_shared_lists
from headrace.score.candidates.source import FETCH, SourceContext
from headrace.score.items import ITEM_ROW
from headrace.score.rank.blocks import ITEMS

_AGE, _CHUNK, _PLACE, _START = "__age", "__chunk", "__at", "__start"


class RecentItems:
    """All items, the greatest value of a column first, those without one last; of equal ones the lower key first."""

    def __init__(self, context: SourceContext, source: Recent, where: str) -> None:
        del where
        self._context, self._column = context, source.column or "first_event"

    def first(self, users: DataFrame, most: int) -> DataFrame:
        """See ItemRanking."""
        ranked = self._context.items.select(ITEM_ROW, col(self._column).alias(_AGE))
        lists = lists_of(ranked, (), (F.desc_nulls_last(_AGE), F.asc(ITEM_ROW)), most)
        listed = with_shared_lists(users, self._context.user_key, lists, ())
        return listed.withColumn(ITEMS, cut(F.col(LIST), F.col(FETCH))).drop(LIST)


class UnseenItems:
    """Items with few events: in an order by a hash of their keys that each user enters at a place of its own.

    So each such item is given to about as many users as any other.
    """

    def __init__(self, context: SourceContext, source: NewItems, where: str) -> None:
        self._context, self._most_events, self._where = context, source.max_events, where

    def first(self, users: DataFrame, most: int) -> DataFrame:
        """See ItemRanking."""
        n = self._count
        if n == 0:
            return users.withColumn(ITEMS, F.array().cast("array<int>"))
        # The order is a ring, cut into chunks; each goes on into the next for as much as is wanted, so that what a user
        # is given is within the list of the chunk where it begins.
        size = min(most, n) or 1
        chunks = -(-n // size)
        place = F.explode(F.transform(F.sequence(F.lit(0), F.lit(2)), lambda turn: F.col(_PLACE) + turn * n))
        turned = self._ring.select(ITEM_ROW, place.alias(_PLACE))
        chunk = F.explode(
            F.transform(F.array(F.lit(0), F.lit(1)), lambda i: (F.floor(F.col(_PLACE) / size) - i).cast("int"))
        )
        spread = turned.select(ITEM_ROW, _PLACE, chunk.alias(_CHUNK))
        spread = spread.where(F.col(_CHUNK).between(0, chunks - 1))
        lists = lists_of(spread, (_CHUNK,), (F.asc(_PLACE),), 2 * size)
        start = F.pmod(F.xxhash64(F.lit("new items"), col(self._context.user_key)), F.lit(n))
        placed = users.withColumn(_START, start).withColumn(_CHUNK, F.floor(F.col(_START) / F.lit(size)).cast("int"))
        listed = with_shared_lists(placed, self._context.user_key, lists, (_CHUNK,))
        within = (F.col(_START) - F.col(_CHUNK).cast("bigint") * size + 1).cast("int")
        items = F.slice(F.col(LIST), within, F.least(F.col(FETCH), F.lit(n)))
        return listed.withColumn(ITEMS, items).drop(LIST, _CHUNK, _START)

    @cached_property
    def _ring(self) -> DataFrame:
        few = F.coalesce(F.col("events"), F.lit(0)) <= self._most_events
        key = F.xxhash64(col(self._context.score.item.key))
        place = F.row_number().over(Window.partitionBy(one_group()).orderBy(key, F.asc(ITEM_ROW))) - 1
        ring = self._context.items.where(few).select(ITEM_ROW, place.cast("bigint").alias(_PLACE))
        return self._context.keep((self._where, "ring"), lambda: ring)

    @cached_property
    def _count(self) -> int:
        return self._ring.count()
