"""Statistics of every input column and every feature, split by split: what came in today beside what was trained on.

Two passes over the events (a sample that fixes the bins, then all rows), one over the dataset's files. Spark schedules
the tasks, NumPy counts in them; what a task hands back is as small as its bins, and merges by addition:

- counts by bin (headrace.features.bins), missing rows, smallest and largest finite value: exact;
- mean and standard deviation from sums about the training median (shifted data: Chan, Golub and LeVeque, "Algorithms
  for computing the sample variance", 1983), added in the order of the partitions;
- the number of distinct values: exact up to 2,048, above it from the 2,048 smallest 64-bit hashes (k minimum values:
  Bar-Yossef et al., "Counting distinct elements in a data stream", 2002), with a standard error of 2.2 %.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.features.bins import Bins, NumberBins, ValueBins, describe
from headrace.features.columns import ValueType
from headrace.features.kernels import xxhash64_integers, xxhash64_strings
from headrace.features.lookup import Lookup
from headrace.features.spark_plan import col
from headrace.features.writer import Engine
from headrace.schema import NULL_CODE, OOV_CODE, Feature, Kind

_LOG = logging.getLogger("headrace.features")

U64 = npt.NDArray[np.uint64]

#: Rows that fix the bins.
SAMPLE_ROWS = 65_536
#: Smallest hashes that are kept of a column: below this many, the number of distinct values is exact.
_SMALLEST = 2048
_BATCH_ROWS = 65_536

#: category: its values are names. number: they have an order and a size. time: it moves on with the days by itself, so
#: only its ends and its gaps are of interest.
MeasuredKind = Literal["number", "category", "time"]


@dataclass(frozen=True)
class Measured:
    """A column whose statistics are wanted."""

    side: Literal["input", "feature"]
    name: str
    kind: MeasuredKind
    is_list: bool = False
    #: Features: the dataset's columns that hold it.
    physical: tuple[str, ...] = ()
    #: Features: values are codes, 0 means missing.
    coded: bool = False
    #: Features: the vocabulary of the codes; what it lacks has the codes 1..unknown, which count as one.
    vocabulary: str | None = None
    unknown: int = 0

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that are read."""
        return self.physical or (self.name,)

    def values(self, arrays: Sequence[pa.Array]) -> tuple[pa.Array, int]:
        """The values of a batch, flat and without nulls, and how many rows have none.

        Missing is null, NaN, a list without elements; of codes, 0 in all columns. A number feature is never missing.
        """
        if self.coded:
            codes = np.stack([a.to_numpy(zero_copy_only=False) for a in arrays], axis=1)
            there = codes != NULL_CODE
            if self.unknown > 1:
                codes[there & (codes <= self.unknown)] = OOV_CODE
            return pa.array(codes[there]), int(np.count_nonzero(~there.any(axis=1)))
        if self.physical:
            return pa.concat_arrays([a.cast(pa.float64()) for a in arrays]), 0
        (x,) = arrays
        if self.is_list:
            missing = len(x) - int(pc.sum(pc.greater(pc.list_value_length(x), 0)).as_py() or 0)
            return _drop(pc.list_flatten(x)), missing
        values = _drop(x)
        return values, len(x) - len(values)


def input_columns(types: Mapping[str, ValueType], features: Sequence[Feature]) -> list[Measured]:
    """The raw columns that features are made of, in their order.

    Integers that only become codes are categories (ids, an hour); other integers are numbers.
    """
    coded: dict[str, bool] = {}
    for feature in features:
        for source in feature.sources:
            coded[source] = coded.get(source, True) and feature.kind is Kind.CATEGORICAL
    found = []
    for name, only_codes in coded.items():
        type_ = types[name]
        kind: MeasuredKind = "number"
        if type_.element in ("timestamp", "date"):
            kind = "time"
        elif type_.element in ("string", "boolean") or (type_.is_integer and only_codes):
            kind = "category"
        found.append(Measured("input", name, kind, type_.is_list))
    return found


def feature_columns(features: Sequence[Feature]) -> list[Measured]:
    """The features, in the dataset's order."""
    return [
        Measured(
            "feature", f.name, "category" if f.kind is Kind.CATEGORICAL else "number", f.is_list, f.physical,
            f.kind is Kind.CATEGORICAL, f.vocabulary, getattr(f, "oov_buckets", 1) if f.vocabulary else 0,
        )
        for f in features
    ]  # fmt: skip


@dataclass
class Tally:
    """What was counted of a column in some rows; merges with that of other rows."""

    bins: Bins
    rows: int = 0
    missing: int = 0
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    low: float = math.inf
    high: float = -math.inf
    #: Finite values; the sums are about the bins' centre.
    finite: int = 0
    sum: float = 0.0
    squares: float = 0.0
    smallest: U64 = field(default_factory=lambda: np.zeros(0, np.uint64))
    #: Distinct values where somebody else has counted them.
    estimate: int | None = None

    def __post_init__(self) -> None:
        if not len(self.counts):
            self.counts = np.zeros(self.bins.size, np.int64)

    def add(self, values: pa.Array, missing: int, rows: int) -> None:
        """Count the values of `rows` rows. `values` has no null and no NaN."""
        self.rows += rows
        self.missing += missing
        if not len(values):
            return
        if isinstance(self.bins, NumberBins):
            x = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            self.counts += np.bincount(self.bins.index(x), minlength=self.bins.size)
            finite = x[np.isfinite(x)]
            if len(finite):
                self.low, self.high = min(self.low, float(finite.min())), max(self.high, float(finite.max()))
                self.finite += len(finite)
                with np.errstate(over="ignore", invalid="ignore"):
                    centred = finite - self.bins.centre
                    self.sum += float(centred.sum())
                    self.squares += float(np.square(centred).sum())
            hashes = xxhash64_integers((x + 0.0).view(np.int64))
        else:
            self.counts += np.bincount(self.bins.index(values), minlength=self.bins.size)
            if pa.types.is_string(values.type):
                hashes = xxhash64_strings(values.dictionary_encode().dictionary)
            else:
                hashes = xxhash64_integers(values.cast(pa.int64()).to_numpy(zero_copy_only=False))
        self._keep(hashes.view(np.uint64))

    def merge(self, other: Tally) -> None:
        """Add what was counted of other rows in the same bins."""
        self.rows += other.rows
        self.missing += other.missing
        self.counts = self.counts + other.counts
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.finite += other.finite
        self.sum += other.sum
        self.squares += other.squares
        self._keep(other.smallest)

    def _keep(self, hashes: U64) -> None:
        if len(self.smallest) == _SMALLEST:
            hashes = hashes[hashes < self.smallest[-1]]
        if len(hashes):
            self.smallest = np.unique(np.concatenate([self.smallest, hashes]))[:_SMALLEST]

    @property
    def values(self) -> int:
        """Values counted: of a list, its elements."""
        return int(self.counts.sum())

    @property
    def distinct(self) -> int:
        """Distinct values: exact below 2,048, else estimated."""
        if self.estimate is not None:
            return self.estimate
        if len(self.smallest) < _SMALLEST:
            return len(self.smallest)
        return round((_SMALLEST - 1) / (float(self.smallest[-1]) / 2.0**64))

    @property
    def mean(self) -> float | None:
        """Of the finite numbers."""
        if not self.finite or not isinstance(self.bins, NumberBins):
            return None
        return _finite(self.bins.centre + self.sum / self.finite)

    @property
    def std(self) -> float | None:
        """Sample standard deviation of the finite numbers; None of fewer than two."""
        if self.finite < 2:
            return None
        return _finite(math.sqrt(max(self.squares - self.sum * self.sum / self.finite, 0.0) / (self.finite - 1)))


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _drop(x: pa.Array) -> pa.Array:
    """Without nulls and NaN."""
    if pa.types.is_floating(x.type):
        return x.filter(pc.invert(pc.is_nan(x)), null_selection_behavior="drop")
    return x.drop_null()


Tallies = dict[tuple[int, int], Tally]


@dataclass(frozen=True)
class _Counting:
    """What runs on an executor: rows in, one row for each split and column out."""

    measured: tuple[Measured, ...]
    bins: tuple[Bins, ...]

    def events(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Batches of (split, input columns in order)."""
        tallies: Tallies = {}
        for batch in batches:
            splits = batch.column(0).to_numpy()
            present = np.unique(splits)
            for split in present.tolist():
                mine = batch if len(present) == 1 else batch.filter(pa.array(splits == split))
                self._add(tallies, split, mine.columns[1:], mine.num_rows)
        yield from _packed(tallies)

    def files(self, listed: Sequence[tuple[int, str]], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Batches of indexes into `listed`, (split, path) of the dataset's files."""
        tallies: Tallies = {}
        names = [c for m in self.measured for c in m.columns]
        for batch in batches:
            for i in batch.column(0).to_pylist():
                split, path = listed[i]
                with pq.ParquetFile(path) as file:
                    for rows in file.iter_batches(_BATCH_ROWS, columns=names):
                        self._add(tallies, split, [rows.column(n) for n in names], rows.num_rows)
        yield from _packed(tallies)

    def _add(self, tallies: Tallies, split: int, arrays: Sequence[pa.Array], rows: int) -> None:
        at = 0
        for i, (measured, bins) in enumerate(zip(self.measured, self.bins, strict=True)):
            width = len(measured.columns)
            values, missing = measured.values(arrays[at : at + width])
            tallies.setdefault((split, i), Tally(bins)).add(values, missing, rows)
            at += width


_PACKED = (
    "split int, measured int, rows bigint, missing bigint, counts array<bigint>, low double, high double, "
    "finite bigint, sum double, squares double, smallest array<bigint>"
)


def _packed(tallies: Tallies) -> Iterator[pa.RecordBatch]:
    keys = list(tallies)
    found = list(tallies.values())
    if keys:
        yield pa.RecordBatch.from_pydict(
            {
                "split": pa.array([k[0] for k in keys], pa.int32()),
                "measured": pa.array([k[1] for k in keys], pa.int32()),
                "rows": pa.array([t.rows for t in found], pa.int64()),
                "missing": pa.array([t.missing for t in found], pa.int64()),
                "counts": pa.array([t.counts for t in found], pa.list_(pa.int64())),
                "low": pa.array([t.low for t in found], pa.float64()),
                "high": pa.array([t.high for t in found], pa.float64()),
                "finite": pa.array([t.finite for t in found], pa.int64()),
                "sum": pa.array([t.sum for t in found], pa.float64()),
                "squares": pa.array([t.squares for t in found], pa.float64()),
                "smallest": pa.array([t.smallest.view(np.int64) for t in found], pa.list_(pa.int64())),
            }
        )


def _merged(packed: pa.Table, bins: Sequence[Bins]) -> Tallies:
    """Sums of what the tasks handed back, in the order of the partitions."""
    tallies: Tallies = {}
    for r in packed.to_pylist():
        key = (r["split"], r["measured"])
        part = Tally(
            bins[r["measured"]], r["rows"], r["missing"], np.array(r["counts"], np.int64), r["low"], r["high"],
            r["finite"], r["sum"], r["squares"], np.array(r["smallest"], np.int64).view(np.uint64),
        )  # fmt: skip
        if key in tallies:
            tallies[key].merge(part)
        else:
            tallies[key] = part
    return tallies


@dataclass(frozen=True)
class Statistics:
    """Everything that was counted of a day, before it is written."""

    measured: tuple[Measured, ...]
    bins: tuple[Bins, ...]
    splits: tuple[str, ...]
    tallies: Tallies

    def rows(self, vocabularies: Mapping[str, Lookup]) -> Iterator[dict[str, Any]]:
        """A record for each split and column: those of headrace.features.statistics_table, without day and ranges."""
        for i, (measured, bins) in enumerate(zip(self.measured, self.bins, strict=True)):
            names = _names(bins, vocabularies[measured.vocabulary]) if measured.vocabulary else None
            for split, name in enumerate(self.splits):
                tally = self.tallies.get((split, i), Tally(bins))
                number = isinstance(bins, NumberBins)
                # Code 1 has the first bin where there is a vocabulary.
                unknown = int(tally.counts[0]) if measured.vocabulary else None
                yield {
                    "split": name,
                    "side": measured.side,
                    "column": measured.name,
                    "kind": measured.kind,
                    "rows": tally.rows,
                    "missing": tally.missing,
                    "values": tally.values,
                    "oov": unknown,
                    "distinct": tally.distinct,
                    "min": tally.low if number and tally.finite else None,
                    "max": tally.high if number and tally.finite else None,
                    "mean": tally.mean,
                    "std": tally.std,
                    "histogram": [] if measured.kind == "time" else describe(bins, tally.counts, names),
                }


def _names(bins: Bins, vocabulary: Lookup) -> dict[str | int | bool, str]:
    """What the codes of a feature's bins stand for."""
    assert isinstance(bins, ValueBins)
    table = vocabulary.table
    wanted = pa.array([v for v in bins.values if v != OOV_CODE], pa.int64())
    found = table.filter(pc.is_in(table.column("code"), wanted))
    codes, values = found.column("code").to_pylist(), found.column("value").to_pylist()
    return {OOV_CODE: UNKNOWN, **dict(zip(codes, values, strict=True))}


#: The name of code 1's bin; a vocabulary of a feature may hold the same text, its bin is never the first.
UNKNOWN = "(not in the vocabulary)"


def _bins(measured: Measured, sample: Sequence[pa.Array], quantiles: int, top: int) -> Bins:
    values, _ = measured.values(sample)
    if measured.kind == "time":
        x = values.to_numpy(zero_copy_only=False)
        return NumberBins((), float(np.median(x)) if len(x) else 0.0)
    if measured.kind == "number":
        return NumberBins.of(values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), quantiles)
    if pa.types.is_large_string(values.type):
        values = values.cast(pa.string())
    return ValueBins.of(values, top, (OOV_CODE,) if measured.vocabulary else ())


def measure_events(
    frame: DataFrame, split: str, splits: Sequence[str], measured: Sequence[Measured], train_rows: int,
    quantiles: int, top: int, engine: Engine = "arrow",
) -> Statistics:  # fmt: skip
    """Statistics of raw columns.

    Args:
        frame: the rows of all splits, with `_source_file` and `_source_line`.
        split: name of the column that says the split.
        splits: its values; the first is the one that fixes the bins.
        measured: from `input_columns`.
        train_rows: rows of the first split, about.
        quantiles: bins of a number, about.
        top: values of a category that get a bin.
        engine: who counts: NumPy in tasks, or a Spark plan.
    """
    index = F.coalesce(*[F.when(F.col(split) == s, F.lit(i)) for i, s in enumerate(splits)])
    # Columns have numbers for names: a dot in a name would be a field's.
    wanted = [_plain(m, frame).alias(f"c{i}") for i, m in enumerate(measured)]
    sample = frame.where(F.col(split) == splits[0])
    if train_rows > SAMPLE_ROWS:
        # Which rows: decided by their identity alone, so always the same.
        limit = int(-(2.0**63) + SAMPLE_ROWS / train_rows * 2.0**64)
        sample = sample.where(F.xxhash64("_source_file", "_source_line") < F.lit(limit))
    taken = sample.select(*wanted).toArrow().combine_chunks()
    bins = tuple(_bins(m, [_array(taken.column(i))], quantiles, top) for i, m in enumerate(measured))
    task = _Counting(tuple(measured), bins)
    rows = frame.select(index.alias("split"), *wanted)
    if engine == "spark":
        from headrace.features.statistics_spark import count_events

        tallies = count_events(rows, measured, bins)
    else:
        tallies = _merged(rows.mapInArrow(task.events, _PACKED).toArrow(), bins)
    return Statistics(task.measured, bins, tuple(splits), tallies)


def measure_dataset(
    spark: SparkSession, folder: Path, splits: Sequence[str], measured: Sequence[Measured], quantiles: int, top: int
) -> Statistics:
    """Statistics of features, from the dataset's files: `folder`/SPLIT/*.parquet, which the executors see too.

    Rows stand in them in the order of a hash, so the first ones of the training split are a fair sample.
    """
    listed = [(i, str(p)) for i, s in enumerate(splits) for p in sorted((folder / s).glob("*.parquet"))]
    names = [c for m in measured for c in m.columns]
    taken = _head([path for i, path in listed if i == 0], names)
    arrays = {n: _array(taken.column(n)) for n in names}
    bins = tuple(_bins(m, [arrays[c] for c in m.columns], quantiles, top) for m in measured)
    task = _Counting(tuple(measured), bins)

    def count(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return task.files(listed, batches)

    # A range of n in n partitions: each file has a task of its own.
    counted = spark.range(0, len(listed), 1, len(listed)).mapInArrow(count, _PACKED).toArrow()
    return Statistics(task.measured, bins, tuple(splits), _merged(counted, bins))


def _plain(measured: Measured, frame: DataFrame) -> Column:
    """A raw column in a type that the tasks know; moments as seconds since 1970."""
    x = col(measured.name)
    if measured.kind == "time":
        type_ = dict(frame.dtypes)[measured.name]
        return (F.unix_date(x) * 86_400).cast("double") if type_ == "date" else F.unix_micros(x).cast("double") / 1e6
    return x


def _head(paths: Sequence[str], names: Sequence[str]) -> pa.Table:
    """The first rows of files."""
    parts: list[pa.Table] = []
    rows = 0
    for path in paths:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                if rows >= SAMPLE_ROWS:
                    return pa.concat_tables(parts).slice(0, SAMPLE_ROWS)
                parts.append(file.read_row_group(group, columns=list(names)))
                rows += parts[-1].num_rows
    return pa.concat_tables(parts).slice(0, SAMPLE_ROWS)


def _array(column: pa.ChunkedArray) -> pa.Array:
    found = column.combine_chunks()
    return found if isinstance(found, pa.Array) else pa.concat_arrays(found.chunks)
