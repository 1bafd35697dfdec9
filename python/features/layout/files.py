"""Writing a dataset: rows in an order of their own, row groups of even size, counts along the way.

A row's place depends on its identity (source file and line) alone: a hash of it says which part of its split it goes
to and its position there. So the rows are the same in the same order however Spark cut the work, and the
order has nothing to do with label, user or time.

Each row group is a Parquet file of its own: Spark's writers cut row groups by bytes (on CPUs) or by batches (on GPUs),
and neither takes row numbers; a file ends where its rows do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from headrace.config import Spec
from headrace.features.workflow.workflow import Workflow

if TYPE_CHECKING:
    from headrace.features.workflow.fitted import FittedWorkflow

Engine = Literal["spark", "arrow"]

#: Row groups in a part of a large split: a part is what a task holds in memory.
_GROUPS_A_PART = 4
#: A split of this many rows is cut into a few parts, so that a few cores can work at it.
_ROWS_WORTH_A_PART = 20_000
_FEW_PARTS = 4


def engine_of(spec: Spec) -> Engine:
    """Return the engine that a pipeline's dataset is made by, `auto` resolved."""
    if spec.features.engine == "auto":
        return "spark" if spec.spark.profile == "gpu" else "arrow"
    return spec.features.engine


@dataclass(frozen=True)
class FilePlan:
    """A part of a split: rows that one task writes, as Parquet files of one row group each."""

    split: str
    #: Position among the parts of its split.
    part: int
    #: Number of its files, if it has enough rows.
    groups: int
    #: Most rows of a row group.
    group_rows: int
    #: The day (UTC) of its rows, where files are by day; else None.
    day: str | None = None

    def file(self, group: int) -> str:
        """Return the name of a file, relative to the dataset's folder.

        In the order of names rows are in the split's order.
        """
        day = f"day-{self.day}-" if self.day else ""
        return f"{self.split}/{day}part-{self.part:05d}-{group:03d}.parquet"

    def groups_of(self, rows: int) -> int:
        """Return how many files the part's `rows` rows become; file g has the rows from rows * g // groups on."""
        return min(max(self.groups, math.ceil(rows / self.group_rows)), rows)


@dataclass
class ColumnCounts:
    """Counts of a feature's values."""

    #: Rows without a value in one of its source columns: null, NaN, an empty list.
    missing: int = 0
    #: Number of codes that are 1, and of codes that are not 0.
    oov: int = 0
    coded: int = 0

    def __add__(self, other: ColumnCounts) -> ColumnCounts:
        return ColumnCounts(self.missing + other.missing, self.oov + other.oov, self.coded + other.coded)


@dataclass(frozen=True)
class DatasetFile:
    """A file that is there."""

    name: str
    rows: int
    row_groups: int
    size: int


@dataclass(frozen=True)
class WrittenDataset:
    """The files that a write has left, and their counts."""

    #: In the order of their names.
    files: list[DatasetFile]
    #: By split and feature.
    counts: dict[str, dict[str, ColumnCounts]]
    #: By day, where files are by day: its files, and counts by feature.
    days: dict[str, tuple[list[DatasetFile], dict[str, ColumnCounts]]] = field(default_factory=dict)


def plan_files(counts: Mapping[str, int], row_group_rows: int, min_row_groups: int) -> list[FilePlan]:
    """Return parts of each split, so many that all row groups are about even, none above `row_group_rows`.

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


def carried_columns(w: Workflow) -> dict[str, str]:
    """Return carried columns as they travel to the writer: name on the way -> of the table."""
    return {f"__carried{i}": name for i, name in enumerate(w.carried_columns)}


def source_sets(fitted: FittedWorkflow) -> tuple[tuple[str, ...], ...]:
    """Return the sets of columns that features are made of, each once: fewer where one column gives many features."""
    return tuple(dict.fromkeys(f.sources for f in fitted.features))
