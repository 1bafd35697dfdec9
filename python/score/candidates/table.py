"""Items that a table lists; and tables of candidates and filters, read as the run has pinned them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.config import BlockedFilter, CandidateTable, Score
from headrace.errors import UserError, nearest
from headrace.features.functions.spark_expressions import col
from headrace.features.table_ops.base import ExternalTable, SourceRead
from headrace.score.candidates.lists import LIST, cut, lists_of, with_own_lists, with_shared_lists
from headrace.score.candidates.source import FETCH, SourceContext
from headrace.score.items import ITEM_ROW
from headrace.score.rank.blocks import ITEMS

_ORDER, _USER = "__order", "__user"


class ListedItems:
    """A table's items for each user, for the users of a segment, or for all."""

    def __init__(self, context: SourceContext, source: CandidateTable, where: str) -> None:
        """Raises UserError where the table lacks a column."""
        self._context, self._source = context, source
        score = context.score
        item = source.item or score.item.key
        columns = [item, *([source.user] if source.user else []), *source.by, *([source.order] if source.order else [])]
        rows = read_table(context, source, columns, where)
        types = dict(context.users.dtypes) | dict(context.items.dtypes)
        for c in source.by:  # null is a segment of its own: what is none of the column's type is not in it
            rows = rows.where(col(c).isNull() | col(c).try_cast(types[c]).isNotNull())
        segment = [col(c).try_cast(types[c]).alias(c) for c in source.by]
        if source.user is not None:
            segment = [col(source.user).try_cast(types[score.user.key]).alias(_USER)]
        self._segment = (_USER,) if source.user is not None else source.by
        order = col(source.order) if source.order else F.lit(0)
        found = rows.select(*segment, col(item).try_cast(types[score.item.key]).alias("__item"), order.alias(_ORDER))
        keys = context.items.select(col(score.item.key).alias("__item"), F.col(ITEM_ROW))
        best = F.max(_ORDER) if source.descending else F.min(_ORDER)
        found = found.join(keys, "__item").groupBy(*[col(c) for c in self._segment], ITEM_ROW).agg(best.alias(_ORDER))
        self._rows = context.keep((where, "rows"), lambda: found)

    def first(self, users: DataFrame, most: int) -> DataFrame:
        """See ItemRanking."""
        first: Column = F.desc_nulls_last(_ORDER) if self._source.descending else F.asc_nulls_last(_ORDER)
        lists, key = lists_of(self._rows, self._segment, (first, F.asc(ITEM_ROW)), most), self._context.user_key
        if self._source.user is not None:
            listed = with_own_lists(users, key, lists, _USER)
        else:
            listed = with_shared_lists(users, key, lists, self._segment)
        return listed.withColumn(ITEMS, cut(F.col(LIST), F.col(FETCH))).drop(LIST)


def read_table(
    context: SourceContext, table: CandidateTable | BlockedFilter, columns: Sequence[str], where: str
) -> DataFrame:
    """The rows of a table that a source or a filter names.

    Raises:
        UserError: it is not there, or lacks a column, with the nearest.
    """
    if table.from_ is not None:
        rows = context.active.sources(SourceRead(table.from_, "newest"))
        what = f"source '{table.from_}'"
    else:
        (external,) = tables_of(table)
        rows, what = context.reader.load(context.spark, external), f"table {table.path}"
    for column in columns:
        if column not in rows.columns:
            known = [c for c in rows.columns if not c.startswith("_")]
            raise UserError(
                f"{where}: {what} has no column '{column}'{nearest(column, known)} (there are: {', '.join(known)})"
            )
    return rows


def tables_of(*entries: object) -> tuple[ExternalTable, ...]:
    """The tables that sources and filters name by their paths."""
    found = (e for e in entries if isinstance(e, (CandidateTable, BlockedFilter)) and e.path is not None)
    return tuple(dict.fromkeys(ExternalTable(e.path or "", e.format, {}, "score") for e in found))


def tables_of_score(score: Score) -> tuple[ExternalTable, ...]:
    """All that candidates and filters read by their paths: to be pinned by the stage."""
    return tables_of(*_entries(score))


def _entries(score: Score) -> Iterator[object]:
    if score.candidates is not None:
        yield from score.candidates.sources.values()
    yield from score.filters
