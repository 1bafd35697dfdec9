"""What a candidate may not be: items and users that go at once, pairs that are known, and conditions on pairs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.config import BlockedFilter, Score, SeenFilter, WhereFilter
from headrace.errors import UserError
from headrace.features.functions.spark_expressions import col
from headrace.features.table_ops.preparation import prepared_columns
from headrace.features.types import declared
from headrace.score.candidates.expressions import condition, fault_of
from headrace.score.candidates.pair_events import USER, pairs_of
from headrace.score.candidates.source import SourceContext
from headrace.score.candidates.table import read_table
from headrace.score.items import ITEM_ROW
from headrace.score.rank.pair_features import context_scalars


@dataclass(frozen=True)
class Sides:
    """Users and items without those that filters leave out whole, and the conditions that need both."""

    users: DataFrame
    items: DataFrame
    #: (place in the spec, expression)
    pairs: tuple[tuple[str, str], ...]


def filter_sides(context: SourceContext) -> Sides:
    """Apply the filters that look at users alone, or at items alone.

    Raises:
        UserError: an expression is none of the pairs' columns, or a table lacks a column.
    """
    users, items, score = context.users, context.items, context.score
    constants = constant_columns(context)
    pairs: list[tuple[str, str]] = []
    for i, entry in enumerate(score.filters):
        where = f"score.filters[{i}]"
        if isinstance(entry, WhereFilter):
            # Which side an expression is of, Spark says: it can be analysed with that side's columns alone.
            if fault_of(users.withColumns(constants), entry.where) is None:
                users = _where(users, constants, entry.where)
            elif fault_of(items.withColumns(constants), entry.where) is None:
                items = _where(items, constants, entry.where)
            elif (fault := fault_of(users.crossJoin(items).withColumns(constants), entry.where)) is not None:
                raise UserError(f"{where}.where: {fault}")
            else:
                pairs.append((f"{where}.where", entry.where))
        elif isinstance(entry, BlockedFilter) and entry.user is None:
            assert entry.item is not None
            items = _without(items, score.item.key, _keys(context, entry, entry.item, where))
        elif isinstance(entry, BlockedFilter) and entry.item is None:
            assert entry.user is not None
            users = _without(users, score.user.key, _keys(context, entry, entry.user, where))
    return Sides(users, items, tuple(pairs))


def _where(side: DataFrame, constants: dict[str, Column], expression: str) -> DataFrame:
    return side.withColumns(constants).where(F.coalesce(F.expr(expression), F.lit(False))).drop(*constants)


def _keys(context: SourceContext, entry: BlockedFilter, column: str, where: str) -> DataFrame:
    return read_table(context, entry, [column], where).select(col(column).alias("__blocked_key"))


def _without(side: DataFrame, key: str, keys: DataFrame) -> DataFrame:
    type_ = dict(side.dtypes)[key]
    return side.join(keys, col(key) == F.col("__blocked_key").try_cast(type_), "left_anti")


def constant_columns(context: SourceContext) -> dict[str, Column]:
    """`score.context` as columns."""
    spec, score = context.ctx.spec, context.score
    types = {c.name: str(declared(c)) for c in prepared_columns(spec)}
    return {n: F.lit(v.as_py()).cast(types[n]) for n, v in context_scalars(spec, score).items()}


def blocked_pairs(context: SourceContext) -> DataFrame | None:
    """(USER, ITEM_ROW), distinct: what users have seen or bought, and what tables block for them; None: no such filter.

    Args:
        context: whose items are those that are left.
    """
    score = context.score
    entries = [(f"score.filters[{i}]", entry) for i, entry in enumerate(score.filters)]
    if score.exclude_seen:
        entries.append(("score.exclude_seen", SeenFilter()))
    found = []
    for where, entry in entries:
        if isinstance(entry, SeenFilter):
            found.append(pairs_of(context, entry, where).select(USER, ITEM_ROW))
        elif isinstance(entry, BlockedFilter) and entry.user is not None and entry.item is not None:
            found.append(_listed_pairs(context, entry, score, where))
    return reduce(DataFrame.unionByName, found).distinct() if found else None


def _listed_pairs(context: SourceContext, entry: BlockedFilter, score: Score, where: str) -> DataFrame:
    assert entry.user is not None
    assert entry.item is not None
    rows = read_table(context, entry, [entry.user, entry.item], where)
    types = dict(context.users.dtypes) | dict(context.items.dtypes)
    user, item = col(entry.user).try_cast(types[score.user.key]), col(entry.item).try_cast(types[score.item.key])
    keys = context.items.select(col(score.item.key).alias("__item"), F.col(ITEM_ROW))
    pairs = rows.select(user.alias(USER), item.alias("__item")).distinct().join(keys, "__item")
    return pairs.where(F.col(USER).isNotNull()).select(USER, ITEM_ROW)


def of_conditions(context: SourceContext, pairs: DataFrame, conditions: tuple[tuple[str, str], ...]) -> DataFrame:
    """The pairs for which all conditions are true, with the columns that they came with.

    Args:
        context: of the run.
        pairs: the users' columns, ITEM_ROW, and perhaps others.
        conditions: of `filter_sides`.
    """
    columns, constants = pairs.columns, constant_columns(context)
    wide = pairs.join(context.items, ITEM_ROW).withColumns(constants)
    true = [condition(wide, expression, where) for where, expression in conditions]
    return wide.where(reduce(Column.__and__, true)).select(*[col(c) for c in columns])
