"""The split of He et al., "LightGCN" (2020), which many papers on collaborative filtering report: two files of lists.

A line of `*train.txt` or `*test.txt` is a user and the items that the user chose, blanks between them; each item is a
row, with label 1 and its file's split. One interaction of every tenth user, chosen by hash, goes from `train` to
`valid`, with drawn negatives; a full ranking of the split `test` leaves both out (`train.evaluation.full_ranking`).
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from headrace.errors import UserError
from headrace.lake.landing.frame import GOOD, fixed_fields
from headrace.lake.landing.reader import LandingBatch, LandingReader
from headrace_datasets.movielens import VALID_NEGATIVES, with_negatives

#: One of so many users has a row in `valid`.
VALID_USERS = 10
_SPLITS = ("train", "test")
_SEED = 20_200_725


class ListsReader(LandingReader):
    """Two files of lists, one of each split."""

    remakes_rows = True

    def read(self, batch: LandingBatch) -> list[DataFrame]:
        """Make each item of a line a row; a user without items has none.

        Raises:
            UserError: one of the two files is missing, or there is another one.
        """
        by_split: dict[str, list[int]] = {split: [] for split in _SPLITS}
        for i, (_, file) in enumerate(batch.files):
            split = next((s for s in _SPLITS if file.name.endswith(f"{s}.txt")), None)
            if split is None:
                raise UserError(f"landing file {file.name} is none of *train.txt, *test.txt; narrow source.path")
            by_split[split].append(i)
        for split, files in by_split.items():
            if not files:
                raise UserError(
                    f"no landing file ends in '{split}.txt' (source.path {batch.source.path}); format lightgcn needs "
                    f"both of *train.txt, *test.txt"
                )
        return [_rows(batch, split, files) for split, files in by_split.items()]

    def finish(self, rows: DataFrame, batch: LandingBatch) -> DataFrame:
        """Move one training row of every `VALID_USERS`th user to `valid`, beside items that the user lacks there.

        Users with a single row keep it. The test items are not looked at: a drawn negative may be one.
        """
        order = Window.partitionBy("user_id").orderBy(F.xxhash64("user_id", "item_id", F.lit(_SEED)), "_file", "_line")
        is_train = (F.col("_state") == GOOD) & (F.col("split") == "train")
        chosen = F.pmod(F.xxhash64("user_id", F.lit(_SEED)), F.lit(VALID_USERS)) == 0
        train = rows.where(is_train).select(
            "*", F.row_number().over(order).alias("_rank"), F.count("*").over(Window.partitionBy("user_id")).alias("_n")
        )
        held = chosen & (F.col("_rank") == 1) & (F.col("_n") > 1)
        train = train.withColumn("split", F.when(held, F.lit("valid")).otherwise(F.lit("train"))).drop("_rank", "_n")
        seen = train.select("user_id", "item_id")
        drawn = with_negatives(train.where(F.col("split") == "valid"), seen, seen, VALID_NEGATIVES)
        return rows.where(~is_train).unionByName(train).unionByName(drawn)


def _rows(batch: LandingBatch, split: str, files: list[int]) -> DataFrame:
    lines = batch.lines(files)
    parts = F.split(F.trim("_text"), r"\s+")
    lines = lines.select(
        *(c for c in lines.columns if c != "_copy"),
        F.get(parts, F.lit(0)).alias("_f_user"),
        F.posexplode_outer(F.slice(parts, 2, F.size(parts))).alias("_f_copy", "_f_item"),
    )
    lines = lines.withColumn("_copy", F.coalesce("_f_copy", F.lit(0))).withColumn("_lonely", F.col("_f_item").isNull())
    texts = {"user_id": F.col("_f_user"), "item_id": F.col("_f_item"), "label": F.lit("1"), "split": F.lit(split)}
    rows = fixed_fields(batch, lines, texts, F.lit(False))
    return rows.withColumn("_skip", F.col("_skip") | F.col("_lonely")).drop("_lonely")
