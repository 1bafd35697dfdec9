"""Counting of column statistics: with NumPy in tasks that Spark schedules, or as a Spark plan.

The tasks read lake files or the dataset's files. The plan is for `engine: spark`, where rows stay on the GPU:
each row becomes one entry per value, (column, bin, value), and entries are added up by (split, column, bin): one
aggregate whose result is as small as the bins. On CPUs the tasks are several times as fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config.schema import NULL_CODE, OOV_CODE
from headrace.dataset import lists
from headrace.features.arrow.decode import LakeFile, LakeRowGroup, row_groups
from headrace.features.arrow.scan import LakeRows
from headrace.features.functions.spark_expressions import col, nan_to_null
from headrace.features.functions.timestamps import spark_micros
from headrace.features.layout.files import Engine
from headrace.features.types import ValueType
from headrace.lake.spark.exchange import gathered
from headrace.lake.spark.tasks import cores_of, grouped, run_tasks
from headrace.quality.drift import columns
from headrace.quality.drift.column_statistics import Bins, ColumnStatistics, NumberBins
from headrace.quality.drift.columns import MeasuredColumn, SplitStatistics, StatisticsByColumn, bins_of
from headrace.storage import Location

_MISSING = -1
#: Column number of an entry that only counts a row.
_ROW = -1
_DISTINCT_ERROR = 0.02

_BATCH_ROWS = 65_536


def count_frame(frame: DataFrame, measured: Sequence[MeasuredColumn], bins: Sequence[Bins]) -> StatisticsByColumn:
    """Count `frame`, (split int, c0, c1, ...) with a column for each of `measured`.

    Distinct values are estimated bin by bin (HyperLogLog++, Heule et al., 2013, 2 %) and added, since bins share none.
    """
    row = F.array(_entry(_ROW, F.lit(0), None, None))
    entries = [_entries(i, F.col(f"c{i}"), m, b) for i, (m, b) in enumerate(zip(measured, bins, strict=True))]
    exploded = frame.select("split", F.explode(F.concat(row, *entries)).alias("entry")).select("split", "entry.*")
    sums = (
        exploded.where(F.col("b").isNotNull())
        .groupBy("split", "m", "b")
        .agg(
            F.count(F.lit(1)).alias("n"),
            F.min("x").alias("low"),
            F.max("x").alias("high"),
            F.count("x").alias("finite"),
            F.sum("d").alias("sum"),
            F.sum(F.col("d") * F.col("d")).alias("squares"),
            F.approx_count_distinct("h", _DISTINCT_ERROR).alias("distinct"),
        )
        .toArrow()
    )
    return _tallies(sums, bins)


def dataset_frame(
    spark: SparkSession, files: Sequence[tuple[int, Location]], measured: Sequence[MeasuredColumn]
) -> DataFrame:
    """Return the frame that `count_frame` counts, from the dataset's files: (split's position, path)."""
    parts = []
    for split in dict.fromkeys(i for i, _ in files):
        rows = spark.read.parquet(*[p.spark_path for i, p in files if i == split])
        columns = [_feature(m).alias(f"c{i}") for i, m in enumerate(measured)]
        parts.append(rows.select(F.lit(split).alias("split"), *columns))
    return reduce(DataFrame.union, parts)


def _feature(measured: MeasuredColumn) -> Column:
    """Return a feature as `MeasuredColumn.values` sees it: codes without 0, those that say unknown as one."""
    zero = F.lit(NULL_CODE if measured.coded else 0.0).cast("int" if measured.coded else "float")
    columns = [col(measured.name)]
    if measured.is_list:
        columns = [F.coalesce(F.get(columns[0], F.lit(i)), zero) for i in range(measured.length)]
    if measured.coded:
        if measured.unknown:
            known = [F.when(x > measured.unknown, x).when(x != NULL_CODE, OOV_CODE) for x in columns]
        else:  # without a vocabulary: raw ids, which may be negative
            known = [F.when(x != NULL_CODE, x) for x in columns]
        if not measured.is_list:
            return known[0]
        return F.filter(F.array(*known), lambda x: x.isNotNull())
    return F.array(*columns) if measured.is_list else columns[0]


def _entries(i: int, x: Column, measured: MeasuredColumn, bins: Bins) -> Column:
    """Return the entries of a column: one per scalar or element of a list, or one that marks a missing value."""
    no_value = F.array(_entry(i, F.lit(_MISSING), None, None))

    def plain(value: Column) -> Column:
        if isinstance(bins, NumberBins):
            value = nan_to_null(value.cast("double")) + F.lit(0.0)  # turns -0.0 into 0.0
        return value

    def entry(value: Column) -> Column:
        value = plain(value)
        return _entry(i, _bin(value, bins), value, bins.centre if isinstance(bins, NumberBins) else None)

    if measured.is_list:
        return F.when(F.coalesce(F.size(x), F.lit(0)) > 0, F.transform(x, entry)).otherwise(no_value)
    return F.when(plain(x).isNull(), no_value).otherwise(F.array(entry(x)))


def _entry(i: int, bin_: Column, value: Column | None, centre: float | None) -> Column:
    """(m: column, b: bin, x: finite number, d: x about the centre, h: hash of the value)."""
    x: Column = F.lit(None).cast("double")
    d: Column = x
    if value is not None and centre is not None:
        infinity = F.lit(float("inf"))
        x = F.when((value < infinity) & (value > -infinity), value)
        d = x - F.lit(centre)
    h = F.lit(None).cast("bigint") if value is None else F.xxhash64(value)
    return F.struct(F.lit(i).alias("m"), bin_.cast("int").alias("b"), x.alias("x"), d.alias("d"), h.alias("h"))


def _bin(x: Column, bins: Bins) -> Column:
    """Return the bin of a value; null of null."""
    if isinstance(bins, NumberBins):
        bin_number: Column = F.lit(0)
        for edge in bins.edges:
            bin_number = bin_number + F.when(x >= F.lit(edge), 1).otherwise(0)
    else:
        bin_number = F.coalesce(
            *[F.when(x == F.lit(v), F.lit(i)) for i, v in enumerate(bins.values)], F.lit(bins.size - 1)
        )
    return F.when(x.isNotNull(), bin_number)


def _tallies(sums: pa.Table, bins: Sequence[Bins]) -> StatisticsByColumn:
    rows: dict[int, int] = {}
    tallies: StatisticsByColumn = {}
    # In a fixed order, so that sums do not depend on which task ended first.
    for r in sums.sort_by([("split", "ascending"), ("m", "ascending"), ("b", "ascending")]).to_pylist():
        if r["m"] == _ROW:  # sorted first, before the bins that need it
            rows[r["split"]] = r["n"]
            continue
        tally = tallies.setdefault((r["split"], r["m"]), ColumnStatistics(bins[r["m"]], rows[r["split"]], estimate=0))
        if r["b"] == _MISSING:
            tally.missing += r["n"]
            continue
        tally.counts[r["b"]] += r["n"]
        tally.estimate = (tally.estimate or 0) + r["distinct"]
        if r["finite"]:
            tally.low, tally.high = min(tally.low, r["low"]), max(tally.high, r["high"])
            tally.finite += r["finite"]
            tally.sum += r["sum"]
            tally.squares += r["squares"]
    return tallies


def measure_frame(
    frame: DataFrame,
    split: str,
    splits: Sequence[str],
    measured: Sequence[MeasuredColumn],
    train_rows: int,
    quantiles: int,
    top: int,
) -> SplitStatistics:
    """Measure raw columns by Spark plans in two passes: the sample, then all rows.

    Args:
        frame: the rows of all splits, with `_source_file` and `_source_line`.
        split: name of the column that says the split.
        splits: its values; the first is the one that fixes the bins.
        measured: from `input_columns`.
        train_rows: rows of the first split.
        quantiles: bins of a number, about.
        top: values of a category that get a bin.
    """
    index = F.coalesce(*[F.when(F.col(split) == s, F.lit(i)) for i, s in enumerate(splits)])
    # Columns are numbered: Spark takes a dot in a column's name for the separator of a field.
    measured_columns = [_plain(m, frame).alias(f"c{i}") for i, m in enumerate(measured)]
    sample = frame.where(F.col(split) == splits[0])
    limit = _hash_limit(train_rows)
    if limit is not None:
        sample = sample.where(F.xxhash64("_source_file", "_source_line") < F.lit(limit))
    sample_rows = sample.select(*measured_columns).toArrow()
    bins = tuple(bins_of(m, [_array(sample_rows.column(i))], quantiles, top) for i, m in enumerate(measured))
    rows = frame.select(index.alias("split"), *measured_columns)
    return SplitStatistics(tuple(measured), bins, tuple(splits), count_frame(rows, measured, bins))


def measure_lake(
    spark: SparkSession, rows: LakeRows, measured: Sequence[MeasuredColumn], train_rows: int, quantiles: int, top: int
) -> SplitStatistics:
    """Measure raw columns of lake files: the result of `measure_frame`, and no row passes through the JVM.

    The driver takes the sample: it reads only the hashes of row groups that are decoded already. Where hosts have
    separate folders, tasks take it.
    """
    sample = _SampleTask(tuple(m.name for m in measured), rows, _hash_limit(train_rows))
    if isinstance(rows.folder, Location):
        sample_tables = [table for number in range(len(rows.files)) for table in sample(number)]
    else:
        sample_tables = gathered(spark, len(rows.files), sample, [rows.hosts.get(f.key) for f in rows.files])
    sample_rows = pa.concat_tables(sample_tables)
    bins = tuple(bins_of(m, [_array(sample_rows.column(i))], quantiles, top) for i, m in enumerate(measured))
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
    """Measure features in the dataset's files: `folder`/SPLIT/*.parquet, which the executors see too.

    Rows stand in them in the order of a hash, so the first ones of the training split are a fair sample; where files
    are by day, the first ones of each.
    """
    listed = [(i, p) for i, s in enumerate(splits) for p in (folder / s).entries() if p.suffix == ".parquet"]
    sample_rows = _head([path for i, path in listed if i == 0], [m.name for m in measured])
    bins = tuple(bins_of(m, _padded(m, _array(sample_rows.column(m.name))), quantiles, top) for m in measured)
    if engine == "spark":
        frame = dataset_frame(spark, listed, measured)
        return SplitStatistics(tuple(measured), bins, tuple(splits), count_frame(frame, measured, bins))
    task = _CountTask(tuple(measured), bins)
    groups = grouped(listed, lambda pair: pair[1].size(), cores_of(spark))
    work = _CountDatasetTask(task, tuple(map(tuple, groups)))
    return SplitStatistics(task.measured, bins, tuple(splits), task.merged(run_tasks(spark, len(groups), work)))


@dataclass(frozen=True)
class _CountTask:
    """Columns and their bins. Pickled into tasks, which return JSON records of (split, column)."""

    measured: tuple[MeasuredColumn, ...]
    bins: tuple[Bins, ...]

    def tally(self, tallies: StatisticsByColumn, split: int, i: int) -> ColumnStatistics:
        return tallies.setdefault((split, i), ColumnStatistics(self.bins[i]))

    def row_group(
        self, tallies: StatisticsByColumn, row_group: LakeRowGroup, split: np.ndarray[Any, np.dtype[np.int8]]
    ) -> None:
        """Count a row group of a lake file; split: each row's split (below 0: none)."""
        for s in np.unique(split[split >= 0]).tolist():
            mask = split == s
            rows = int(np.count_nonzero(mask))
            for i, measured in enumerate(self.measured):
                values, missing, times = measured.weighed(
                    row_group.column(measured.name), None if rows == len(mask) else mask
                )
                self.tally(tallies, s, i).add(values, missing, rows, times)

    def file(self, tallies: StatisticsByColumn, split: int, path: Location) -> None:
        """Count a file of the dataset; the task's host fetches it from a store."""
        names = [m.name for m in self.measured]
        with pq.ParquetFile(path.local_path()) as file:
            for batch in file.iter_batches(_BATCH_ROWS, columns=names, use_threads=False):
                for i, measured in enumerate(self.measured):
                    values, missing = measured.values(_padded(measured, batch.column(measured.name)))
                    self.tally(tallies, split, i).add(values, missing, batch.num_rows)

    def merged(self, records: Iterable[dict[str, Any]]) -> StatisticsByColumn:
        """Merge the tasks' records, in their order."""
        tallies: StatisticsByColumn = {}
        for record in records:
            (split, i), part = record["of"], record["tally"]
            self.tally(tallies, split, i).merge(ColumnStatistics.unpacked(self.bins[i], part))
        return tallies


def packed(tallies: StatisticsByColumn) -> Iterator[dict[str, Any]]:
    """Return statistics as JSON records."""
    return ({"of": list(key), "tally": tally.packed()} for key, tally in tallies.items())


@dataclass(frozen=True)
class _SampleTask:
    """Task that samples the training rows of a file, from which bins are made; columns are named by numbers."""

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
            sample_columns = [row_group.column(name).take(chosen) for name in self.names]
            yield pa.table(sample_columns, names=[str(i) for i in range(len(sample_columns))])


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
    """Return rows whose hash is below it are about SAMPLE_ROWS; by their identity alone, so always the same.

    None: all.
    """
    if rows <= columns.SAMPLE_ROWS:
        return None
    return int(-(2.0**63) + columns.SAMPLE_ROWS / rows * 2.0**64)


def _plain(measured: MeasuredColumn, frame: DataFrame) -> Column:
    """Return a raw column in a type that counts; moments as seconds since 1970."""
    x, type_ = col(measured.name), dict(frame.dtypes)[measured.name]
    if type_.startswith("decimal"):
        return x.cast("double")
    if measured.kind == "time":
        return spark_micros(x, ValueType("date" if type_ == "date" else "timestamp")).cast("double") / F.lit(1e6)
    return x


def _head(paths: Sequence[Location], names: Sequence[str]) -> pa.Table:
    """Return the first rows of files; of files by day, an even share of each."""
    parts: list[pa.Table] = []
    rows = 0
    if any(path.name.startswith("day-") for path in paths):
        sizes = [pq.read_metadata(path).num_rows for path in paths]
        share = min(1.0, columns.SAMPLE_ROWS / max(sum(sizes), 1))
        for path, size in zip(paths, sizes, strict=True):
            if n_rows := round(size * share):
                with pq.ParquetFile(path) as file:
                    parts.append(pa.Table.from_batches([next(file.iter_batches(n_rows, columns=list(names)))]))
        return pa.concat_tables(parts)
    for path in paths:
        if rows >= columns.SAMPLE_ROWS:
            break
        with pq.ParquetFile(path) as file:
            parts.append(file.read(columns=list(names)))
            rows += parts[-1].num_rows
    return pa.concat_tables(parts).slice(0, columns.SAMPLE_ROWS)


def _padded(measured: MeasuredColumn, column: pa.Array) -> list[pa.Array]:
    """Return a stored feature as the columns that it has in a batch."""
    if not measured.is_list:
        return [column]
    out = np.empty((len(column), measured.length), column.type.value_type.to_pandas_dtype())
    lists.pad(column, out, f"dataset: column '{measured.name}'")
    return [pa.array(out[:, i]) for i in range(measured.length)]


def _array(column: pa.ChunkedArray) -> pa.Array:
    return _joined(column.chunks) if column.num_chunks else pa.array([], column.type)


def _joined(arrays: Sequence[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
