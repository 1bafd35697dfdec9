"""Arrow tables of the driver as frames: the same rows in the same order, and no large task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headrace.features.vocabulary.codes import VocabularyRule
from headrace.features.vocabulary.delta_table import VocabularyTable
from headrace.lake.spark.exchange import LOCAL_BYTES, arrow_frame, bounded_batches
from headrace.storage import local

#: They warn of tasks and of closures above 1,000 KiB.
_LOGGERS = ("org.apache.spark.scheduler.TaskSetManager", "org.apache.spark.scheduler.DAGScheduler")


@pytest.fixture
def spark_warnings(spark: SparkSession) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the warnings of Spark's scheduler since the test began."""
    jvm = spark._jvm
    assert jvm is not None
    core = jvm.org.apache.logging.log4j.core
    text = jvm.java.io.StringWriter()
    layout = core.layout.PatternLayout.newBuilder().withPattern("%m%n").build()
    appender = core.appender.WriterAppender.createAppender(layout, None, text, "warnings", False, True)
    appender.start()
    loggers = [jvm.org.apache.logging.log4j.LogManager.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addAppender(appender)
    try:
        yield text.toString
    finally:
        for logger in loggers:
            logger.removeAppender(appender)
        appender.stop()


def large(rows: int) -> pa.Table:
    """About 40 bytes a row, which does not compress."""
    rng = np.random.default_rng(7)
    values = [rng.bytes(12).hex() for _ in range(rows)]
    numbers = pa.array(rng.integers(0, 1 << 60, rows), mask=rng.random(rows) < 0.1)
    return pa.table({"value": pa.array(values, pa.string()), "number": numbers})


@pytest.mark.parametrize("rows", [0, 3, 60_000])
@pytest.mark.parametrize("partitions", [1, 3])
def test_rows_and_their_order_are_the_tables(
    spark: SparkSession, tmp_path: Path, spark_warnings: Callable[[], str], rows: int, partitions: int
) -> None:
    table = large(rows)
    assert (table.nbytes > LOCAL_BYTES) == (rows > 3)
    with arrow_frame(spark, table, partitions) as frame:
        assert frame.toArrow().to_pylist() == table.to_pylist()
        frame.write.parquet(str(tmp_path / "made"))
    parts = sorted((tmp_path / "made").glob("part-*.parquet"))
    assert len(parts) == partitions or (len(parts) <= partitions and rows <= 3)
    assert pa.concat_tables([pq.read_table(p) for p in parts]).to_pylist() == table.to_pylist()
    assert "large" not in spark_warnings()


def test_what_goes_with_the_tasks_is_noticed(spark: SparkSession, spark_warnings: Callable[[], str]) -> None:
    """The check itself: rows that are part of the plan."""
    spark.createDataFrame(large(60_000)).coalesce(1).rdd.count()
    assert "contains a task of very large size" in spark_warnings()


def test_a_large_vocabulary_goes_with_no_task(
    spark: SparkSession, tmp_path: Path, spark_warnings: Callable[[], str]
) -> None:
    values = large(60_000).column("value").unique()
    counted = pa.table(
        {
            "name": pa.repeat("user", len(values)),
            "value": values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values,
            "count": pa.repeat(pa.scalar(2, pa.int64()), len(values)),
            "day": pa.repeat(pa.scalar(1, pa.int64()), len(values)),
        }
    )
    vocabularies = VocabularyTable(spark, local(tmp_path / "vocabulary"), "2026-01-03")
    pinned = vocabularies.update(counted, {"user": VocabularyRule()})["user"]
    stored = spark.read.format("delta").load(str(tmp_path / "vocabulary")).toPandas()
    assert stored.set_index("value")["code"].to_dict() == dict(zip(*pinned.to_pydict().values(), strict=True))
    assert len(stored) == len(values)
    assert "large" not in spark_warnings()


def _bytes_of(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.RecordBatch.from_pydict({"rows": pa.array([batch.num_rows], pa.int32()), "bytes": [batch.nbytes]})


def test_batches_of_long_lists_are_cut(spark: SparkSession) -> None:
    # 20 lists of 800 kB.
    lists = spark.range(0, 20, 1, 1).select(F.array_repeat("id", 100_000).alias("ids"))

    def batches() -> list[tuple[int, int]]:
        return [tuple(r) for r in lists.mapInArrow(_bytes_of, "rows int, bytes bigint").collect()]

    assert [rows for rows, _ in batches()] == [20]
    with bounded_batches(spark, "4m"):
        cut = batches()
    assert sum(rows for rows, _ in cut) == 20
    assert max(size for _, size in cut) < (4 << 20) + 900_000
    assert len(cut) < 6
    assert [rows for rows, _ in batches()] == [20]
    # What a user has set is kept.
    key = "spark.sql.execution.arrow.maxBytesPerBatch"
    spark.conf.set(key, "8m")
    try:
        with bounded_batches(spark):
            assert spark.conf.get(key) == "8m"
        assert spark.conf.get(key) == "8m"
    finally:
        spark.conf.unset(key)
