"""`mapInArrow` where rows are joined in: a task is given rows of tables, and behind them what it works on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from headrace.models.joined import joined_files
from headrace.models.predictor import network_folder
from headrace.score.joined.held import HeldRows
from headrace.score.joined.needed import CodesOf, JoinedModel
from headrace.score.joined.parts import Parts
from headrace.score.joined.tasks import ASKED, ROWS, Ask, Read, after_table_rows

#: Numbers for each partition, one of which Spark is to send there: that none is has a chance of e^-64.
_NUMBERS_EACH = 64


def map_with_table_rows(
    spark: SparkSession,
    task: JoinedModel,
    needed: Callable[[], CodesOf],
    frame: DataFrame,
    names: Sequence[str],
    parts: Parts,
    work: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: StructType | str,
    held: HeldRows | None = None,
) -> DataFrame:
    """`frame.mapInArrow(work, schema)`, each part a partition, whose task's model has the rows that the part looks up.

    Args:
        spark: the session.
        task: the model and its joined tables.
        needed: makes what finds the codes that rows of the frame look up; picklable.
        frame: with columns c0, c1, ...
        names: what these are called, to `needed` and to `work`.
        parts: how it is cut.
        work: what a task does with the rows of its part.
        schema: of what that makes.
        held: is told what rows of tables the tasks were brought.

    Raises:
        UserError: a record of the saved model is missing or damaged.
    """
    called = tuple(names)

    def behind_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from work(after_table_rows(task, batches, called, held))

    return _table_rows_before(spark, task, needed, frame, called, parts).mapInArrow(behind_rows, schema)


def _table_rows_before(
    spark: SparkSession,
    task: JoinedModel,
    needed: Callable[[], CodesOf],
    frame: DataFrame,
    names: tuple[str, ...],
    parts: Parts,
) -> DataFrame:
    """The columns ROWS, and behind them the frame's, for `tasks.after_table_rows`. Each part is a partition.

    Three exchanges: of the frame by part, whose tasks say what they need; of that by file; of rows and, once more, of
    the frame by part. One task reads a file.
    """
    folder = network_folder(task.model)
    assert folder is not None
    files = joined_files(folder, task.joined)
    parted = frame.select(_part(spark, parts).alias("part"), "*")
    asked = parted.repartition(parts.count, "part").mapInArrow(Ask(needed, files, names), ASKED)
    by_file = asked.repartition(max(1, len(files)), "file").sortWithinPartitions("file")
    rows = by_file.mapInArrow(Read(files), ROWS)
    both = rows.unionByName(parted, allowMissingColumns=True).repartition(parts.count, "part")
    return both.sortWithinPartitions("part", F.col("table_name").isNull(), parts.order)


def _part(spark: SparkSession, parts: Parts) -> Column:
    """The part of a row: a number that no other part's partition is found by, of `repartition(count, "part")`."""
    numbers = spark.range(_NUMBERS_EACH * parts.count).select(F.col("id").cast("int").alias("part"))
    # As Spark's hash partitioning does it; of rows of tables there is no key to hash.
    by_partition = numbers.groupBy(F.pmod(F.hash("part"), F.lit(parts.count)).alias("partition")).agg(F.min("part"))
    found = [str(number) for _, number in sorted(tuple(row) for row in by_partition.collect())]
    assert len(found) == parts.count
    listed = F.split(F.lit(",".join(found)), ",").cast("array<int>")
    return F.element_at(listed, parts.number + 1)
