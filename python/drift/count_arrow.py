"""Counting statistics with NumPy in tasks that Spark schedules: over lake files, over a frame, over the dataset."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.dataset.parquet import lists
from headrace.drift import columns
from headrace.drift.bins import Bins
from headrace.drift.column_statistics import ColumnStatistics
from headrace.drift.columns import MeasuredColumn, SplitStatistics, StatisticsByColumn, bins_of
from headrace.drift.count_spark import count_frame, dataset_frame
from headrace.features.engines.arrow.lake_file import LakeFile, LakeRowGroup, row_groups
from headrace.features.engines.arrow.lake_rows import LakeRows
from headrace.features.functions.spark_expressions import col
from headrace.features.functions.timestamps import spark_micros
from headrace.features.layout.files import Engine
from headrace.features.types import ValueType
from headrace.lake.exchange import gathered
from headrace.lake.tasks import cores_of, grouped, run_tasks
from headrace.storage import Location

_BATCH_ROWS = 65_536


def measure_frame(
    frame: DataFrame,
    split: str,
    splits: Sequence[str],
    measured: Sequence[MeasuredColumn],
    train_rows: int,
    quantiles: int,
    top: int,
    engine: Engine = "arrow",
) -> SplitStatistics:
    """SplitStatistics of raw columns, in two passes: the sample, then all rows.

    Args:
        frame: the rows of all splits, with `_source_file` and `_source_line`.
        split: name of the column that says the split.
        splits: its values; the first is the one that fixes the bins.
        measured: from `input_columns`.
        train_rows: rows of the first split.
        quantiles: bins of a number, about.
        top: values of a category that get a bin.
        engine: who counts: NumPy in tasks, or a Spark plan.
    """
    index = F.coalesce(*[F.when(F.col(split) == s, F.lit(i)) for i, s in enumerate(splits)])
    # Columns have numbers for names: a dot in a name would be a field's.
    wanted = [_plain(m, frame).alias(f"c{i}") for i, m in enumerate(measured)]
    sample = frame.where(F.col(split) == splits[0])
    limit = _hash_limit(train_rows)
    if limit is not None:
        sample = sample.where(F.xxhash64("_source_file", "_source_line") < F.lit(limit))
    taken = sample.select(*wanted).toArrow()
    bins = tuple(bins_of(m, [_array(taken.column(i))], quantiles, top) for i, m in enumerate(measured))
    rows = frame.select(index.alias("split"), *wanted)
    if engine == "spark":
        return SplitStatistics(tuple(measured), bins, tuple(splits), count_frame(rows, measured, bins))
    task = _CountTask(tuple(measured), bins)
    found = [json.loads(r[0]) for r in rows.mapInArrow(task.frame, "found string").collect()]
    return SplitStatistics(task.measured, bins, tuple(splits), task.merged(found))


def measure_lake(
    spark: SparkSession, rows: LakeRows, measured: Sequence[MeasuredColumn], train_rows: int, quantiles: int, top: int
) -> SplitStatistics:
    """`measure_frame` where the rows are lake files: the same result, and no row passes through the JVM.

    The sample is taken here, where the files' row groups are seen: of these, already decoded, it looks at the hashes
    alone. Where hosts have folders of their own, tasks take it.
    """
    sample = _SampleTask(tuple(m.name for m in measured), rows, _hash_limit(train_rows))
    if isinstance(rows.folder, Location):
        taken = [table for number in range(len(rows.files)) for table in sample(number)]
    else:
        taken = gathered(spark, len(rows.files), sample, [rows.hosts.get(f.key) for f in rows.files])
    whole = pa.concat_tables(taken)
    bins = tuple(bins_of(m, [_array(whole.column(i))], quantiles, top) for i, m in enumerate(measured))
    task = _CountTask(tuple(measured), bins)
    groups = grouped(rows.files, lambda f: f.size, cores_of(spark))
    work, hosts = _CountLakeTask(task, rows, tuple(map(tuple, groups))), [rows.hosts.get(g[0].key) for g in groups]
    return SplitStatistics(
        task.measured, bins, rows.splitter.splits, task.merged(run_tasks(spark, len(groups), work, hosts))
    )


def measure_dataset(
    spark: SparkSession,
    folder: Location,
    splits: Sequence[str],
    measured: Sequence[MeasuredColumn],
    quantiles: int,
    top: int,
    engine: Engine = "arrow",
) -> SplitStatistics:
    """SplitStatistics of features, from the dataset's files: `folder`/SPLIT/*.parquet, which the executors see too.

    Rows stand in them in the order of a hash, so the first ones of the training split are a fair sample; where files
    are by day, the first ones of each.
    """
    listed = [(i, p) for i, s in enumerate(splits) for p in (folder / s).entries() if p.suffix == ".parquet"]
    taken = _head([path for i, path in listed if i == 0], [m.name for m in measured])
    bins = tuple(bins_of(m, _padded(m, _array(taken.column(m.name))), quantiles, top) for m in measured)
    if engine == "spark":
        frame = dataset_frame(spark, listed, measured)
        return SplitStatistics(tuple(measured), bins, tuple(splits), count_frame(frame, measured, bins))
    task = _CountTask(tuple(measured), bins)
    groups = grouped(listed, lambda pair: pair[1].size(), cores_of(spark))
    work = _CountDatasetTask(task, tuple(map(tuple, groups)))
    return SplitStatistics(task.measured, bins, tuple(splits), task.merged(run_tasks(spark, len(groups), work)))


@dataclass(frozen=True)
class _CountTask:
    """Columns and their bins. Pickled into tasks; what they find are JSON records of (split, column)."""

    measured: tuple[MeasuredColumn, ...]
    bins: tuple[Bins, ...]

    def tally(self, tallies: StatisticsByColumn, split: int, i: int) -> ColumnStatistics:
        return tallies.setdefault((split, i), ColumnStatistics(self.bins[i]))

    def frame(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Batches of (split, input columns in order)."""
        tallies: StatisticsByColumn = {}
        for batch in batches:
            splits = batch.column(0).to_numpy()
            present = np.unique(splits)
            for split in present.tolist():
                mine = batch if len(present) == 1 else batch.filter(pa.array(splits == split))
                for i, measured in enumerate(self.measured):
                    values, missing = measured.values([mine.column(i + 1)])
                    self.tally(tallies, split, i).add(values, missing, mine.num_rows)
        yield pa.RecordBatch.from_pydict({"found": pa.array(map(json.dumps, packed(tallies)), pa.string())})

    def row_group(
        self, tallies: StatisticsByColumn, row_group: LakeRowGroup, split: np.ndarray[Any, np.dtype[np.int8]]
    ) -> None:
        """A row group of a lake file, and each row's split (below 0: none)."""
        for s in np.unique(split[split >= 0]).tolist():
            mask = split == s
            rows = int(np.count_nonzero(mask))
            for i, measured in enumerate(self.measured):
                values, missing, times = measured.weighed(
                    row_group.column(measured.name), None if rows == len(mask) else mask
                )
                self.tally(tallies, s, i).add(values, missing, rows, times)

    def file(self, tallies: StatisticsByColumn, split: int, path: Location) -> None:
        """A file of the dataset; where that is in a store, the host of the task fetches it."""
        names = [m.name for m in self.measured]
        with pq.ParquetFile(path.local_path()) as file:
            for batch in file.iter_batches(_BATCH_ROWS, columns=names, use_threads=False):
                for i, measured in enumerate(self.measured):
                    values, missing = measured.values(_padded(measured, batch.column(measured.name)))
                    self.tally(tallies, split, i).add(values, missing, batch.num_rows)

    def merged(self, found: Iterable[dict[str, Any]]) -> StatisticsByColumn:
        """Sums of what the tasks found, in their order."""
        tallies: StatisticsByColumn = {}
        for record in found:
            (split, i), part = record["of"], record["tally"]
            self.tally(tallies, split, i).merge(ColumnStatistics.unpacked(self.bins[i], part))
        return tallies


def packed(tallies: StatisticsByColumn) -> Iterator[dict[str, Any]]:
    """As JSON records."""
    return ({"of": list(key), "tally": tally.packed()} for key, tally in tallies.items())


@dataclass(frozen=True)
class _SampleTask:
    """Of a file the training rows that bins are made of: the columns, numbers for names."""

    names: tuple[str, ...]
    rows: LakeRows
    limit: int | None

    def __call__(self, number: int) -> Iterator[pa.Table]:
        train = self.rows.splitter.splits.index("train")
        for row_group in row_groups(self.rows.files[number], self.rows.folder, self.rows.layout)[0]:
            mask = self.rows.splitter.split(row_group) == train
            if self.limit is not None:
                mask &= row_group.hashes < self.limit
            chosen = np.flatnonzero(mask)
            found = [row_group.column(name).take(chosen) for name in self.names]
            yield pa.table(found, names=[str(i) for i in range(len(found))])


@dataclass(frozen=True)
class _CountLakeTask:
    task: _CountTask
    rows: LakeRows
    groups: tuple[tuple[LakeFile, ...], ...]

    def __call__(self, number: int) -> Iterator[dict[str, Any]]:
        tallies: StatisticsByColumn = {}
        for file in self.groups[number]:
            for row_group in row_groups(file, self.rows.folder, self.rows.layout)[0]:
                self.task.row_group(tallies, row_group, self.rows.splitter.split(row_group))
        return packed(tallies)


@dataclass(frozen=True)
class _CountDatasetTask:
    task: _CountTask
    groups: tuple[tuple[tuple[int, Location], ...], ...]

    def __call__(self, number: int) -> Iterator[dict[str, Any]]:
        tallies: StatisticsByColumn = {}
        for split, path in self.groups[number]:
            self.task.file(tallies, split, path)
        return packed(tallies)


def _hash_limit(rows: int) -> int | None:
    """Rows whose hash is below it are about SAMPLE_ROWS; by their identity alone, so always the same. None: all."""
    if rows <= columns.SAMPLE_ROWS:
        return None
    return int(-(2.0**63) + columns.SAMPLE_ROWS / rows * 2.0**64)


def _plain(measured: MeasuredColumn, frame: DataFrame) -> Column:
    """A raw column in a type that counts; moments as seconds since 1970."""
    x, type_ = col(measured.name), dict(frame.dtypes)[measured.name]
    if type_.startswith("decimal"):
        return x.cast("double")
    if measured.kind == "time":
        return spark_micros(x, ValueType("date" if type_ == "date" else "timestamp")).cast("double") / F.lit(1e6)
    return x


def _head(paths: Sequence[Location], names: Sequence[str]) -> pa.Table:
    """The first rows of files; of files by day, an even share of each."""
    parts: list[pa.Table] = []
    rows = 0
    if any(path.name.startswith("day-") for path in paths):
        sizes = [pq.read_metadata(path).num_rows for path in paths]
        share = min(1.0, columns.SAMPLE_ROWS / max(sum(sizes), 1))
        for path, size in zip(paths, sizes, strict=True):
            if wanted := round(size * share):
                with pq.ParquetFile(path) as file:
                    parts.append(pa.Table.from_batches([next(file.iter_batches(wanted, columns=list(names)))]))
        return pa.concat_tables(parts)
    for path in paths:
        if rows >= columns.SAMPLE_ROWS:
            break
        with pq.ParquetFile(path) as file:
            parts.append(file.read(columns=list(names)))
            rows += parts[-1].num_rows
    return pa.concat_tables(parts).slice(0, columns.SAMPLE_ROWS)


def _padded(measured: MeasuredColumn, column: pa.Array) -> list[pa.Array]:
    """A stored feature as the columns that it has in a batch."""
    if not measured.is_list:
        return [column]
    out = np.empty((len(column), measured.length), column.type.value_type.to_pandas_dtype())
    lists.pad(column, out, f"dataset: column '{measured.name}'")
    return [pa.array(out[:, i]) for i in range(measured.length)]


def _array(column: pa.ChunkedArray) -> pa.Array:
    return _joined(column.chunks) if column.num_chunks else pa.array([], column.type)


def _joined(arrays: Sequence[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
