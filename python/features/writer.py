"""Writing a dataset: rows in an order of their own, files and row groups of even size, counts along the way.

A row's place depends on its identity (source file and line) alone: a hash of it says which file of its split it goes
to and where in the file it stands. So the files are the same bits however Spark cut the work, and the order has
nothing to do with label, user or time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.features.spark_plan import col
from headrace.features.split import SPLIT
from headrace.features.workflow import FittedWorkflow, Workflow

Engine = Literal["spark", "arrow"]

#: Row groups in a file of a large split: a file is what a task holds in memory.
_GROUPS_A_FILE = 4
#: A split of this many rows is cut into a few files, so that a few cores can work at it.
_ROWS_WORTH_A_FILE = 20_000
_FEW_FILES = 4


@dataclass(frozen=True)
class FilePlan:
    """One Parquet file to write."""

    #: Relative to the dataset's folder.
    name: str
    split: str
    groups: int
    #: Most rows of a row group.
    group_rows: int


@dataclass
class ColumnCounts:
    """What is counted of a feature's values."""

    #: Rows that lack a value of one of the columns that it is made of: null, NaN, an empty list.
    missing: int = 0
    #: Codes that are 1, and codes that are not 0.
    oov: int = 0
    coded: int = 0


@dataclass
class Written:
    """A file that is there, or the sum of several."""

    name: str
    rows: int
    row_groups: int
    size: int
    columns: dict[str, ColumnCounts] = field(default_factory=dict)


def plan_files(counts: Mapping[str, int], row_group_rows: int, min_row_groups: int) -> list[FilePlan]:
    """Files of each split, so many that all row groups are about even, none above `row_group_rows`.

    Rows fall into files by hash, so a file of several has about rows/files of them, give or take a few square roots.
    """
    plans = []
    for split, rows in counts.items():
        if not rows:
            continue
        files = max(math.ceil(rows / (_GROUPS_A_FILE * row_group_rows)), min(_FEW_FILES, rows // _ROWS_WORTH_A_FILE), 1)
        each = rows / files
        fullest = each + 6 * math.sqrt(each) if files > 1 else each
        groups = max(math.ceil(fullest / row_group_rows), math.ceil(min(min_row_groups, rows) / files))
        plans += [FilePlan(f"{split}/part-{i:05d}.parquet", split, groups, row_group_rows) for i in range(files)]
    return plans


def write_dataset(
    fitted: FittedWorkflow, rows: DataFrame, plans: list[FilePlan], folder: Path, workflow: Path, engine: Engine
) -> list[Written]:
    """Transform the rows of all splits and write them, in one pass over the rows.

    Args:
        rows: events with `__split`, `_source_file`, `_source_line`.
        plans: from `plan_files`, in which every split of `rows` has a file.
        folder: the dataset's (partial) folder, which the executors see too.
        workflow: `fitted`, saved: where executors load it from.
    """
    for split in {p.split for p in plans}:
        (folder / split).mkdir(parents=True, exist_ok=True)
    # Each engine writes in a module of its own, which has its types from here.
    from headrace.features import writer_arrow, writer_spark

    write = writer_spark.write if engine == "spark" else writer_arrow.write
    return write(fitted, rows, plans, folder, workflow)


def carried_columns(w: Workflow) -> dict[str, str]:
    """Carried columns as they travel to the writer: name on the way -> of the table."""
    return {f"__carried{i}": name for i, name in enumerate(w.carried_columns)}


def identity(w: Workflow) -> list[Column]:
    """What travels with a row besides its features: label, carried columns, split, and what places it."""
    return [
        col(w.label_column).cast("float").alias("__label"),
        *[col(source).alias(name) for name, source in carried_columns(w).items()],
        F.col(SPLIT),
        F.xxhash64("_source_file", "_source_line").alias("__hash"),
        F.col("_source_file").alias("__source_file"),
        F.col("_source_line").alias("__source_line"),
    ]


def placed(frame: DataFrame, plans: list[FilePlan]) -> DataFrame:
    """Rows with `identity` brought to their files: each file's in one partition, in its order, `__file` its index."""
    frame = frame.withColumn("__file", _file_of(plans)).drop(SPLIT)
    keys = F.array(*[F.lit(k) for k in partition_keys(len(plans))])
    return (
        frame.repartition(len(plans), F.element_at(keys, F.col("__file") + 1))
        .sortWithinPartitions("__file", "__hash", "__source_file", "__source_line")
        .drop("__hash", "__source_file", "__source_line")
    )


def _file_of(plans: list[FilePlan]) -> Column:
    """A row's file: its index in `plans`."""
    out: Column | None = None
    for split in dict.fromkeys(p.split for p in plans):
        mine = [i for i, p in enumerate(plans) if p.split == split]
        index = (F.lit(mine[0]) + F.pmod(F.col("__hash"), F.lit(len(mine)).cast("bigint"))).cast("int")
        out = F.when(F.col(SPLIT) == split, index) if out is None else out.when(F.col(SPLIT) == split, index)
    assert out is not None
    return out


def partition_keys(partitions: int) -> list[int]:
    """For each partition an int that Spark's hash partitioning puts there: so that each file has a task of its own.

    Without it files share tasks at random, and the longest task decides. The result is the same either way.
    """
    keys: dict[int, int] = {}
    candidate = 0
    while len(keys) < partitions:
        keys.setdefault(_murmur3(candidate) % partitions, candidate)
        candidate += 1
    return [keys[i] for i in range(partitions)]


def _murmur3(x: int) -> int:
    """Spark's `hash` of an int: Murmur3 x86 32 (Appleby), seed 42; a signed number."""
    mask = 0xFFFFFFFF

    def rotl(v: int, r: int) -> int:
        return ((v << r) | (v >> (32 - r))) & mask

    k = rotl(x * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
    h = (rotl(42 ^ k, 13) * 5 + 0xE6546B64) & mask
    h ^= 4
    h = (h ^ (h >> 16)) * 0x85EBCA6B & mask
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & mask
    h ^= h >> 16
    return h - (1 << 32) if h >> 31 else h
