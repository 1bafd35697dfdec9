"""Arrow data on its way between the driver and tasks, and between tasks through Spark's shuffle.

A task that reads its data itself (headrace.lake.spark.tasks) yields blocks of a few MiB, each for a partition. Spark
moves them between hosts, spills them, and computes them again where an executor was lost. A partition receives its
blocks in one order, whichever way they came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from headrace.lake.spark.session import spark_settings
from headrace.lake.spark.tasks import numbered, prepare_worker

#: Senders are to cut what they send into blocks of at most about so many bytes.
BLOCK_BYTES = 4 << 20
#: Blocks that are in one Arrow batch on their way between the JVM and Python, and bytes of them.
_BLOCKS_A_BATCH, _BATCH_BYTES = 16, 8 << 20
#: Sent as bytes, received as a view of what came.
Payload: TypeAlias = bytes | pa.Buffer
_COLUMNS = "key int, source int, number int, payload binary"
_SCHEMA = pa.schema([("key", pa.int32()), ("source", pa.int32()), ("number", pa.int32()), ("payload", pa.binary())])
#: Rows of fewer bytes travel in the plan. Of more than 1,000 KiB in a task Spark warns.
LOCAL_BYTES = 256 << 10
_FRAME_BATCH_ROWS = 65_536
_BYTES_PER_BATCH = "spark.sql.execution.arrow.maxBytesPerBatch"


@dataclass(frozen=True)
class ExchangedBlock:
    """Some bytes on their way to a partition."""

    partition: int
    #: Its place among the blocks of the partition: no other block has both.
    source: int
    number: int
    payload: Payload


def exchange(
    spark: SparkSession,
    tasks: int,
    send: Callable[[int], Iterable[ExchangedBlock]],
    partitions: int,
    receive: Callable[[Sequence[ExchangedBlock]], Iterable[pa.RecordBatch]],
    schema: str,
    hosts: Sequence[str | None] = (),
) -> DataFrame:
    """Return a frame of `schema` with what `receive` makes of the blocks of each partition. Use it inside
    `small_batches`.

    Args:
        spark: the session.
        tasks: `send` is called with 0 .. tasks-1, each in a task. Any may run again, and must send the same.
        send: the blocks.
        partitions: to which they go: 0 .. partitions-1, each a task of its own.
        receive: is given all blocks of a partition, in order of source and number; not called where there is none.
        schema: of the batches, as Spark spells it.
        hosts: where each task is best run: see `headrace.lake.spark.tasks.numbered`.
    """
    numbers = spark.createDataFrame(numbered(spark.sparkContext, tasks, hosts).map(_row), "n int", verifySchema=False)
    keys = tuple(partition_keys(partitions))
    sent = numbers.mapInArrow(_Send(send, keys).run, _COLUMNS)
    return sent.repartition(partitions, "key").mapInArrow(_Receive(receive, keys).run, schema)


def gathered(
    spark: SparkSession, count: int, work: Callable[[int], Iterable[pa.Table]], hosts: Sequence[str | None] = ()
) -> list[pa.Table]:
    """Call `work` with 0 .. count-1, each in a Spark task; all tables that they yield, in that order, here.

    Args:
        spark: the session.
        count: of tasks.
        work: gives tables that are small enough for the driver, all together.
        hosts: see `headrace.lake.spark.tasks.numbered`.
    """
    streams = numbered(spark.sparkContext, count, hosts).mapPartitions(_Gather(work)).collect()
    return [pa.ipc.open_stream(pa.py_buffer(data)).read_all() for data in streams]


def streamed(frame: DataFrame) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a frame in its order; one partition at a time is in the driver."""
    for (data,) in frame.mapInArrow(_packed, "rows binary").toLocalIterator():
        yield from pa.ipc.open_stream(pa.py_buffer(bytes(data)))


def small_batches(spark: SparkSession) -> AbstractContextManager[None]:
    """Limit the rows that Spark hands to Python at once in this block: rows of an exchange have megabytes each."""
    return spark_settings(spark, {"spark.sql.execution.arrow.maxRecordsPerBatch": str(_BLOCKS_A_BATCH)})


def _row(number: int) -> tuple[int]:
    return (number,)


def _packed(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield each batch as one row: an Arrow stream in the column `rows`."""
    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield pa.RecordBatch.from_pydict({"rows": [sink.getvalue().to_pybytes()]})


@dataclass(frozen=True)
class _Gather:
    """Function of a task that yields the tables of its numbers, each as an Arrow stream."""

    work: Callable[[int], Iterable[pa.Table]]

    def __call__(self, numbers: Iterable[int]) -> Iterator[bytes]:
        prepare_worker()
        for number in numbers:
            for table in self.work(number):
                sink = pa.BufferOutputStream()
                with pa.ipc.new_stream(sink, table.schema) as writer:
                    writer.write_table(table)
                yield sink.getvalue().to_pybytes()


@dataclass(frozen=True)
class _Send:
    """Function of a task that sends blocks, several in one Arrow batch, each with the key of its partition."""

    send: Callable[[int], Iterable[ExchangedBlock]]
    #: By partition: what Spark puts there.
    keys: tuple[int, ...]

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        prepare_worker()
        waiting, size = list[ExchangedBlock](), 0
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for block in self.send(number):
                    waiting.append(block)
                    size += len(block.payload)
                    if len(waiting) >= _BLOCKS_A_BATCH or size >= _BATCH_BYTES:
                        yield self._batch(waiting)
                        waiting, size = [], 0
        if waiting:
            yield self._batch(waiting)

    def _batch(self, blocks: Sequence[ExchangedBlock]) -> pa.RecordBatch:
        """Return blocks as one Arrow batch of `_SCHEMA`."""
        columns = [
            [self.keys[b.partition] for b in blocks],
            [b.source for b in blocks],
            [b.number for b in blocks],
            [b.payload for b in blocks],
        ]
        return pa.RecordBatch.from_arrays(
            [pa.array(c, f.type) for c, f in zip(columns, _SCHEMA, strict=True)], schema=_SCHEMA
        )


@dataclass(frozen=True)
class _Receive:
    """Function of a task that collects the blocks of its partition and passes them on in order."""

    receive: Callable[[Sequence[ExchangedBlock]], Iterable[pa.RecordBatch]]
    keys: tuple[int, ...]

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        prepare_worker()
        blocks = []
        for batch in batches:
            keys, sources, numbers, payloads = batch.columns
            places = [c.to_pylist() for c in (keys, sources, numbers)]
            for key, source, number, payload in zip(*places, payloads, strict=True):
                blocks.append(ExchangedBlock(self.keys.index(key), source, number, payload.as_buffer()))
        if blocks:
            yield from self.receive(sorted(blocks, key=attrgetter("source", "number")))


def partition_keys(partitions: int) -> list[int]:
    """For each partition an int that Spark's hash partitioning puts there: so that each part has a task of its own.

    Without it parts share tasks at random, and the longest task decides. The result is the same either way.
    """
    keys: dict[int, int] = {}
    candidate = 0
    while len(keys) < partitions:
        keys.setdefault(_murmur3(candidate) % partitions, candidate)
        candidate += 1
    return [keys[i] for i in range(partitions)]


def _murmur3(x: int) -> int:
    """Spark's `hash` of an int: Murmur3 x86 32 (Appleby), seed 42; a signed number."""
    mask = 0xFFFFFFFF

    def rotl(v: int, r: int) -> int:
        return ((v << r) | (v >> (32 - r))) & mask

    k = rotl(x * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
    h = (rotl(42 ^ k, 13) * 5 + 0xE6546B64) & mask
    h ^= 4
    h = (h ^ (h >> 16)) * 0x85EBCA6B & mask
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & mask
    h ^= h >> 16
    return h - (1 << 32) if h >> 31 else h


@contextmanager
def arrow_frame(spark: SparkSession, table: pa.Table, partitions: int = 1) -> Iterator[DataFrame]:
    """Give a frame of a table's rows, in order, for as long as the context: large tables reach the tasks by a
    broadcast.

    Args:
        spark: the session.
        table: of types that Spark knows.
        partitions: how many, each of about as many rows.
    """
    if table.nbytes <= LOCAL_BYTES:
        yield spark.createDataFrame(table).coalesce(partitions)
        return
    shared = spark.sparkContext.broadcast(_stream_bytes(table))
    starts = [i * table.num_rows // partitions for i in range(partitions + 1)]

    def rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        all_rows = pa.ipc.open_stream(shared.value).read_all()
        for batch in batches:
            for i in batch.column(0).to_pylist():
                yield from all_rows.slice(starts[i], starts[i + 1] - starts[i]).to_batches(_FRAME_BATCH_ROWS)

    try:
        yield spark.range(0, partitions, 1, partitions).mapInArrow(rows, from_arrow_schema(table.schema))
    finally:
        shared.destroy()


def _stream_bytes(table: pa.Table) -> bytes:
    """Return a table as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


@contextmanager
def bounded_batches(spark: SparkSession, most: str = "64m") -> Iterator[None]:
    """Arrow batches of what is computed within the block end with the row that makes them this large.

    For rows of long lists: by default a batch has 65,536 rows, however large. Not for all frames: Spark sums up the
    sizes of all columns at each row. What a user has set stays.
    """
    if spark.conf.get(_BYTES_PER_BATCH, None) is not None:
        yield
        return
    spark.conf.set(_BYTES_PER_BATCH, most)
    try:
        yield
    finally:
        spark.conf.unset(_BYTES_PER_BATCH)
