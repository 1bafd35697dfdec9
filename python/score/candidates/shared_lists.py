"""Sources whose lists many users share: popular, recent, new and listed items.

A list that many users share is joined by hashes of the users, several copies of it: however many users a segment has,
they meet it in as many tasks as there are copies. Where all lists together are small, Spark broadcasts them by its own
rule (spark.sql.autoBroadcastJoinThreshold).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, reduce
from operator import and_

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from headrace.config import BlockedFilter, CandidateTable, NewItems, Popular, Recent, Score
from headrace.errors import UserError, nearest
from headrace.features.functions.spark_expressions import col
from headrace.features.table_ops.base import ExternalTable, SourceRead
from headrace.score.candidates.source import FETCH, USER, CandidateContext, pairs_of
from headrace.score.items import ITEM_ROW
from headrace.score.ranking import ITEMS

#: Column with the rows of a list's items.
LIST = "__list"
_COPY = "__copy"


def lists_of(ranked: DataFrame, segment: Sequence[str], order: Sequence[Column], limit: int) -> DataFrame:
    """Return (segment, LIST): for each segment the rows of its first items, array<int>.

    Args:
        ranked: the segment's columns, ITEM_ROW, and what `order` reads; an item once a segment.
        segment: columns; none: one list of all.
        order: best first; it must tell any two items apart.
        limit: most items of a list.
    """
    keys = [col(c) for c in segment]
    place = F.row_number().over(Window.partitionBy(*(keys or [one_group()])).orderBy(*order))
    first = ranked.select(*keys, F.col(ITEM_ROW), place.alias("__place")).where(F.col("__place") <= limit)
    entries = F.sort_array(F.collect_list(F.struct("__place", ITEM_ROW)))
    return first.groupBy(*keys).agg(F.transform(entries, lambda e: e[ITEM_ROW]).alias(LIST))


def with_shared_lists(users: DataFrame, user_key: str, lists: DataFrame, segment: Sequence[str]) -> DataFrame:
    """Return the users with LIST of their segment (null is a value like others); null where it has none.

    Args:
        users: the key and the segment's columns, which are kept with all others.
        user_key: spreads the users over the copies of a list.
        lists: of `lists_of`.
        segment: columns of both.
    """
    copies = users.sparkSession.sparkContext.defaultParallelism
    names = {c: f"__of_{i}" for i, c in enumerate(segment)}
    copied = lists.select(
        *[col(c).alias(n) for c, n in names.items()],
        F.col(LIST),
        F.explode(F.sequence(F.lit(0), F.lit(copies - 1))).alias("__of_copy"),
    )
    with_copy = users.withColumn(_COPY, F.pmod(F.hash(col(user_key)), F.lit(copies)))
    same = [F.col(_COPY) == F.col("__of_copy"), *(col(c).eqNullSafe(F.col(n)) for c, n in names.items())]
    return with_copy.join(copied, reduce(and_, same), "left").drop(_COPY, "__of_copy", *names.values())


def with_own_lists(users: DataFrame, user_key: str, lists: DataFrame, key: str) -> DataFrame:
    """Return the users with LIST of their own, null where they have none.

    Args:
        users: whose columns are kept.
        user_key: of users.
        lists: of `lists_of` by one column, the user's key.
        key: that column.
    """
    renamed = lists.select(col(key).alias("__of_user"), F.col(LIST))
    return users.join(renamed, col(user_key) == F.col("__of_user"), "left").drop("__of_user")


def cut(list_: Column, limit: Column) -> Column:
    """Return the first items of a list, `limit` of them; an empty one where it is null."""
    return F.coalesce(F.slice(list_, F.lit(1), limit), F.array().cast("array<int>"))


def one_group() -> Column:
    """Return a window's key that is equal for all rows: for a literal Spark warns that all rows are one task's."""
    return F.pmod(F.col(ITEM_ROW), F.lit(1))


_USERS = "__users"


class PopularItems:
    """Items by the number of users that had them: of the segment, then of all, then those that nobody had, by key.

    Users count, not events: what one user does a thousand times is one.
    """

    def __init__(self, context: CandidateContext, source: Popular, spec_path: str) -> None:
        self._context, self._source, self._spec_path = context, source, spec_path

    def first(self, users: DataFrame, limit: int) -> DataFrame:
        """See ItemRanking."""
        order = (F.desc(_USERS), F.asc(ITEM_ROW))
        key, by = self._context.user_key, self._source.by
        overall = with_shared_lists(users, key, lists_of(self._overall, (), order, limit), ())
        if not by:
            return overall.withColumn(ITEMS, cut(F.col(LIST), F.col(FETCH))).drop(LIST)
        overall = overall.withColumnRenamed(LIST, "__overall")
        listed = with_shared_lists(overall, key, lists_of(self._of_segments, by, order, limit), by)
        # The segment's list and the overall list together have FETCH different items, if there are that many.
        united = F.array_distinct(F.concat(cut(F.col(LIST), F.col(FETCH)), cut(F.col("__overall"), F.col(FETCH))))
        return listed.withColumn(ITEMS, cut(united, F.col(FETCH))).drop(LIST, "__overall")

    @cached_property
    def _pairs(self) -> DataFrame:
        return pairs_of(self._context, self._source, self._spec_path)

    @cached_property
    def _overall(self) -> DataFrame:
        counted = self._pairs.groupBy(ITEM_ROW).agg(F.count(F.lit(1)).alias(_USERS))
        # All items are ranked, so that each user gets a list.
        all_items = self._context.items.select(ITEM_ROW).join(counted, ITEM_ROW, "left")
        counts = all_items.select(ITEM_ROW, F.coalesce(_USERS, F.lit(0)).alias(_USERS))
        return self._context.keep((self._spec_path, "overall"), lambda: counts)

    @cached_property
    def _of_segments(self) -> DataFrame:
        columns = [col(c) for c in self._source.by]
        segments = self._context.users.select(col(self._context.user_key).alias(USER), *columns)
        counted = self._pairs.join(segments, USER).groupBy(*columns, ITEM_ROW)
        counts = counted.agg(F.count(F.lit(1)).alias(_USERS))
        return self._context.keep((self._spec_path, "segments"), lambda: counts)


_AGE, _CHUNK, _PLACE, _START = "__age", "__chunk", "__at", "__start"


class RecentItems:
    """All items, the greatest value of a column first, those without one last; of equal ones the lower key first."""

    def __init__(self, context: CandidateContext, source: Recent, spec_path: str) -> None:
        del spec_path
        self._context, self._column = context, source.column or "first_event"

    def first(self, users: DataFrame, limit: int) -> DataFrame:
        """See ItemRanking."""
        ranked = self._context.items.select(ITEM_ROW, col(self._column).alias(_AGE))
        lists = lists_of(ranked, (), (F.desc_nulls_last(_AGE), F.asc(ITEM_ROW)), limit)
        listed = with_shared_lists(users, self._context.user_key, lists, ())
        return listed.withColumn(ITEMS, cut(F.col(LIST), F.col(FETCH))).drop(LIST)


class UnseenItems:
    """Items with few events: in an order by a hash of their keys that each user enters at a place of its own.

    So each such item is given to about as many users as any other.
    """

    def __init__(self, context: CandidateContext, source: NewItems, spec_path: str) -> None:
        self._context, self._most_events, self._spec_path = context, source.max_events, spec_path

    def first(self, users: DataFrame, limit: int) -> DataFrame:
        """See ItemRanking."""
        n = self._count
        if n == 0:
            return users.withColumn(ITEMS, F.array().cast("array<int>"))
        # The order is a ring, cut into chunks. A chunk's list continues into the next chunk, so that a user's items
        # are all in the list of the chunk where the user begins.
        size = min(limit, n) or 1
        chunks = -(-n // size)
        place = F.explode(F.transform(F.sequence(F.lit(0), F.lit(2)), lambda lap: F.col(_PLACE) + lap * n))
        laps = self._ring.select(ITEM_ROW, place.alias(_PLACE))
        chunk = F.explode(
            F.transform(F.array(F.lit(0), F.lit(1)), lambda i: (F.floor(F.col(_PLACE) / size) - i).cast("int"))
        )
        chunked = laps.select(ITEM_ROW, _PLACE, chunk.alias(_CHUNK))
        chunked = chunked.where(F.col(_CHUNK).between(0, chunks - 1))
        lists = lists_of(chunked, (_CHUNK,), (F.asc(_PLACE),), 2 * size)
        start = F.pmod(F.xxhash64(F.lit("new items"), col(self._context.user_key)), F.lit(n))
        placed = users.withColumn(_START, start).withColumn(_CHUNK, F.floor(F.col(_START) / F.lit(size)).cast("int"))
        listed = with_shared_lists(placed, self._context.user_key, lists, (_CHUNK,))
        first_position = (F.col(_START) - F.col(_CHUNK).cast("bigint") * size + 1).cast("int")
        items = F.slice(F.col(LIST), first_position, F.least(F.col(FETCH), F.lit(n)))
        return listed.withColumn(ITEMS, items).drop(LIST, _CHUNK, _START)

    @cached_property
    def _ring(self) -> DataFrame:
        has_few_events = F.coalesce(F.col("events"), F.lit(0)) <= self._most_events
        key = F.xxhash64(col(self._context.score.item.key))
        place = F.row_number().over(Window.partitionBy(one_group()).orderBy(key, F.asc(ITEM_ROW))) - 1
        ring = self._context.items.where(has_few_events).select(ITEM_ROW, place.cast("bigint").alias(_PLACE))
        return self._context.keep((self._spec_path, "ring"), lambda: ring)

    @cached_property
    def _count(self) -> int:
        return self._ring.count()


_ORDER, _USER = "__order", "__user"


class ListedItems:
    """A table's items for each user, for the users of a segment, or for all."""

    def __init__(self, context: CandidateContext, source: CandidateTable, spec_path: str) -> None:
        """Open the source's table. Raises UserError where it lacks a column."""
        self._context, self._source = context, source
        score = context.score
        item = source.item or score.item.key
        columns = [item, *([source.user] if source.user else []), *source.by, *([source.order] if source.order else [])]
        rows = read_table(context, source, columns, spec_path)
        types = dict(context.users.dtypes) | dict(context.items.dtypes)
        for c in source.by:  # null is a segment of its own, which values of another type must not join
            rows = rows.where(col(c).isNull() | col(c).try_cast(types[c]).isNotNull())
        segment = [col(c).try_cast(types[c]).alias(c) for c in source.by]
        if source.user is not None:
            segment = [col(source.user).try_cast(types[score.user.key]).alias(_USER)]
        self._segment = (_USER,) if source.user is not None else source.by
        order = col(source.order) if source.order else F.lit(0)
        listed = rows.select(*segment, col(item).try_cast(types[score.item.key]).alias("__item"), order.alias(_ORDER))
        keys = context.items.select(col(score.item.key).alias("__item"), F.col(ITEM_ROW))
        best = F.max(_ORDER) if source.descending else F.min(_ORDER)
        listed = listed.join(keys, "__item").groupBy(*[col(c) for c in self._segment], ITEM_ROW).agg(best.alias(_ORDER))
        self._rows = context.keep((spec_path, "rows"), lambda: listed)

    def first(self, users: DataFrame, limit: int) -> DataFrame:
        """See ItemRanking."""
        first: Column = F.desc_nulls_last(_ORDER) if self._source.descending else F.asc_nulls_last(_ORDER)
        lists, key = lists_of(self._rows, self._segment, (first, F.asc(ITEM_ROW)), limit), self._context.user_key
        if self._source.user is not None:
            listed = with_own_lists(users, key, lists, _USER)
        else:
            listed = with_shared_lists(users, key, lists, self._segment)
        return listed.withColumn(ITEMS, cut(F.col(LIST), F.col(FETCH))).drop(LIST)


def read_table(
    context: CandidateContext, table: CandidateTable | BlockedFilter, columns: Sequence[str], spec_path: str
) -> DataFrame:
    """Return the rows of a table that a source or a filter names.

    Raises:
        UserError: it is not there, or lacks a column, with the nearest.
    """
    if table.from_ is not None:
        rows = context.active.sources(SourceRead(table.from_, "newest"))
        table_name = f"source '{table.from_}'"
    else:
        (external,) = tables_of(table)
        rows, table_name = context.reader.load(context.spark, external), f"table {table.path}"
    for column in columns:
        if column not in rows.columns:
            known = [c for c in rows.columns if not c.startswith("_")]
            raise UserError(
                f"{spec_path}: {table_name} has no column '{column}'{nearest(column, known)} "
                f"(there are: {', '.join(known)})"
            )
    return rows


def tables_of(*entries: object) -> tuple[ExternalTable, ...]:
    """Return the tables that sources and filters name by their paths."""
    named = (e for e in entries if isinstance(e, (CandidateTable, BlockedFilter)) and e.path is not None)
    return tuple(dict.fromkeys(ExternalTable(e.path or "", e.format, {}, "score") for e in named))


def tables_of_score(score: Score) -> tuple[ExternalTable, ...]:
    """Return all tables that candidates and filters read by their paths, which the stage pins."""
    return tables_of(*_entries(score))


def _entries(score: Score) -> Iterator[object]:
    if score.candidates is not None:
        yield from score.candidates.sources.values()
    yield from score.filters
