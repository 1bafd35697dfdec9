"""How many bytes of rows a Python task of Spark is given at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"


@contextmanager
def bounded_batches(spark: SparkSession, most: str = "64m") -> Iterator[None]:
    """Arrow batches of what is computed within the block end with the row that makes them this large.

    For rows of long lists: by default a batch has 65,536 rows, however large. Not for all frames: Spark sums up the
    sizes of all columns at each row. What a user has set stays.
    """
    if spark.conf.get(_BYTES, None) is not None:
        yield
        return
    spark.conf.set(_BYTES, most)
    try:
        yield
    finally:
        spark.conf.unset(_BYTES)
