"""Spark expressions that say which part of the dataset a row goes to, and frames with a part a partition.

A row's place depends on its identity (source file and line) alone: a hash of it says which part of its split it goes
to and its position there. So the rows are the same in the same order however Spark cut the work, and the
order has nothing to do with label, user or time.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.features.functions.spark_expressions import col
from headrace.features.functions.timestamps import spark_micros
from headrace.features.layout.files import FilePlan, carried_columns
from headrace.features.layout.split import SPLIT
from headrace.features.learn.statistics import IDENTITY
from headrace.features.workflow.workflow import Workflow
from headrace.lake.spark.exchange import partition_keys


def identity(w: Workflow) -> list[Column]:
    """What travels with a row besides its features: label, carried columns, split, and what places it."""
    return [
        col(w.label_column).cast("float").alias("__label"),
        *[_carried(w, source).alias(name) for name, source in carried_columns(w).items()],
        F.col(SPLIT),
        F.xxhash64("_source_file", "_source_line").alias("__hash"),
        *([_of_training().alias(IDENTITY)] if w.out_of_fold else []),
        F.col("_source_file").alias("__source_file"),
        F.col("_source_line").alias("__source_line"),
    ]


def _carried(w: Workflow, column: str) -> Column:
    """A timestamp as microseconds, null where it is; others as they are."""
    type_ = w.input_type(column)
    return spark_micros(col(column), type_) if type_.element == "timestamp" else col(column)


def _of_training() -> Column:
    """The hash of the identity of rows of the training range."""
    return F.when(F.col(SPLIT) == "train", F.xxhash64("_source_file", "_source_line"))


def placed(frame: DataFrame, plans: list[FilePlan]) -> DataFrame:
    """Rows with `identity` repartitioned by part: each part's in one partition, in its order, `__part` its index."""
    frame = frame.withColumn("__part", part_of(plans)).drop(SPLIT)
    return (
        frame.repartition(len(plans), part_key(plans))
        .sortWithinPartitions("__part", "__hash", "__source_file", "__source_line")
        .drop("__hash", "__source_file", "__source_line")
    )


def part_of(plans: list[FilePlan]) -> Column:
    """The part of a row with `identity`: its index in `plans`."""
    out: Column | None = None
    for split in dict.fromkeys(p.split for p in plans):
        mine = [i for i, p in enumerate(plans) if p.split == split]
        index = (F.lit(mine[0]) + F.pmod(F.col("__hash"), F.lit(len(mine)).cast("bigint"))).cast("int")
        out = F.when(F.col(SPLIT) == split, index) if out is None else out.when(F.col(SPLIT) == split, index)
    assert out is not None
    return out


def part_key(plans: list[FilePlan]) -> Column:
    """Of a row with `__part`: what to repartition by so that each part has a partition of its own."""
    return of_part([F.lit(k) for k in partition_keys(len(plans))])


def of_part(values: list[Column]) -> Column:
    """Of a row with `__part`: that part's element of a list."""
    return F.element_at(F.array(*values), F.col("__part") + 1)
