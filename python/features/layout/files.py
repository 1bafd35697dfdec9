"""Writing a dataset: rows in an order of their own, row groups of even size, counts along the way.

A row's place depends on its identity (source file and line) alone: a hash of it says which part of its split it goes
to and where in the part it stands. So the rows are the same in the same order however Spark cut the work, and the
order has nothing to do with label, user or time.

Each row group is a Parquet file of its own: Spark's writers cut row groups by bytes (on CPUs) or by batches (on GPUs),
and neither can be told where; a file ends where its rows do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.features.engines.spark.transform import col
from headrace.features.layout.split import SPLIT
from headrace.features.learn.statistics import IDENTITY
from headrace.features.workflow.workflow import FittedWorkflow, Workflow

Engine = Literal["spark", "arrow"]

#: Row groups in a part of a large split: a part is what a task holds in memory.
_GROUPS_A_PART = 4
#: A split of this many rows is cut into a few parts, so that a few cores can work at it.
_ROWS_WORTH_A_PART = 20_000
_FEW_PARTS = 4


@dataclass(frozen=True)
class FilePlan:
    """A part of a split: rows that one task writes, as Parquet files of one row group each."""

    split: str
    #: Position among the parts of its split.
    part: int
    #: Files that it has, where it has the rows.
    groups: int
    #: Most rows of a row group.
    group_rows: int
    #: The day (UTC) of its rows, where files are by day; else None.
    day: str | None = None

    def file(self, group: int) -> str:
        """The name of a file, relative to the dataset's folder. In the order of names rows are in the split's order."""
        day = f"day-{self.day}-" if self.day else ""
        return f"{self.split}/{day}part-{self.part:05d}-{group:03d}.parquet"

    def groups_of(self, rows: int) -> int:
        """How many files the part's `rows` rows become; file g has the rows from rows * g // groups on."""
        return min(max(self.groups, math.ceil(rows / self.group_rows)), rows)


@dataclass
class ColumnCounts:
    """What is counted of a feature's values."""

    #: Rows that lack a value of one of the columns that it is made of: null, NaN, an empty list.
    missing: int = 0
    #: Codes that are 1, and codes that are not 0.
    oov: int = 0
    coded: int = 0

    def __add__(self, other: ColumnCounts) -> ColumnCounts:
        return ColumnCounts(self.missing + other.missing, self.oov + other.oov, self.coded + other.coded)


@dataclass(frozen=True)
class Written:
    """A file that is there."""

    name: str
    rows: int
    row_groups: int
    size: int


@dataclass(frozen=True)
class WrittenDataset:
    """What a write leaves."""

    #: In the order of their names.
    files: list[Written]
    #: By split and feature.
    counts: dict[str, dict[str, ColumnCounts]]
    #: By day, where files are by day: its files, and counts by feature.
    days: dict[str, tuple[list[Written], dict[str, ColumnCounts]]] = field(default_factory=dict)


def plan_files(counts: Mapping[str, int], row_group_rows: int, min_row_groups: int) -> list[FilePlan]:
    """Parts of each split, so many that all row groups are about even, none above `row_group_rows`.

    Rows fall into parts by hash, so one of several has about rows/parts of them, give or take a few square roots.
    """
    plans = []
    for split, rows in counts.items():
        if not rows:
            continue
        parts = max(math.ceil(rows / (_GROUPS_A_PART * row_group_rows)), min(_FEW_PARTS, rows // _ROWS_WORTH_A_PART), 1)
        each = rows / parts
        fullest = each + 6 * math.sqrt(each) if parts > 1 else each
        groups = max(math.ceil(fullest / row_group_rows), math.ceil(min(min_row_groups, rows) / parts))
        plans += [FilePlan(split, part, groups, row_group_rows) for part in range(parts)]
    return plans


def write_dataset(
    fitted: FittedWorkflow, rows: DataFrame, plans: list[FilePlan], folder: Path, workflow: Path, engine: Engine
) -> WrittenDataset:
    """Transform the rows of all splits and write them.

    Args:
        rows: events with `__split`, `_source_file`, `_source_line`.
        plans: from `plan_files`, in which every split of `rows` has a part.
        folder: the dataset's (partial) folder, which the executors see too.
        workflow: `fitted`, saved: where executors load it from.
    """
    for split in {p.split for p in plans}:
        (folder / split).mkdir(parents=True, exist_ok=True)
    # Each engine writes in a module of its own, which has its types from here.
    from headrace.features.engines.arrow import write_frame
    from headrace.features.engines.spark import write as write_spark

    write = write_spark.write if engine == "spark" else write_frame.write
    return write(fitted, rows, plans, folder, workflow)


def carried_columns(w: Workflow) -> dict[str, str]:
    """Carried columns as they travel to the writer: name on the way -> of the table."""
    return {f"__carried{i}": name for i, name in enumerate(w.carried_columns)}


def source_sets(fitted: FittedWorkflow) -> tuple[tuple[str, ...], ...]:
    """What the features are made of, each set once: far fewer than features where one column gives many."""
    return tuple(dict.fromkeys(f.sources for f in fitted.features))


def identity(w: Workflow) -> list[Column]:
    """What travels with a row besides its features: label, carried columns, split, and what places it."""
    return [
        col(w.label_column).cast("float").alias("__label"),
        *[col(source).alias(name) for name, source in carried_columns(w).items()],
        F.col(SPLIT),
        F.xxhash64("_source_file", "_source_line").alias("__hash"),
        *([_of_training().alias(IDENTITY)] if w.out_of_fold else []),
        F.col("_source_file").alias("__source_file"),
        F.col("_source_line").alias("__source_line"),
    ]


def _of_training() -> Column:
    """The hash of the identity of rows of the training range."""
    return F.when(F.col(SPLIT) == "train", F.xxhash64("_source_file", "_source_line"))


def placed(frame: DataFrame, plans: list[FilePlan]) -> DataFrame:
    """Rows with `identity` brought to their parts: each part's in one partition, in its order, `__part` its index."""
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


def partition_keys(partitions: int) -> list[int]:
    """For each partition an int that Spark's hash partitioning puts there: so that each part has a task of its own.

    Without it parts share tasks at random, and the longest task decides. The result is the same either way.
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
