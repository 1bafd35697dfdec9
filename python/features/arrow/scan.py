"""The events of a day as lake files: what the Arrow engine works on where no table operator stands between.

Spark schedules tasks over the data files of the pinned version; each file is decoded once into row groups
(features.arrow.decode), which are kept for the next day's run. Nothing of the rows passes through the JVM.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from headrace.features.arrow.aggregate import TrainRows
from headrace.features.arrow.decode import (
    FILE,
    LINE,
    HostFolder,
    LakeFile,
    LakeRowGroup,
    RowGroupLayout,
    prune,
    row_groups,
)
from headrace.features.arrow.kernels import DictionaryColumn, count
from headrace.features.functions.arrays import doubles, to_numpy
from headrace.features.layout.files import ColumnRule, Rule, TimeRule, columns_of
from headrace.features.table_ops.preparation import RowPreparation
from headrace.features.types import ValueType
from headrace.features.workflow.workflow import Workflow
from headrace.lake.spark.tasks import cores_of, grouped, run_tasks
from headrace.storage import Location
from headrace.storage.host_scratch import RUN, HostScratch

_LOG = logging.getLogger("headrace.features")


#: By task: (number, file).
FileTasks = tuple[tuple[tuple[int, LakeFile], ...], ...]


class FileVisitor(Protocol):
    """Work over the row groups of a file, in a task: what is to be known of their training rows."""

    def __call__(self, number: int, scanned: Iterable[tuple[LakeRowGroup, TrainRows]]) -> Any:
        """Visit a file and return JSON. `number`: of the file. Takes all of `scanned`, one after the other."""
        ...


@dataclass(frozen=True)
class Splitter:
    """The rule that gives a row its split, label and day. Pickled into tasks."""

    rule: Rule
    splits: tuple[str, ...]
    label: str
    #: Whether rows are counted and written by day (a split by time).
    by_day: bool = False

    def split(self, row_group: LakeRowGroup) -> np.ndarray[Any, np.dtype[np.int8]]:
        """Return each row's position in `splits`."""
        names = (*columns_of(self.rule), FILE, LINE)
        return split_codes(self.rule, self.splits, {n: row_group.column(n) for n in names})

    def days(self, row_group: LakeRowGroup) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """Return each row's day, as a number since 1970; None unless `by_day`."""
        if not self.by_day:
            return None
        assert isinstance(self.rule, TimeRule)
        return days(row_group.column(self.rule.column).decode())

    def train(self, row_group: LakeRowGroup, split: np.ndarray[Any, np.dtype[np.int8]]) -> TrainRows:
        """Return the rows that statistics are of."""
        mask = split == self.splits.index("train")
        day = days(row_group.column(self.rule.column).decode()) if isinstance(self.rule, TimeRule) else None
        return TrainRows(None if mask.all() else mask, row_group.column(self.label).decode(), row_group.hashes, day)


@dataclass
class SplitCounts:
    """Numbers of rows of each split, and of faulty labels."""

    rows: dict[str, int]
    #: Rows of all splits whose label is null, or neither 0 nor 1.
    null_labels: int = 0
    bad_labels: int = 0
    #: By day (since 1970) and lake file (its position): rows of all splits. Empty unless `Splitter.by_day`.
    days: dict[int, dict[int, int]] = field(default_factory=dict)


@dataclass
class LakeRows:
    """The files, where their row groups are, and how their rows are seen."""

    files: list[LakeFile]
    #: Layout of the row groups.
    layout: RowGroupLayout
    splitter: Splitter
    #: Folder of the row groups: one that all tasks see, or one of each host's own.
    folder: Location | HostFolder
    #: Folder of this run: files that tasks exchange, where all see one folder; else the driver's own files.
    scratch: Location
    counts: SplitCounts = field(default_factory=lambda: SplitCounts({}))
    #: Host that has decoded a file, by its key, where hosts have folders of their own
    #: (`headrace.lake.spark.tasks.numbered`).
    hosts: dict[str, str] = field(default_factory=dict)

    def tasks(self, spark: SparkSession | None) -> FileTasks:
        """Return the files, numbered, by the task that works on them."""
        groups = grouped(list(enumerate(self.files)), lambda pair: pair[1].size, cores_of(spark))
        return tuple(map(tuple, groups))

    def hosts_of(self, tasks: FileTasks) -> list[str | None]:
        """Return who has decoded the first file of each task; None: nobody."""
        return [self.hosts.get(task_files[0][1].key) for task_files in tasks]

    def scan(self, spark: SparkSession | None, visit: FileVisitor | None = None) -> list[Any]:
        """Count splits and labels (into `counts`), and let `visit` work on each file; its results, by file."""
        tasks = self.tasks(spark)
        work = ScanTask(tasks, self.folder, self.layout, self.splitter, visit)
        return self.noted(run_tasks(spark, len(tasks), work, self.hosts_of(tasks)))

    def noted(self, facts: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Put together what `FileScan` counted in each file, into `counts`; what visitors found, by file."""
        by_file = sorted(facts, key=lambda f: f["file"])
        rows = (
            np.array([f["splits"] for f in by_file], np.int64).reshape(len(by_file), len(self.splitter.splits)).sum(0)
        )
        self.counts = SplitCounts(
            {s: int(n) for s, n in zip(self.splitter.splits, rows, strict=True)},
            sum(f["null"] for f in by_file),
            sum(f["bad"] for f in by_file),
        )
        for f in by_file:
            for day, n in f["days"]:
                self.counts.days.setdefault(day, {})[f["file"]] = n
        decoded_before = sum(f["kept"] for f in by_file)
        _LOG.info("%d lake files, %d of them decoded by an earlier run", len(by_file), decoded_before)
        return [f["result"] for f in by_file]


@contextmanager
def lake_rows(
    workflow: Workflow,
    files: Sequence[LakeFile],
    splitter: Splitter,
    home: Location,
    extra: Mapping[str, ValueType],
    preparation: RowPreparation | None = None,
    host_scratch: HostScratch | None = None,
) -> Iterator[LakeRows]:
    """Yield the rows of data files; remove what an earlier run has left and this one does not need.

    Args:
        home: where the row groups of this pipeline are kept.
        extra: types of columns that the split needs besides those of the workflow.
        preparation: what makes the rows of the files'.
        host_scratch: where each host keeps them instead, if the hosts share no folder.
    """
    names = dict.fromkeys((*workflow.input_columns, workflow.label_column, *workflow.carried_columns))
    columns = {n: workflow.input_type(n) for n in names} | dict(extra)
    layout = RowGroupLayout(columns, preparation)
    key, run = layout.key, uuid.uuid4().hex[:8]
    sorted_files = sorted(files, key=lambda f: str(f.path))
    if host_scratch is not None:
        for entry in home.entries():
            if entry.name.startswith(RUN):
                entry.remove_quietly()
        scratch = home / f"{RUN}{run}"
        try:
            yield LakeRows(
                sorted_files, layout, splitter, HostFolder.for_files(host_scratch, key, run, sorted_files), scratch
            )
        finally:
            scratch.remove_quietly()
        return
    for entry in home.entries():
        if entry.name != key:
            entry.remove_quietly()
    prune(home / key, (file.key for file in sorted_files))
    scratch = home / f"{RUN}{run}"
    (home / key).make_dir()
    scratch.make_dir()
    try:
        yield LakeRows(sorted_files, layout, splitter, home / key, scratch)
    finally:
        scratch.remove_quietly()


@dataclass(frozen=True)
class ScanTask:
    """The first pass, in a task: decode what is not decoded, count, visit."""

    tasks: FileTasks
    folder: Location | HostFolder
    layout: RowGroupLayout
    splitter: Splitter
    visit: FileVisitor | None

    def __call__(self, task: int) -> Iterator[dict[str, Any]]:
        for scan in self.files(task):
            result = None if self.visit is None else self.visit(scan.number, scan.rows())
            yield scan.facts(result)

    def files(self, task: int) -> Iterator[FileScan]:
        """Yield the files of a task."""
        for number, file in self.tasks[task]:
            yield FileScan(number, self.splitter, *row_groups(file, self.folder, self.layout))


class FileScan:
    """The rows of a lake file, which are counted as they are gone through."""

    def __init__(self, number: int, splitter: Splitter, row_groups: Sequence[LakeRowGroup], was_decoded: bool) -> None:
        """Scan row groups. `number`: of the file. `was_decoded`: whether an earlier run has decoded it."""
        self.number, self._splitter, self._row_groups, self._was_decoded = (
            number,
            splitter,
            iter(row_groups),
            was_decoded,
        )
        self._splits = np.zeros(len(splitter.splits), np.int64)
        self._days: dict[int, int] = {}
        self._faults = np.zeros(2, np.int64)

    def rows(self) -> Iterator[tuple[LakeRowGroup, TrainRows]]:
        """Yield the row groups that were not yet visited, one in memory at a time."""
        for row_group in self._row_groups:
            split = self._splitter.split(row_group)
            self._splits += [np.count_nonzero(split == k) for k in range(len(self._splits))]
            day = self._splitter.days(row_group)
            if day is not None:
                for d, n in zip(*np.unique(day[split >= 0], return_counts=True), strict=True):
                    self._days[int(d)] = self._days.get(int(d), 0) + int(n)
            self._faults += label_faults(row_group.column(self._splitter.label), split >= 0)
            yield row_group, self._splitter.train(row_group, split)

    def facts(self, result: Any = None) -> dict[str, Any]:
        """Return what was counted in the whole file (JSON), and the result of the visitor."""
        for _ in self.rows():  # files that no caller has visited
            pass
        null, bad = self._faults.tolist()
        return {
            "file": self.number,
            "splits": self._splits.tolist(),
            "null": null,
            "bad": bad,
            "days": list(self._days.items()),
            "kept": self._was_decoded,
            "result": result,
        }


def label_faults(label: DictionaryColumn, inside: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[int, int]:
    """Return (null, neither 0 nor 1): rows `inside` with such a label."""
    values = to_numpy(doubles(label.values))
    null = label.values.is_null().to_numpy(zero_copy_only=False)
    bad = ~null & (values != 0) & (values != 1)
    if label.indices is None:
        return int(np.count_nonzero(null & inside)), int(np.count_nonzero(bad & inside))
    counts = count(label.indices, None if inside.all() else inside, len(values))
    return int(counts[null].sum()), int(counts[bad].sum())


def concatenated(parts: Iterable[pa.Table], path: Location) -> list[int]:
    """Write tables behind each other as Arrow streams; where each begins."""
    starts = []
    with path.new_file() as partial, pa.OSFile(str(partial), "wb") as sink:
        for table in parts:
            starts.append(sink.tell())
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
    return starts


def table_at(path: Location, start: int) -> pa.Table:
    """Return a table that `concatenated` wrote, memory-mapped."""
    source = pa.memory_map(str(path.local_path()))
    source.seek(start)
    return pa.ipc.open_stream(source).read_all()


#: Split number of a row that is in none.
DROPPED = -1
_DAY_US = 86_400_000_000

SplitCodes = npt.NDArray[np.int8]
DayNumbers = npt.NDArray[np.int64]


def split_codes(rule: Rule, splits: Sequence[str], columns: Mapping[str, DictionaryColumn]) -> SplitCodes:
    """Return each row's position in `splits`, DROPPED for none. int8 [rows]."""
    if isinstance(rule, TimeRule):
        time = columns[rule.column].decode()
        if (only_day := _one_day(time)) is not None:
            inside = rule.first <= only_day <= rule.last
            return np.full(len(time), splits.index(rule.split_of(only_day)) if inside else DROPPED, np.int8)
        day = days(time)
        positions = np.where(day >= rule.valid, splits.index("valid"), splits.index("train"))
        if rule.test is not None:
            positions = np.where(day >= rule.test, splits.index("test"), positions)
        return np.where((day >= rule.first) & (day <= rule.last), positions, DROPPED).astype(np.int8)
    if isinstance(rule, ColumnRule):
        column = columns[rule.column]
        positions = pc.index_in(column.values.cast(pa.string()), pa.array(splits, pa.string()))
        codes: SplitCodes = pc.fill_null(positions, DROPPED).to_numpy(zero_copy_only=False).astype(np.int8)
        return codes if column.indices is None else codes[column.indices]
    train, valid = splits.index("train"), splits.index("valid")
    file, line = columns["_source_file"], columns["_source_line"].decode().to_numpy(zero_copy_only=False)
    if rule.file is None:
        return np.full(len(line), train, np.int8)
    # Arrow orders texts by their UTF-8 bytes, as Spark does. A sign: before, at, after the file.
    after = pc.greater(file.values, rule.file).to_numpy(zero_copy_only=False).astype(np.int8)
    is_in_file = pc.equal(file.values, rule.file).to_numpy(zero_copy_only=False)
    if file.indices is not None:
        after, is_in_file = after[file.indices], is_in_file[file.indices]
    return np.where((after > 0) | (is_in_file & (line >= rule.line)), valid, train).astype(np.int8)


def days(time: pa.Array) -> DayNumbers:
    """Return days since 1970 in UTC of a timestamp (in microseconds) or date column; before all days for null.

    int64 [n].
    """
    if (only_day := _one_day(time)) is not None:
        return np.full(len(time), only_day, np.int64)
    numbers: DayNumbers = pc.fill_null(_numbers(time), np.iinfo(np.int64).min).to_numpy(zero_copy_only=False)
    return numbers if pa.types.is_date(time.type) else numbers // _DAY_US


def _one_day(time: pa.Array) -> int | None:
    """Return the day of all values, as most files of a lake by days have it; None: there are several, or nulls."""
    if not len(time) or time.null_count:
        return None
    ends = pc.min_max(_numbers(time)).as_py()
    first, last = (n if pa.types.is_date(time.type) else n // _DAY_US for n in (ends["min"], ends["max"]))
    return first if first == last else None


def _numbers(time: pa.Array) -> pa.Int64Array:
    """Return microseconds, or days."""
    return (time.cast(pa.int32()) if pa.types.is_date(time.type) else time).cast(pa.int64())
