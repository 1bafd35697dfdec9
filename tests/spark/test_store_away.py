"""A store that is away while Spark reads it: what the driver is told becomes one message."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from headrace.errors import EXIT_INCOMPLETE
from headrace.lake.told_errors import told
from headrace.storage import StoreAway


def test_a_namenode_that_is_away(spark: SparkSession) -> None:
    # As many tries as one.
    once = {"ipc.client.connect.max.retries": "0", "fs.hdfs.impl.disable.cache": "true"}
    with pytest.raises(Exception, match="ConnectException") as raised:
        spark.read.options(**once).parquet("hdfs://127.0.0.1:1/a")
    message, code = told(raised.value) or ("", 0)
    assert code == EXIT_INCOMPLETE
    assert message.endswith(":1 does not answer Spark (Connection refused). Run this again later")


def test_a_task_of_any_job(spark: SparkSession) -> None:
    def away(number: int) -> int:
        raise StoreAway("s3://bucket/a: the store is away")

    with pytest.raises(Exception, match="Job aborted") as raised:
        spark.sparkContext.parallelize([0], 1).map(away).collect()
    assert told(raised.value) == ("s3://bucket/a: the store is away", EXIT_INCOMPLETE)
