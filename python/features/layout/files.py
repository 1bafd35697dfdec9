"""Layout of a dataset without Spark: the split of a row as a rule over columns, and the files of its rows.

The days of a split by time end with the last day whose events have labels that no longer change.

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
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Literal

from headrace.config import Features, Spec
from headrace.config.source import following
from headrace.config.source import midnight as landing_midnight
from headrace.features.table_ops.preparation import Preparation, midnight
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


@dataclass(frozen=True)
class TimeRule:
    """Train from `first`, valid from `valid`, test from `test` (None: none), all to `last`, which is included.

    Days since 1970 in UTC of `column`.
    """

    column: str
    first: int
    valid: int
    last: int
    test: int | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that there are, oldest first."""
        return ("train", "valid") if self.test is None else ("train", "valid", "test")

    def split_of(self, day: int) -> str:
        """Return the split of a day from `first` to `last`."""
        if self.test is not None and day >= self.test:
            return "test"
        return "valid" if day >= self.valid else "train"


@dataclass(frozen=True)
class PositionRule:
    """Valid begins at this line of this file, in order of file and line; None: nowhere."""

    file: str | None
    line: int


@dataclass(frozen=True)
class ColumnRule:
    """The text of `column` names the split."""

    column: str


Rule = TimeRule | PositionRule | ColumnRule


def columns_of(rule: Rule) -> tuple[str, ...]:
    """Return columns that the rule looks at, besides the rows' source."""
    return () if isinstance(rule, PositionRule) else (rule.column,)


def day_number(day: str) -> int:
    """Return days since 1970 of an ISO date."""
    return (date.fromisoformat(day) - date(1970, 1, 1)).days


def day_name(number: int) -> str:
    """Return the reverse of `day_number`."""
    return (date(1970, 1, 1) + timedelta(days=number)).isoformat()


#: First and last day, as ISO dates.
DayRange = tuple[str, str]


def time_ranges(features: Features, ds: str) -> tuple[DayRange, DayRange]:
    """Return (train, valid): the `window_days` before the last `valid_days` up to `ds`; first and last day of each.

    The `test_days` up to `ds` come behind both.
    """
    last = date.fromisoformat(ds) - timedelta(days=features.split.test_days)
    valid_from = last - timedelta(days=features.split.valid_days - 1)
    train_to = valid_from - timedelta(days=1)
    train_from = train_to - timedelta(days=features.window_days - 1)
    return (train_from.isoformat(), train_to.isoformat()), (valid_from.isoformat(), last.isoformat())


def split_ranges(spec: Spec, ds: str) -> tuple[DayRange, DayRange]:
    """Return the `time_ranges` up to the last day up to `ds` whose events have labels by then."""
    return time_ranges(spec.features, last_labelled_day(spec, ds))


def seen_until(spec: Spec, ds: str) -> int | None:
    """Return the microsecond up to which the source of the labels tells what happened by the end of `ds`.

    None: labels are not made of another source, or of one without days: then it tells up to its newest row.
    """
    source = Preparation.from_spec(spec).label_source
    if source is None or not (spec.source.daily and spec.sources[source].source.daily):
        return None
    end = landing_midnight(spec.sources[source].source, following(ds))
    return min(midnight(ds, 1), int(end.timestamp()) * 1_000_000)


def last_labelled_day(spec: Spec, ds: str) -> str:
    """Return the last day (UTC) up to `ds` some of whose events have labels that stay."""
    wait = Preparation.from_spec(spec).label_wait
    if not wait:
        return ds
    # Labels of events before this instant are known.
    until = (seen_until(spec, ds) or midnight(ds, 1)) - wait
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=until - 1)).date().isoformat()
