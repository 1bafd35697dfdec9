"""Ranked items of all users, or of the users of a segment, as lists; and users joined with theirs.

A list that many users share is joined by hashes of the users, several copies of it: however many users a segment has,
they meet it in as many tasks as there are copies. Where all lists together are small, Spark broadcasts them by its own
rule (spark.sql.autoBroadcastJoinThreshold).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from headrace.features.functions.spark_expressions import col
from headrace.score.items import ITEM_ROW

#: The column of lists.
LIST = "__list"
_COPY = "__copy"


def lists_of(ranked: DataFrame, segment: Sequence[str], order: Sequence[Column], most: int) -> DataFrame:
    """(segment, LIST): for each segment the rows of its first items, array<int>.

    Args:
        ranked: the segment's columns, ITEM_ROW, and what `order` reads; an item once a segment.
        segment: columns; none: one list of all.
        order: best first; it must tell any two items apart.
        most: items of a list.
    """
    keys = [col(c) for c in segment]
    place = F.row_number().over(Window.partitionBy(*(keys or [one_group()])).orderBy(*order))
    first = ranked.select(*keys, F.col(ITEM_ROW), place.alias("__place")).where(F.col("__place") <= most)
    entries = F.sort_array(F.collect_list(F.struct("__place", ITEM_ROW)))
    return first.groupBy(*keys).agg(F.transform(entries, lambda e: e[ITEM_ROW]).alias(LIST))


def with_shared_lists(users: DataFrame, user_key: str, lists: DataFrame, segment: Sequence[str]) -> DataFrame:
    """The users with LIST of their segment (null is a value like others); null where it has none.

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
    spread = users.withColumn(_COPY, F.pmod(F.hash(col(user_key)), F.lit(copies)))
    same = [F.col(_COPY) == F.col("__of_copy"), *(col(c).eqNullSafe(F.col(n)) for c, n in names.items())]
    return spread.join(copied, reduce(and_, same), "left").drop(_COPY, "__of_copy", *names.values())


def with_own_lists(users: DataFrame, user_key: str, lists: DataFrame, key: str) -> DataFrame:
    """The users with LIST of their own, null where they have none.

    Args:
        users: whose columns are kept.
        user_key: of users.
        lists: of `lists_of` by one column, the user's key.
        key: that column.
    """
    renamed = lists.select(col(key).alias("__of_user"), F.col(LIST))
    return users.join(renamed, col(user_key) == F.col("__of_user"), "left").drop("__of_user")


def cut(list_: Column, most: Column) -> Column:
    """The first items of a list, `most` of them; an empty one where it is null."""
    return F.coalesce(F.slice(list_, F.lit(1), most), F.array().cast("array<int>"))


def one_group() -> Column:
    """A window's key that is the same for all rows: of a literal Spark warns that all rows are one task's."""
    return F.pmod(F.col(ITEM_ROW), F.lit(1))
