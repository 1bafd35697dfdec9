"""Readers of the benchmark sets' files.

- **Criteo** and **TalkingData** are logs of clicks.
- **MovieLens** is the original `ratings.dat`, or the split of He et al.: implicit feedback (section 4.1 of He et al.,
  Neural Collaborative Filtering, 2017, arXiv:1708.05031), so a rating of any height is a positive. Training rows are
  positives alone (the training loop draws their negatives). Rows to evaluate on carry their negatives with them:

      valid   one held-out positive a user and 4 items drawn uniformly from those the user has not rated
      rank    another held-out positive a user and 99 such items

  No row of `valid` or `rank` is in `train`, so AUC and ranking are of unseen pairs.
- **LightGCN** is the split of He et al., "LightGCN" (2020), which many papers on collaborative filtering report. A line
  of `*train.txt` or `*test.txt` is a user and the items that the user chose, blanks between them; each item is a row,
  with label 1 and its file's split. One interaction of every tenth user, chosen by hash, goes from `train` to `valid`,
  with drawn negatives; a full ranking of the split `test` leaves both out (`train.evaluation.full_ranking`).
- **User and item**, each user's lines in the order of time, are the files of SASRec's and BERT4Rec's authors. They
  become what leave-one-out evaluation of next-item models takes: of each user one row a split, whose item is the one
  to be found and whose `history` is all that came before it, the oldest item first: `test` has the last item, `valid`
  the one before it, `train` the one before that. A model that learns all places of a history (docs/sequences.md) sees
  in the row of `train` the user's whole training sequence, so that an epoch is one pass over the users.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from headrace.config.schema import EpochUnit
from headrace.errors import UserError
from headrace.lake.faults import GOOD, SKIPPED, WRONG_FIELDS
from headrace.lake.landing.delimited import DelimitedForm, LineForm, LineRow
from headrace.lake.landing.formats import LandingBatch, LandingReader, with_header

#: Names as the Kaggle page of the Criteo Display Advertising Challenge gives them; the 1 TB logs have the same fields.
CRITEO = ("label", *(f"I{k}" for k in range(1, 14)), *(f"C{k}" for k in range(1, 27)))


class CriteoReader(LandingReader):
    """Criteo's files."""

    def form(self, batch: LandingBatch, number: int) -> DelimitedForm:
        """Read tab-separated lines without a header: label, 13 counts, 26 hashed categories (hex); blanks are null.

        The Kaggle file and the `day_N` files of the 1 TB logs. No quotes, so a line is split at its tabs alone.
        """
        return DelimitedForm(CRITEO, "\t", quotes=False)


#: Of a time with one digit of hours, as a regular expression and what replaces it in Arrow's spelling.
_TWO_DIGIT_HOUR = (r"^(\d{4}-\d{2}-\d{2}) (\d:)", r"\1 0\2")
_TIMES = ("click_time", "attributed_time")


class TalkingDataReader(LandingReader):
    """TalkingData's files."""

    def form(self, batch: LandingBatch, number: int) -> DelimitedForm:
        """Read CSV with a header: ip, app, device, os, channel, click_time, attributed_time, is_attributed.

        Times are `yyyy-MM-dd HH:mm:ss` in the competition's files, and `yyyy-MM-dd H:mm` in samples that went through a
        spreadsheet; both are read (as UTC).
        """
        return with_header(batch, batch.files[number][1], dict.fromkeys(_TIMES, _TWO_DIGIT_HOUR))


#: Columns of pairs of a user and an item.
_PAIRS = ("user_id", "item_id", "label", "split")
_RATINGS = (*_PAIRS, "rating", "ts")


@dataclass(frozen=True)
class RatingsForm(LineForm):
    """Lines of a user, an item, a rating and perhaps seconds since 1970."""

    separator: str
    split: str
    #: Fields at least; at most there are four.
    least: int
    #: Numbers that are no whole seconds are no times.
    rewrites: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    epochs: Mapping[str, EpochUnit] = field(default_factory=dict)

    names = _RATINGS

    @staticmethod
    def for_files(batch: LandingBatch, separator: str, split: str, least: int) -> RatingsForm:
        """Return the form of a batch's files, whose seconds become times where `ts` is declared as one."""
        if {c.name: c.type for c in batch.table.columns}.get("ts") != "timestamp":
            return RatingsForm(separator, split, least)
        return RatingsForm(separator, split, least, {"ts": ("^.*[.eE].*$", "")}, {"ts": "epoch_seconds"})

    def rows(self, line: str) -> Sequence[LineRow]:
        """Return the rating of a line."""
        parts = line.split(self.separator)
        user, item, rating, seconds = [part or None for part in (*parts, "", "", "")[:4]]
        fault = None if self.least <= len(parts) <= 4 else WRONG_FIELDS
        return (LineRow((user, item, "1", self.split, rating, seconds), fault),)


class DrawnItemsForm(LineForm):
    """Lines of `(user,positive)` and items that the user has not rated: a row each."""

    names = _RATINGS

    def rows(self, line: str) -> Sequence[LineRow]:
        """Return the items of a line."""
        match = _USER_AND_POSITIVE.match(line)
        user = "" if match is None else match[1]
        items: list[str | None] = [*line.split("\t")[1:]] or [None]
        return [
            LineRow((user, item, "0", "rank", None, None), WRONG_FIELDS if user == "" or item is None else None)
            for item in items
        ]


_USER_AND_POSITIVE = re.compile(r"\(([0-9]+),[0-9]+\)\t")
_BLANKS = re.compile(r"[ \t\n\v\f\r]+")


@dataclass(frozen=True)
class ListForm(LineForm):
    """Lines of a user and the items that the user chose: a row each. A user without items has none."""

    split: str

    names = _PAIRS

    def rows(self, line: str) -> Sequence[LineRow]:
        """Return the items of a line."""
        user, *items = _BLANKS.split(line.strip(" "))
        return [LineRow((user, item, "1", self.split)) for item in items]


class UserItemForm(LineForm):
    """Lines of a user and an item, with blanks or a tab between them."""

    names = (*_PAIRS, "history")

    def rows(self, line: str) -> Sequence[LineRow]:
        """Return the pair of a line. Its history is made of other lines (`UserItemsReader.finish`)."""
        parts = _BLANKS.split(line.strip(" "))
        user, item = (*parts, None)[:2]
        return (LineRow((user, item, "1", "train", None), None if len(parts) == 2 else WRONG_FIELDS),)


VALID_NEGATIVES = 4
RANK_NEGATIVES = 99
_MOVIELENS_SEED = 20_170_403
_KINDS = (".train.rating", ".test.rating", ".test.negative")


class RatingsReader(LandingReader):
    """The original `ratings.dat`, split by time."""

    remakes_rows = True

    def form(self, batch: LandingBatch, number: int) -> RatingsForm:
        """Read `user::movie::rating::seconds since 1970`, the `ratings.dat` of ml-1m and ml-10m."""
        return RatingsForm.for_files(batch, "::", "train", 4)

    def finish(self, rows: DataFrame, batch: LandingBatch) -> DataFrame:
        """Make each user's last rating by `ts` (of equal times the later line) `rank`, the one before it `valid`.

        Users with fewer than three ratings stay in `train`. Raises UserError where `ts` is not declared.
        """
        if "ts" not in {c.name for c in batch.table.columns}:
            raise UserError(
                "source.format 'movielens' needs column 'ts' in table.columns: it says which rating is last"
            )
        newest = Window.partitionBy("user_id").orderBy(F.desc("ts"), F.desc("_file"), F.desc("_line"))
        good = rows.where(F.col("_state") == GOOD).select(
            "*",
            F.row_number().over(newest).alias("_rank"),
            F.count("*").over(Window.partitionBy("user_id")).alias("_n"),
        )
        split = F.when(F.col("_n") < 3, F.lit("train")).when(F.col("_rank") == 1, F.lit("rank"))
        good = good.withColumn("split", split.when(F.col("_rank") == 2, F.lit("valid")).otherwise(F.lit("train")))
        good = good.drop("_rank", "_n")
        seen = good.select("user_id", "item_id")
        drawn = [
            with_negatives(good.where(F.col("split") == split), seen, seen, count)
            for split, count in (("valid", VALID_NEGATIVES), ("rank", RANK_NEGATIVES))
        ]
        return _union([rows.where(F.col("_state") != GOOD), good, *drawn])


class NcfReader(LandingReader):
    """The files of He et al."""

    remakes_rows = True

    def form(self, batch: LandingBatch, number: int) -> LineForm:
        """Read the files of He et al.'s repository.

        `*.train.rating` and `*.test.rating` have user, item, rating and seconds between tabs; `*.test.negative` has
        `(user,positive)`, then 99 items.

        Raises:
            UserError: one of the three is missing, or there is another file.
        """
        kind = _kinds_of(batch, _KINDS)[number]
        if kind == ".test.negative":
            return DrawnItemsForm()
        return RatingsForm.for_files(batch, "\t", "train" if kind == ".train.rating" else "rank", 3)

    def finish(self, rows: DataFrame, batch: LandingBatch) -> DataFrame:
        """Move one training interaction a user, chosen by hash, to `valid`, as in section 4.1 of the paper.

        Users with a single one keep it. Its negatives are items that the user has in none of the training rows.
        The test items are not looked at: a drawn negative may be one, which costs a little AUC and leaks nothing.
        """
        order = Window.partitionBy("user_id").orderBy(
            F.xxhash64("user_id", "item_id", F.lit(_MOVIELENS_SEED)), "_file", "_line"
        )
        train = rows.where((F.col("_state") == GOOD) & (F.col("split") == "train")).select(
            "*", F.row_number().over(order).alias("_rank"), F.count("*").over(Window.partitionBy("user_id")).alias("_n")
        )
        held = (F.col("_rank") == 1) & (F.col("_n") > 1)
        train = train.withColumn("split", F.when(held, F.lit("valid")).otherwise(F.lit("train"))).drop("_rank", "_n")
        seen = train.select("user_id", "item_id")
        drawn = with_negatives(train.where(F.col("split") == "valid"), seen, seen, VALID_NEGATIVES)
        return _union([rows.where((F.col("_state") != GOOD) | (F.col("split") != "train")), train, drawn])


def _kinds_of(batch: LandingBatch, endings: Sequence[str]) -> list[str]:
    """Return the ending of each file's name.

    Raises:
        UserError: a file has none of the endings, or there is no file with one of them.
    """
    kinds = []
    every = ", ".join(f"*{ending}" for ending in endings)
    for _, file in batch.files:
        kind = next((ending for ending in endings if file.name.endswith(ending)), None)
        if kind is None:
            raise UserError(f"landing file {file.name} is none of {every}; narrow source.path")
        kinds.append(kind)
    for ending in endings:
        if ending not in kinds:
            raise UserError(
                f"no landing file ends in '{ending}' (source.path {batch.source.path}); format {batch.source.format} "
                f"needs all of {every}"
            )
    return kinds


def with_negatives(positives: DataFrame, seen: DataFrame, items: DataFrame, count: int) -> DataFrame:
    """Add to each positive row (one a user) `count` rows with other items, label 0, drawn without replacement.

    Args:
        positives: rows to copy; all but item, label and rating stay as they are.
        seen: user_id, item_id: what a user's negatives are not.
        items: item_id: what they are drawn from, uniformly.
        count: how many; fewer for users who have seen nearly everything.

    Returns:
        rows like `positives`, `_copy` from 1; the same for the same data (draws are hashes, not random numbers).
    """
    listed = items.agg(F.sort_array(F.collect_set("item_id")).alias("_items"))
    known = seen.groupBy("user_id").agg(F.count_distinct("item_id").alias("_seen"))
    size = F.size("_items")
    # Enough draws that too few distinct unseen ones among them are improbable; at most a few times all items.
    unseen = F.greatest((size - F.col("_seen")) / size, F.lit(0.05))
    draws = F.ceil(F.lit(1.5 * count) / unseen + 20).cast("int")
    tries = (
        positives.select("user_id")
        .join(known, "user_id")
        .crossJoin(F.broadcast(listed))
        .select("user_id", "_items", F.explode(F.sequence(F.lit(1), draws)).alias("_try"))
        .select(
            "user_id",
            "_try",
            F.element_at(
                "_items",
                (F.pmod(F.xxhash64("user_id", "_try", F.lit(_MOVIELENS_SEED + count)), F.size("_items")) + 1).cast(
                    "int"
                ),
            ).alias("item_id"),
        )
    )
    fresh = (
        tries.groupBy("user_id", "item_id")
        .agg(F.min("_try").alias("_try"))
        .join(seen, ["user_id", "item_id"], "left_anti")
        .select("*", F.row_number().over(Window.partitionBy("user_id").orderBy("_try")).alias("_draw"))
        .where(F.col("_draw") <= count)
        .select(F.col("user_id").alias("_user"), F.col("item_id").alias("_item"), "_draw")
    )
    types = dict(positives.dtypes)
    changed = {"item_id": F.col("_item"), "label": F.lit(0).cast(types["label"]), "_copy": F.col("_draw")}
    if "rating" in types:
        changed["rating"] = F.lit(None).cast(types["rating"])
    joined = positives.join(fresh, F.col("user_id") == F.col("_user"))
    return joined.select(*(changed[c].alias(c) if c in changed else F.col(c) for c in positives.columns))


def _union(frames: list[DataFrame]) -> DataFrame:
    union = frames[0]
    for frame in frames[1:]:
        union = union.unionByName(frame)
    return union


#: One of so many users has a row in `valid`.
VALID_USERS = 10
_LIGHTGCN_SPLITS = ("train", "test")
_LIGHTGCN_SEED = 20_200_725


class ListsReader(LandingReader):
    """Two files of lists, one of each split."""

    remakes_rows = True

    def form(self, batch: LandingBatch, number: int) -> ListForm:
        """Make each item of a line a row; a user without items has none.

        Raises:
            UserError: one of the two files is missing, or there is another one.
        """
        endings = [f"{split}.txt" for split in _LIGHTGCN_SPLITS]
        return ListForm(_kinds_of(batch, endings)[number].removesuffix(".txt"))

    def finish(self, rows: DataFrame, batch: LandingBatch) -> DataFrame:
        """Move one training row of every `VALID_USERS`th user to `valid`, beside items that the user lacks there.

        Users with a single row keep it. The test items are not looked at: a drawn negative may be one.
        """
        order = Window.partitionBy("user_id").orderBy(
            F.xxhash64("user_id", "item_id", F.lit(_LIGHTGCN_SEED)), "_file", "_line"
        )
        is_train = (F.col("_state") == GOOD) & (F.col("split") == "train")
        chosen = F.pmod(F.xxhash64("user_id", F.lit(_LIGHTGCN_SEED)), F.lit(VALID_USERS)) == 0
        train = rows.where(is_train).select(
            "*", F.row_number().over(order).alias("_rank"), F.count("*").over(Window.partitionBy("user_id")).alias("_n")
        )
        held = chosen & (F.col("_rank") == 1) & (F.col("_n") > 1)
        train = train.withColumn("split", F.when(held, F.lit("valid")).otherwise(F.lit("train"))).drop("_rank", "_n")
        seen = train.select("user_id", "item_id")
        drawn = with_negatives(train.where(F.col("split") == "valid"), seen, seen, VALID_NEGATIVES)
        return rows.where(~is_train).unionByName(train).unionByName(drawn)


#: By how many of the user's items come behind.
_LEFT_OUT_SPLITS = ("test", "valid", "train")


class UserItemsReader(LandingReader):
    """Lines of a user and an item."""

    remakes_rows = True

    def form(self, batch: LandingBatch, number: int) -> UserItemForm:
        """Read a user and an item, with blanks or a tab between them."""
        return UserItemForm()

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
        few = F.size("_items") < len(_LEFT_OUT_SPLITS)
        is_row = places_from_end < F.when(few, 1).otherwise(len(_LEFT_OUT_SPLITS))
        split = F.when(few, F.lit("train")).otherwise(F.get(F.array(*map(F.lit, _LEFT_OUT_SPLITS)), places_from_end))
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
