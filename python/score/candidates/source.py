"""What a source of candidates is given, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pyspark.sql import DataFrame, SparkSession

from headrace.score.entities import Active
from headrace.stage import Context

#: The position of an item in ascending order of the items' keys: int.
ITEM_ROW = "item_row"
#: Of the frame of users that a source is given: how many items are wanted for the user, int, 0 for none.
FETCH = "__fetch"
#: array<int>: a user's items by their rows. What a source adds, and what the union has.
ITEMS = "__items"
#: array<int>, beside ITEMS in the union: bit i says that source i of the spec gave the item.
SOURCES = "__sources"


@dataclass(frozen=True)
class SourceContext:
    """What all sources of a run are given."""

    ctx: Context
    spark: SparkSession
    active: Active
    #: One row for each user: `score.user.key` and the user's columns.
    users: DataFrame
    #: The items that may be candidates, those that filters leave out for all users left out: `item_row` (int),
    #: `score.item.key`, the item's columns, `events` (bigint, in the training window; 0 or null where there are none),
    #: `first_event` and `last_event` (timestamp).
    items: DataFrame


class ItemRanking(Protocol):
    """A source of candidates, prepared: for each user an order of (some of) the items of `SourceContext.items`.

    It is made once a run, as `RANKINGS[kind](context, source)` of headrace.score.candidates.rankings, and asked several
    times: first for what most users need, then for more for those of whose items filters left out too many.
    """

    def first(self, users: DataFrame, most: int) -> DataFrame:
        """The first items of each user's order.

        Args:
            users: one row for each user: the key, `SourceContext.users`' columns, FETCH, and perhaps others.
            most: no FETCH is greater.

        Returns:
            The rows of `users`, all columns kept, with ITEMS: array<int>, not null, distinct, best first. FETCH of
            them; fewer where the order has no more items; asked again for more, it begins with the same ones.
        """
        ...
