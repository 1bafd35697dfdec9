"""The counting of headrace.drift.columns as a Spark plan: for `engine: spark`, where rows stay on the GPU.

Each row becomes one entry a value, (column, bin, value), and entries are added up by (split, column, bin): one
aggregate whose result is as small as the bins. On CPUs headrace.drift.count_arrow is several times as fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.drift.bins import Bins, NumberBins
from headrace.drift.column_statistics import ColumnStatistics
from headrace.drift.columns import MeasuredColumn, StatisticsByColumn
from headrace.features.functions.spark_expressions import col, nan_to_null
from headrace.schema import NULL_CODE, OOV_CODE
from headrace.storage import Location

_MISSING = -1
#: The column number of a entry that only says that there is a row.
_ROW = -1
_DISTINCT_ERROR = 0.02


def count_frame(frame: DataFrame, measured: Sequence[MeasuredColumn], bins: Sequence[Bins]) -> StatisticsByColumn:
    """Count `frame`, (split int, c0, c1, ...) with a column for each of `measured`.

    Distinct values are estimated bin by bin (HyperLogLog++, Heule et al., 2013, 2 %) and added, since bins share none.
    """
    row = F.array(_entry(_ROW, F.lit(0), None, None))
    entries = [_entries(i, F.col(f"c{i}"), m, b) for i, (m, b) in enumerate(zip(measured, bins, strict=True))]
    exploded = frame.select("split", F.explode(F.concat(row, *entries)).alias("entry")).select("split", "entry.*")
    added = (
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
    return _tallies(added, bins)


def dataset_frame(
    spark: SparkSession, files: Sequence[tuple[int, Location]], measured: Sequence[MeasuredColumn]
) -> DataFrame:
    """The frame that `count_frame` counts, from the dataset's files: (split's position, path)."""
    parts = []
    for split in dict.fromkeys(i for i, _ in files):
        rows = spark.read.parquet(*[p.spark_path for i, p in files if i == split])
        columns = [_feature(m).alias(f"c{i}") for i, m in enumerate(measured)]
        parts.append(rows.select(F.lit(split).alias("split"), *columns))
    return reduce(DataFrame.union, parts)


def _feature(measured: MeasuredColumn) -> Column:
    """A feature as `MeasuredColumn.values` sees it: codes without 0, those that say unknown as one."""
    zero = F.lit(NULL_CODE if measured.coded else 0.0).cast("int" if measured.coded else "float")
    columns = [col(measured.name)]
    if measured.is_list:
        columns = [F.coalesce(F.get(columns[0], F.lit(i)), zero) for i in range(measured.length)]
    if measured.coded:
        if measured.unknown:
            known = [F.when(x > measured.unknown, x).when(x != NULL_CODE, OOV_CODE) for x in columns]
        else:  # of no vocabulary; raw ids may be negative
            known = [F.when(x != NULL_CODE, x) for x in columns]
        if not measured.is_list:
            return known[0]
        return F.filter(F.array(*known), lambda x: x.isNotNull())
    return F.array(*columns) if measured.is_list else columns[0]


def _entries(i: int, x: Column, measured: MeasuredColumn, bins: Bins) -> Column:
    """The entries of a column: of a scalar one, of a list one an element, of nothing one that says so."""
    nothing = F.array(_entry(i, F.lit(_MISSING), None, None))

    def plain(value: Column) -> Column:
        if isinstance(bins, NumberBins):
            value = nan_to_null(value.cast("double")) + F.lit(0.0)  # -0.0 is 0.0
        return value

    def entry(value: Column) -> Column:
        value = plain(value)
        return _entry(i, _bin(value, bins), value, bins.centre if isinstance(bins, NumberBins) else None)

    if measured.is_list:
        return F.when(F.coalesce(F.size(x), F.lit(0)) > 0, F.transform(x, entry)).otherwise(nothing)
    return F.when(plain(x).isNull(), nothing).otherwise(F.array(entry(x)))


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
    """The bin of a value; null of null."""
    if isinstance(bins, NumberBins):
        found: Column = F.lit(0)
        for edge in bins.edges:
            found = found + F.when(x >= F.lit(edge), 1).otherwise(0)
    else:
        found = F.coalesce(*[F.when(x == F.lit(v), F.lit(i)) for i, v in enumerate(bins.values)], F.lit(bins.size - 1))
    return F.when(x.isNotNull(), found)


def _tallies(added: pa.Table, bins: Sequence[Bins]) -> StatisticsByColumn:
    rows: dict[int, int] = {}
    tallies: StatisticsByColumn = {}
    # In one order, whichever task ended first: so are the sums.
    for r in added.sort_by([("split", "ascending"), ("m", "ascending"), ("b", "ascending")]).to_pylist():
        if r["m"] == _ROW:  # comes first
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
