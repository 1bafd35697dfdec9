"""Versions of Delta tables read as Parquet files, against Delta's own reading of them."""

from __future__ import annotations

import pytest
from pyspark.sql import DataFrame, SparkSession

from headrace.config.workspace import Workspace
from headrace.lake.delta.with_spark import read_version
from headrace.lake.spark.session import executor_usage
from headrace.storage import Location

COLUMNS = "id bigint, ds string, v decimal(9,2), at timestamp, tags array<string>, s struct<x:int,y:string>"


def rows(spark: SparkSession, ds: str | None, first: int, count: int = 3) -> DataFrame:
    values = [(i, ds, i / 4, None, ["a", None] if i % 2 else None, (i, f"ü{i}")) for i in range(first, first + count)]
    frame = spark.createDataFrame(values, COLUMNS.replace("v decimal(9,2)", "v double"))
    return frame.selectExpr("id", "ds", "cast(v as decimal(9,2)) v", "timestamp_millis(id * 1111) at", "tags", "s")


def write(frame: DataFrame, table: Location, **options: str) -> None:
    frame.coalesce(1).write.format("delta").mode("append").partitionBy("ds").options(**options).save(str(table))


def read_by(frame: DataFrame) -> str:
    """Delta finds its files by an index of its own."""
    leaf = frame._jdf.queryExecution().analyzed().collectLeaves().apply(0)
    return str(leaf.relation().location().getClass().getName())


def same(spark: SparkSession, table: Location, version: int, plain: bool, ds: str | None = None) -> None:
    actual = read_version(spark, table, version, lambda partition: ds is None or partition["ds"] == ds)
    expected = spark.read.format("delta").option("versionAsOf", version).load(str(table))
    if ds is not None:
        actual, expected = actual.where(f"ds = '{ds}'"), expected.where(f"ds = '{ds}'")
    assert actual.dtypes == expected.dtypes
    assert sorted(actual.collect(), key=str) == sorted(expected.collect(), key=str)
    assert ("delta" in read_by(actual)) is not plain


def test_it_is_what_delta_reads(spark: SparkSession, ws: Workspace) -> None:
    table = ws.table("shop", "events")
    write(rows(spark, "2026-01-01", 0), table)
    # A value that looks like a number.
    write(rows(spark, "01", 10), table)
    write(rows(spark, "2026-01-01", 20).selectExpr("*", "id + 1 as more"), table, mergeSchema="true")
    for version in range(3):
        same(spark, table, version, plain=True)
    same(spark, table, 2, plain=True, ds="2026-01-01")
    same(spark, table, 2, plain=True, ds="01")
    # No file is wanted: there is nothing to read as Parquet.
    same(spark, table, 2, plain=False, ds="2026-01-09")
    # Values whose folders have other names.
    write(rows(spark, None, 30), table)
    write(rows(spark, "a b/c", 40), table)
    same(spark, table, 4, plain=False)
    same(spark, table, 4, plain=True, ds="01")
    # Rows that are marked as deleted.
    spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = true)")
    spark.sql(f"DELETE FROM delta.`{table}` WHERE id = 0")
    same(spark, table, 6, plain=False)
    same(spark, table, 6, plain=False, ds="2026-01-01")
    same(spark, table, 4, plain=True, ds="2026-01-01")
    # Columns that have other names in the files.
    spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    spark.sql(f"ALTER TABLE delta.`{table}` RENAME COLUMN tags TO words")
    same(spark, table, 8, plain=False, ds="01")


def test_what_executors_have_used_is_what_their_stages_read_and_wrote(spark: SparkSession, ws: Workspace) -> None:
    """Spark's store of stages accounts for a cluster's executors, which are on other machines."""
    folder = ws.table("shop", "numbers")
    use_before = executor_usage(spark)
    spark.range(300_000).coalesce(1).write.parquet(str(folder))
    wrote = executor_usage(spark)
    spark.read.parquet(str(folder)).selectExpr("sum(id)").collect()
    read = executor_usage(spark)
    (file,) = [f for f in folder.entries() if f.suffix == ".parquet"]
    assert wrote.written_bytes - use_before.written_bytes == file.size()
    assert read.read_bytes > wrote.read_bytes
    assert use_before.core_seconds < wrote.core_seconds < read.core_seconds
    assert wrote.core_seconds - use_before.core_seconds < 60


@pytest.mark.parametrize("name", ["a{b,c}", "x[y]", "s*"])
def test_a_folder_is_no_glob(spark: SparkSession, ws: Workspace, name: str) -> None:
    table = ws.table(name, "events")
    write(rows(spark, "2026-01-01", 0), table)
    same(spark, table, 0, plain=False)
