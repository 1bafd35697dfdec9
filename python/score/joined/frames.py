"""The frame that tasks score where rows are joined in: the rows of tables of each part, and behind them its users."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.models.joined import joined_files
from headrace.models.predictor import network_folder
from headrace.score.joined.tasks import ASKED, ROWS, Ask, Read
from headrace.score.rank.blocks import TaskInputs

#: Numbers for each partition, one of which Spark is to send there: that none is has a chance of e^-64.
_NUMBERS_EACH = 64


def rows_before_users(
    spark: SparkSession, task: TaskInputs, users: DataFrame, names: Sequence[str], key: str, parts: int
) -> DataFrame:
    """The columns ROWS, and behind them the users', for `tasks.users_after_rows`. Each part is a partition.

    Three exchanges: of users by part, whose tasks say what they need; of that by file; of rows and, once more, of users
    by part. One task reads a file.

    Args:
        spark: the session.
        task: the model, its joined tables and the items.
        users: with columns c0, c1, ...
        names: what these are called.
        key: the user's key, of `names`: a part has users by its hash.
        parts: how many.

    Raises:
        UserError: a record of the saved model is missing or damaged.
    """
    folder = network_folder(task.model)
    assert folder is not None
    files = joined_files(folder, task.joined)
    of_key = F.col(users.columns[list(names).index(key)])
    parted = users.select(_part(spark, of_key, parts).alias("part"), "*")
    asked = parted.repartition(parts, "part").mapInArrow(Ask(task, files, tuple(names)), ASKED)
    by_file = asked.repartition(max(1, len(files)), "file").sortWithinPartitions("file")
    rows = by_file.mapInArrow(Read(files), ROWS)
    both = rows.unionByName(parted, allowMissingColumns=True).repartition(parts, "part")
    return both.sortWithinPartitions("part", F.col("table_name").isNull(), of_key)


def _part(spark: SparkSession, key: Column, parts: int) -> Column:
    """The part of a key: a number that no other part's partition is found by, of `repartition(parts, "part")`."""
    numbers = spark.range(_NUMBERS_EACH * parts).select(F.col("id").cast("int").alias("part"))
    # As Spark's hash partitioning does it; of rows of tables there is no key to hash.
    by_partition = numbers.groupBy(F.pmod(F.hash("part"), F.lit(parts)).alias("partition")).agg(F.min("part"))
    found = [str(number) for _, number in sorted(tuple(row) for row in by_partition.collect())]
    assert len(found) == parts
    listed = F.split(F.lit(",".join(found)), ",").cast("array<int>")
    return F.element_at(listed, F.pmod(F.hash(key), F.lit(parts)) + 1)
