"""What a source of candidates is given, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol

from pyspark.sql import DataFrame, SparkSession

from headrace.config import Score
from headrace.features.table_ops.external import ExternalReader
from headrace.score.entities import Active
from headrace.score.scoring_model import ScoringModel
from headrace.stage import Context
from headrace.storage import Location
from headrace.storage.host_scratch import HostPlace

#: Of the frame of users that a source is given: how many items are wanted for the user, int, 0 for none; and the items
#: that are blocked for the user, array<int>, not null, any of which it may leave out.
FETCH, BLOCKED = "__fetch", "__blocked"


@dataclass(frozen=True)
class SourceContext:
    """What all sources of a run are given."""

    ctx: Context
    spark: SparkSession
    active: Active
    #: One row for each user: `score.user.key` and the user's columns.
    users: DataFrame
    #: The items that may be candidates, those that filters leave out for all users left out: `item_row` (int),
    #: `score.item.key`, the item's columns, `events` (bigint, in the training window; 0 or null where there are none)
    #: and `first_event` (timestamp).
    items: DataFrame
    #: Reads tables given by their paths, at the versions that the run has pinned.
    reader: ExternalReader
    #: The model that scores.
    model: ScoringModel
    #: Of the run; seen by all executors, and removed at its end.
    run_folder: Location
    #: Where tasks map models.
    maps: HostPlace
    #: Frames that were computed once, by name.
    kept: dict[Hashable, DataFrame] = field(default_factory=dict)

    def keep(self, name: Hashable, make: Callable[[], DataFrame]) -> DataFrame:
        """A frame that is used several times: computed once, now, and read from Parquet files until the run ends.

        Not cached by Spark: what is made of it would have all of its plan, and plans of rounds upon rounds grow until
        the driver has no memory to print them.
        """
        if name not in self.kept:
            self.kept[name] = stored(self.spark, make(), self.folder / f"{len(self.kept)}.parquet")
        return self.kept[name]

    def release(self) -> None:
        """Remove what was kept."""
        self.kept.clear()
        self.folder.remove_quietly()

    @property
    def folder(self) -> Location:
        """Where frames are kept."""
        return self.run_folder / "candidates"

    @property
    def user_key(self) -> str:
        """The column of `users` that says which one."""
        return self.score.user.key

    @property
    def score(self) -> Score:
        """The section."""
        assert self.ctx.spec.score is not None
        return self.ctx.spec.score


def stored(spark: SparkSession, frame: DataFrame, folder: Location) -> DataFrame:
    """The frame's rows, computed now and read from Parquet files in a folder, which are replaced."""
    # Any name is a column's here; in Parquet not.
    numbered = frame.toDF(*[f"c{i}" for i in range(len(frame.columns))])
    numbered.write.mode("overwrite").parquet(folder.spark_path)
    return spark.read.schema(numbered.schema).parquet(folder.spark_path).toDF(*frame.columns)


class ItemRanking(Protocol):
    """A source of candidates, prepared: for each user an order of (some of) the items of `SourceContext.items`.

    It is made once a run, as `RANKINGS[kind](context, source)` of headrace.score.candidates.rankings, and asked several
    times: first for what most users need, then for more for those of whose items filters left out too many. One with
    a true attribute `leaves_out_blocked` gives no item that is blocked for the user.
    """

    def first(self, users: DataFrame, most: int) -> DataFrame:
        """The first items of each user's order.

        Args:
            users: one row for each user: the key, `SourceContext.users`' columns, FETCH, BLOCKED, and perhaps others.
            most: no FETCH is greater.

        Returns:
            The rows of `users`, all columns kept, with `__items`: array<int>, not null, distinct, best first. FETCH of
            them; fewer where the order has no more items; asked again for more, it begins with the same ones.
        """
        ...
