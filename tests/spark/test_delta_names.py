"""Delta tables whose columns have names that Spark's own writers refuse to begin a table with."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.with_spark import save_delta
from headrace.schema import column
from headrace.storage import local

NAMES = ['the "best" `item` 100%', "a b", "größe;cm, it's", "{x} (y)=z", "tab\tand\nline", "service.name", "select"]


def test_days_of_hostile_names(spark: SparkSession, tmp_path: Path) -> None:
    table = local(tmp_path / "scores")
    for ds, rows in [("2026-01-01", 5), ("2026-01-02", 7), ("2026-01-01", 3)]:
        values = [F.col("id").alias(name) for name in NAMES]
        frame = spark.range(rows).select(F.lit(ds).alias("ds"), *values)
        writer = frame.write.format("delta").mode("overwrite").partitionBy("ds").option("mergeSchema", "true")
        save_delta(writer.option("replaceWhere", f"ds = '{ds}'"), table, None, frame.schema)
        assert DeltaLog(table).columns().keys() == {"ds", *NAMES}
    stored = spark.read.format("delta").load(str(table))
    assert sorted(stored.groupBy("ds").agg(F.sum(column(NAMES[0]))).collect()) == [
        ("2026-01-01", 3),
        ("2026-01-02", 21),
    ]
    assert stored.where(column(NAMES[4]) == 2).count() == 2
    spark.sql(f"DELETE FROM delta.`{table}` WHERE `{NAMES[3]}` = 1")
    assert spark.read.format("delta").load(str(table)).where(column(NAMES[1]) == 1).count() == 0
    assert len(DeltaLog(table).files(DeltaLog(table).version) or []) >= 2


def test_a_column_without_a_name(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.range(1).select(F.lit("2026-01-01").alias("ds"), F.col("id").alias(""))
    writer = frame.write.format("delta").mode("overwrite").partitionBy("ds")
    with pytest.raises(UserError, match="a Delta table cannot have a column ''"):
        save_delta(writer, local(tmp_path / "scores"), None, frame.schema)
