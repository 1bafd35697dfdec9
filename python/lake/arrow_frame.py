"""Arrow tables of the driver as Spark frames."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

#: Rows of fewer bytes travel in the plan. Of more than 1,000 KiB in a task Spark warns.
LOCAL_BYTES = 256 << 10
_BATCH_ROWS = 65_536


@contextmanager
def arrow_frame(spark: SparkSession, table: pa.Table, partitions: int = 1) -> Iterator[DataFrame]:
    """A frame of a table's rows, in order, for as long as the context: large tables reach the tasks by a broadcast.

    Args:
        spark: the session.
        table: of types that Spark knows.
        partitions: how many, each of about as many rows.
    """
    if table.nbytes <= LOCAL_BYTES:
        yield spark.createDataFrame(table).coalesce(partitions)
        return
    shared = spark.sparkContext.broadcast(_stream(table))
    starts = [i * table.num_rows // partitions for i in range(partitions + 1)]

    def rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        whole = pa.ipc.open_stream(shared.value).read_all()
        for batch in batches:
            for i in batch.column(0).to_pylist():
                yield from whole.slice(starts[i], starts[i + 1] - starts[i]).to_batches(_BATCH_ROWS)

    try:
        yield spark.range(0, partitions, 1, partitions).mapInArrow(rows, from_arrow_schema(table.schema))
    finally:
        shared.destroy()


def _stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())
