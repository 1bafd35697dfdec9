"""Errors of Spark's tasks and file systems that end a job: the driver raises each as itself, with one message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Spark
from headrace.config.workspace import Workspace
from headrace.errors import EXIT_INCOMPLETE, UserError
from headrace.errors.translate import exit_message
from headrace.lake.spark.session import session
from headrace.storage import LeaseLost, StoreAway, StoreError


def test_a_namenode_that_is_away(spark: SparkSession) -> None:
    # As many tries as one.
    once = {"ipc.client.connect.max.retries": "0", "fs.hdfs.impl.disable.cache": "true"}
    with pytest.raises(Exception, match="ConnectException") as raised:
        spark.read.options(**once).parquet("hdfs://127.0.0.1:1/a")
    message, code = exit_message(raised.value) or ("", 0)
    assert code == EXIT_INCOMPLETE
    assert message.endswith(":1 does not answer Spark (Connection refused). Run this again later")


def test_a_task_of_any_job(spark: SparkSession) -> None:
    def away(number: int) -> int:
        raise StoreAway("s3://bucket/a: the store is away")

    with pytest.raises(Exception, match="Job aborted") as raised:
        spark.sparkContext.parallelize([0], 1).map(away).collect()
    assert exit_message(raised.value) == ("s3://bucket/a: the store is away", EXIT_INCOMPLETE)


def of_rows(spark: SparkSession, error: Exception) -> DataFrame:
    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        raise error
        yield from batches

    return spark.range(0, 4, 1, 2).mapInArrow(fail, "id long")


def of_column(spark: SparkSession, error: Exception) -> DataFrame:
    @F.pandas_udf("long")
    def fail(ids: pd.Series) -> pd.Series:
        try:
            raise error
        except StoreAway as e:
            raise UserError("the file is damaged") from e

    return spark.range(4).select(fail("id"))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (of_rows, UserError("'price' is null in 3 rows:\n\n  a.parquet")),
        (of_rows, LeaseLost("the lease is another's")),
        (of_column, StoreError("s3://b/a: 400 Bad Request")),
        (of_column, StoreAway("s3://b/a: the store is away")),
    ],
)
@pytest.mark.parametrize("use", [lambda df, path: df.collect(), lambda df, path: df.write.parquet(path)])
def test_a_task_of_a_stage(
    spark: SparkSession,
    tmp_path: Path,
    make: Callable[[SparkSession, Exception], DataFrame],
    error: Exception,
    use: Callable[[DataFrame, str], object],
) -> None:
    with pytest.raises(type(error)) as raised, session(Spark(), Workspace(tmp_path), "test") as stage:
        use(make(stage, error), str(tmp_path / "rows"))
    assert type(raised.value) is type(error)
    assert str(raised.value) == str(error)


def test_a_fault_of_a_task(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="of ours") as raised, session(Spark(), Workspace(tmp_path), "test") as stage:
        of_rows(stage, TypeError("of ours")).collect()
    assert exit_message(raised.value) is None
