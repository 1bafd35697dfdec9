"""The events of a day as lake files: what the Arrow engine works on where no table operator stands between.

Spark schedules tasks over the data files of the pinned version; each file is decoded once into pieces
(engines.arrow.lake_file), which are kept for the next day's run. Nothing of the rows passes through the JVM.
"""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from headrace.features.engines.arrow.aggregate import TrainRows
from headrace.features.engines.arrow.dictionary import Cells
from headrace.features.engines.arrow.lake_file import FILE, LINE, LakeFile, Piece, layout_key, pieces, prune
from headrace.features.engines.arrow.split import days, split_codes
from headrace.features.engines.arrow.tasks import cores_of, grouped, run_tasks
from headrace.features.functions.arrays import doubles, to_numpy
from headrace.features.layout.split_rule import Rule, TimeRule, columns_of
from headrace.features.types import ValueType
from headrace.features.workflow.workflow import Workflow
from headrace.lake.delta.log import DataFile

_LOG = logging.getLogger("headrace.features")

_SCRATCH = "scratch."


class Measure(Protocol):
    """Work over the pieces of a file, in a task: what is to be known of their training rows."""

    def __call__(self, number: int, found: Sequence[tuple[Piece, TrainRows]]) -> Any:
        """`number`: of the file. Returns JSON."""
        ...


@dataclass(frozen=True)
class View:
    """How a row of a piece is seen: its split, its label, its day. Pickled into tasks."""

    rule: Rule
    splits: tuple[str, ...]
    label: str
    #: Whether rows are counted and written by day (a split by time).
    by_day: bool = False

    def split(self, piece: Piece) -> np.ndarray[Any, np.dtype[np.int8]]:
        """Each row's position in `splits`."""
        names = (*columns_of(self.rule), FILE, LINE)
        return split_codes(self.rule, self.splits, {n: piece.cells(n) for n in names})

    def days(self, piece: Piece) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """Each row's day, as a number since 1970; None unless `by_day`."""
        if not self.by_day:
            return None
        assert isinstance(self.rule, TimeRule)
        return days(piece.cells(self.rule.column).rows())

    def train(self, piece: Piece, split: np.ndarray[Any, np.dtype[np.int8]]) -> TrainRows:
        """The rows that statistics are of."""
        mask = split == self.splits.index("train")
        day = days(piece.cells(self.rule.column).rows()) if isinstance(self.rule, TimeRule) else None
        return TrainRows(None if mask.all() else mask, piece.cells(self.label).rows(), piece.hashes, day)


@dataclass
class SplitCounts:
    """What the splits hold."""

    rows: dict[str, int]
    #: Rows of all splits whose label is null, or neither 0 nor 1.
    null_labels: int = 0
    bad_labels: int = 0
    #: By day (since 1970) and lake file (its position): rows of all splits. Empty unless `View.by_day`.
    days: dict[int, dict[int, int]] = field(default_factory=dict)


@dataclass
class LakeRows:
    """The files, where their pieces are, and how their rows are seen."""

    files: list[LakeFile]
    #: Of the pieces: name -> type.
    columns: Mapping[str, ValueType]
    view: View
    #: Of the pieces; tasks see it too.
    folder: Path
    #: For what tasks hand to each other in this run.
    scratch: Path
    counts: SplitCounts = field(default_factory=lambda: SplitCounts({}))

    def measure(self, spark: SparkSession | None, measure: Measure | None = None) -> list[Any]:
        """Count splits and labels (into `counts`), and let `measure` look at each file; its answers, by file."""
        tasks = grouped(list(enumerate(self.files)), lambda pair: pair[1].size, cores_of(spark))
        work = _Look(tuple(tuple(t) for t in tasks), str(self.folder), dict(self.columns), self.view, measure)
        found = sorted(run_tasks(spark, len(tasks), work), key=lambda f: f["file"])
        rows = np.array([f["splits"] for f in found], np.int64).reshape(len(found), len(self.view.splits)).sum(0)
        self.counts = SplitCounts(
            {s: int(n) for s, n in zip(self.view.splits, rows, strict=True)},
            sum(f["null"] for f in found),
            sum(f["bad"] for f in found),
        )
        for f in found:
            for day, n in f["days"]:
                self.counts.days.setdefault(day, {})[f["file"]] = n
        kept = sum(f["kept"] for f in found)
        _LOG.info("%d lake files, %d of them decoded by an earlier run", len(found), kept)
        return [f["answer"] for f in found]


@contextmanager
def lake_rows(
    workflow: Workflow, files: Sequence[DataFile], view: View, home: Path, extra: Mapping[str, ValueType]
) -> Iterator[LakeRows]:
    """The rows of data files; what an earlier run left and this one does not need is removed.

    Args:
        home: where the pieces of this pipeline are kept.
        extra: types of columns that the split needs besides those of the workflow.
    """
    names = dict.fromkeys((*workflow.input_columns, workflow.label_column, *workflow.carried_columns))
    columns = {n: workflow.input_type(n) for n in names} | dict(extra)
    key = layout_key(columns)
    for other in home.iterdir() if home.is_dir() else ():
        if other.name != key:
            shutil.rmtree(other, ignore_errors=True)
    wanted = [LakeFile(str(f.path), f.path.size()) for f in sorted(files, key=lambda f: str(f.path))]
    prune(home / key, wanted)
    scratch = home / f"{_SCRATCH}{uuid.uuid4().hex[:8]}"
    (home / key).mkdir(parents=True, exist_ok=True)
    scratch.mkdir()
    try:
        yield LakeRows(wanted, columns, view, home / key, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@dataclass(frozen=True)
class _Look:
    """Stage one, in a task: decode what is not decoded, count, measure."""

    tasks: tuple[tuple[tuple[int, LakeFile], ...], ...]
    folder: str
    columns: Mapping[str, ValueType]
    view: View
    measure: Measure | None

    def __call__(self, task: int) -> Iterator[dict[str, Any]]:
        for number, file in self.tasks[task]:
            found, kept = pieces(file, Path(self.folder), self.columns)
            splits = np.zeros(len(self.view.splits), np.int64)
            by_day: dict[int, int] = {}
            null = bad = 0
            rows: list[tuple[Piece, TrainRows]] = []
            for piece in found:
                split = self.view.split(piece)
                splits += np.bincount(split[split >= 0], minlength=len(splits))
                mine = self.view.train(piece, split)
                day = self.view.days(piece)
                if day is not None:
                    for d, count in zip(*np.unique(day[split >= 0], return_counts=True), strict=True):
                        by_day[int(d)] = by_day.get(int(d), 0) + int(count)
                n, b = label_faults(piece.cells(self.view.label), split >= 0)
                null, bad = null + n, bad + b
                rows.append((piece, mine))
            answer = self.measure(number, rows) if self.measure is not None else None
            yield {
                "file": number,
                "splits": splits.tolist(),
                "null": null,
                "bad": bad,
                "days": list(by_day.items()),
                "kept": kept,
                "answer": answer,
            }


def label_faults(label: Cells, inside: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[int, int]:
    """(null, neither 0 nor 1): rows `inside` with such a label."""
    values = to_numpy(doubles(label.values))
    null = label.values.is_null().to_numpy(zero_copy_only=False)
    bad = ~null & (values != 0) & (values != 1)
    if label.index is None:
        return int(np.count_nonzero(null & inside)), int(np.count_nonzero(bad & inside))
    counts = np.bincount(label.index[inside], minlength=len(values))
    return int(counts[null].sum()), int(counts[bad].sum())


def concatenated(parts: Sequence[pa.Table], path: Path) -> list[int]:
    """Write tables behind each other as Arrow streams; where each begins."""
    starts = []
    with pa.OSFile(str(path), "wb") as sink:
        for table in parts:
            starts.append(sink.tell())
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
    return starts


def table_at(path: Path, start: int) -> pa.Table:
    """A table that `concatenated` wrote, memory-mapped."""
    source = pa.memory_map(str(path))
    source.seek(start)
    return pa.ipc.open_stream(source).read_all()
