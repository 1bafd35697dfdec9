"""Lines `user item`, each user's in the order of time: the files of SASRec's and BERT4Rec's authors.

They become what leave-one-out evaluation of next-item models takes: of each user one row a split, whose item is the one
to be found and whose `history` is all that came before it, the oldest item first:

  test    the last item
  valid   the one before it
  train   the one before that

A model that learns all places of a history (docs/training.md) sees in the row of `train` the user's whole training
sequence, so that an epoch is one pass over the users.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from headrace.lake.landing.frame import GOOD, SKIPPED, fixed_fields
from headrace.lake.landing.reader import LandingBatch, LandingReader

#: By how many of the user's items come behind.
_SPLITS = ("test", "valid", "train")


class UserItemsReader(LandingReader):
    """Lines of a user and an item."""

    remakes_rows = True

    def read(self, batch: LandingBatch) -> list[DataFrame]:
        """Read a user and an item, with blanks or a tab between them."""
        lines = batch.lines(range(len(batch.files)))
        lines = lines.select("*", F.split(F.trim("_text"), r"\s+").alias("_f_parts"))

        def part(k: int) -> Column:
            return F.get("_f_parts", F.lit(k))

        texts = {"user_id": part(0), "item_id": part(1), "label": F.lit("1"), "split": F.lit("train")}
        texts["history"] = F.lit(None).cast("string")  # made below, of other lines
        history = {"history": F.lit(None).cast("array<string>")}
        return [fixed_fields(batch, lines, texts, F.size("_f_parts") != 2, history)]

    def finish(self, rows: DataFrame, batch: LandingBatch) -> DataFrame:
        """Make the last three items of each user rows, with their histories.

        A user of fewer than three items has one row, of the last, in `train`: there is nothing to hold out. The other
        lines are no rows of their own, and skipped.
        """
        of_user = Window.partitionBy("user_id").orderBy("_file", "_line")
        of_all_rows = of_user.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
        good = rows.where(F.col("_state") == GOOD).select(
            "*",
            F.row_number().over(of_user).alias("_place"),
            F.collect_list("item_id").over(of_all_rows).alias("_items"),
        )
        places_from_end = F.size("_items") - F.col("_place")
        few = F.size("_items") < len(_SPLITS)
        is_row = places_from_end < F.when(few, 1).otherwise(len(_SPLITS))
        split = F.when(few, F.lit("train")).otherwise(F.get(F.array(*map(F.lit, _SPLITS)), places_from_end))
        history = F.slice("_items", F.lit(1), F.col("_place") - 1).cast(dict(rows.dtypes)["history"])
        good = good.withColumns(
            {
                "_state": F.when(is_row, F.lit(GOOD)).otherwise(SKIPPED),
                "split": F.when(is_row, split).otherwise(F.col("split")),
                "history": F.when(is_row, history),
            }
        )
        good = good.drop("_place", "_items")
        return rows.where(F.col("_state") != GOOD).unionByName(good)
