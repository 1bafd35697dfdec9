"""Write the class archive that Spark's JVMs map instead of loading and verifying ~15,000 classes from jars.

    python scripts/archive_classes.py FILE [--s3]

Starts a session, does a little of what the stages do (Delta, CSV, JSON, Parquet, windows, joins, a Python worker), and
lets the JVM archive on its exit what it has loaded: https://openjdk.org/jeps/350. The file is whole or not there. With
--s3 the class path has the jars of Spark's file system for S3, as that of a session has which reads from S3.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from headrace.config import Spark
from headrace.config.workspace import Workspace
from headrace.lake.spark.session import session


def work(spark: SparkSession, folder: Path) -> None:
    """Run a little of everything; small, for only the classes count."""
    table = str(folder / "table")
    rows = spark.range(500).selectExpr("id", "id % 7 as k", "cast(id as string) as v", "timestamp_seconds(id) as t")
    for kind in ("json", "csv", "parquet"):
        path = str(folder / kind)
        rows.drop("t").write.format(kind).save(path)
        spark.read.schema("id bigint, k bigint, v string").format(kind).load(path).count()
    dated = rows.withColumn("ds", F.date_format("t", "yyyy-MM-dd"))
    dated.write.format("delta").partitionBy("ds").save(table)
    dated.limit(3).createOrReplaceTempView("few")
    spark.sql(f"MERGE INTO delta.`{table}` a USING few b ON a.id = b.id WHEN NOT MATCHED THEN INSERT *")
    table_rows = spark.read.format("delta").load(table)
    rank = F.row_number().over(Window.partitionBy("k").orderBy(F.xxhash64("v")))
    words = F.broadcast(table_rows.select("id", F.col("v").alias("w")))
    few = table_rows.withColumn("rank", rank).where("rank < 3").join(words, "id")
    few.groupBy("k").agg(F.sum("rank"), F.collect_list("w"), F.approx_count_distinct("v")).orderBy("k").toPandas()
    same: DataFrame = table_rows.repartition(2, "k").mapInArrow(lambda batches: batches, table_rows.schema)
    same.write.format("delta").mode("overwrite").save(table)


def main(target: Path, with_s3: bool) -> None:
    """Make the archive."""
    target.unlink(missing_ok=True)  # or this session would use it, and the new one hold only what it lacks
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    option = f"-XX:ArchiveClassesAtExit={partial} -XX:TieredStopAtLevel=1 -Xlog:disable -Xlog:all=error:stderr"
    with tempfile.TemporaryDirectory() as folder:
        conf = Spark(master="local[2]", driver_memory="1g", properties={"spark.driver.defaultJavaOptions": option})
        # No bucket is opened: a session of a workspace that names one has the jars on its class path.
        ws = Workspace(Path(folder) / "home", reads=("s3://bucket/folder",) if with_s3 else ())
        with session(conf, ws, "archive classes") as spark:
            gateway = spark.sparkContext._gateway
            if with_s3:
                spark._jvm.java.lang.Class.forName("org.apache.hadoop.fs.s3a.S3AFileSystem")  # type: ignore[union-attr]
            work(spark, Path(folder))
        jvm = gateway.proc
        gateway.shutdown()
        jvm.stdin.close()  # what the JVM waits for
        jvm.wait(timeout=300)
    partial.replace(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--s3", action="store_true")
    arguments = parser.parse_args()
    main(arguments.file.resolve(), arguments.s3)
