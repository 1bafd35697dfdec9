"""What most users had, of a user's segment first."""

from __future__ import annotations

from functools import cached_property

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace.config import Popular
from headrace.features.functions.spark_expressions import col
from headrace.score.candidates.lists import LIST, cut, lists_of, with_shared_lists
from headrace.score.candidates.pair_events import USER, pairs_of
from headrace.score.candidates.source import FETCH, SourceContext
from headrace.score.items import ITEM_ROW
from headrace.score.rank.blocks import ITEMS

_USERS = "__users"


class PopularItems:
    """Items by the number of users that had them: of the segment, then of all, then those that nobody had, by key.

    Users count, not events: what one user does a thousand times is one.
    """

    def __init__(self, context: SourceContext, source: Popular, where: str) -> None:
        self._context, self._source, self._where = context, source, where

    def first(self, users: DataFrame, most: int) -> DataFrame:
        """See ItemRanking."""
        order = (F.desc(_USERS), F.asc(ITEM_ROW))
        key, by = self._context.user_key, self._source.by
        overall = with_shared_lists(users, key, lists_of(self._overall, (), order, most), ())
        if not by:
            return overall.withColumn(ITEMS, cut(F.col(LIST), F.col(FETCH))).drop(LIST)
        overall = overall.withColumnRenamed(LIST, "__overall")
        both = with_shared_lists(overall, key, lists_of(self._of_segments, by, order, most), by)
        # A segment's list and the first FETCH of all have FETCH different items between them, where there are so many.
        united = F.array_distinct(F.concat(cut(F.col(LIST), F.col(FETCH)), cut(F.col("__overall"), F.col(FETCH))))
        return both.withColumn(ITEMS, cut(united, F.col(FETCH))).drop(LIST, "__overall")

    @cached_property
    def _pairs(self) -> DataFrame:
        return pairs_of(self._context, self._source, self._where)

    @cached_property
    def _overall(self) -> DataFrame:
        counted = self._pairs.groupBy(ITEM_ROW).agg(F.count(F.lit(1)).alias(_USERS))
        # All items are ranked, so that nobody is left without.
        every = self._context.items.select(ITEM_ROW).join(counted, ITEM_ROW, "left")
        counts = every.select(ITEM_ROW, F.coalesce(_USERS, F.lit(0)).alias(_USERS))
        return self._context.keep((self._where, "overall"), lambda: counts)

    @cached_property
    def _of_segments(self) -> DataFrame:
        columns = [col(c) for c in self._source.by]
        segments = self._context.users.select(col(self._context.user_key).alias(USER), *columns)
        counted = self._pairs.join(segments, USER).groupBy(*columns, ITEM_ROW)
        counts = counted.agg(F.count(F.lit(1)).alias(_USERS))
        return self._context.keep((self._where, "segments"), lambda: counts)
