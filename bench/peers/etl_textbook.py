"""The textbook Spark way: a count a column, then one broadcast join a column and expressions for the rest."""

from __future__ import annotations

import time
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from bench.criteo_data import CATEGORIES, COUNTS


def textbook(spark: SparkSession, train: list[str], valid: list[str], out: Path, min_count: int) -> tuple[float, float]:
    """Measure (seconds of fit, seconds of transform and write) of the Criteo workflow over Parquet files."""
    rows = {"train": spark.read.parquet(*train), "valid": spark.read.parquet(*valid)}
    tick = time.perf_counter()
    tables: dict[str, DataFrame] = {}
    for name in CATEGORIES:
        counted = rows["train"].where(F.col(name).isNotNull()).groupBy(name).count().where(F.col("count") >= min_count)
        order = Window.orderBy(F.desc("count"), name)
        path = str(out / "vocabulary" / name)
        counted.select(name, (F.row_number().over(order) + 1).alias(f"{name}_code")).write.parquet(path)
        tables[name] = spark.read.parquet(path)
    logs = {n: F.log1p(F.greatest(F.coalesce(F.col(n), F.lit(0)), F.lit(0)).cast("double")) for n in COUNTS}
    aggregates = [f(x).alias(f"{k}{n}") for n, x in logs.items() for k, f in (("m", F.avg), ("s", F.stddev_samp))]
    learned = rows["train"].agg(*aggregates).collect()[0]
    fitted = time.perf_counter()
    for split, frame in rows.items():
        for name in CATEGORIES:
            frame = frame.join(F.broadcast(tables[name]), name, "left")
        codes = [
            F.when(F.col(n).isNull(), 0).otherwise(F.coalesce(F.col(f"{n}_code"), F.lit(1))).cast("int").alias(n)
            for n in CATEGORIES
        ]
        numbers = [
            ((x - F.lit(learned[f"m{n}"])) / F.lit(learned[f"s{n}"])).cast("float").alias(n) for n, x in logs.items()
        ]
        label = F.col("label").cast("float").alias("label")
        frame.select(*numbers, *codes, label).write.option("compression", "none").parquet(str(out / split))
    return fitted - tick, time.perf_counter() - fitted
