"""Arrow tables between tasks, in blocks of a few MiB through Spark's shuffle (headrace.lake.spark.exchange).

Among them keyed tables that are too large for the driver: tasks compute their rows from merged statistics, and Spark
sorts them. The driver sees the rows go by, a partition at a time, on their way to the tables' files, which equal those
of tables in its memory byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from headrace.features.learn.statistics import Partial, Partials, Statistic, empty
from headrace.features.ops.base import EstimatorOp, FittedState
from headrace.features.types import ValueType
from headrace.features.vocabulary.keyed_tables import KEY, FileKeyedTable, TableWriter, TableWriters
from headrace.features.workflow.workflow import BoundOp
from headrace.lake.spark.exchange import BLOCK_BYTES, ExchangedBlock, Payload, small_batches, streamed
from headrace.lake.spark.session import driver_python_bytes
from headrace.storage import Location

#: In a schema's metadata: which table it is.
_NAME = b"name"


def cut(table: pa.Table, most: int = BLOCK_BYTES) -> Iterator[pa.Table]:
    """Yield a table in even slices of about `most` bytes or less; one without rows as it is."""
    slices = max(1, min(table.num_rows, -(-table.nbytes // most)))
    for i in range(slices):
        start, end = (table.num_rows * k // slices for k in (i, i + 1))
        yield table.slice(start, end - start)


def packed(table: pa.Table, name: int, metadata: Mapping[bytes, bytes] | None = None) -> bytes:
    """Return a table, its number and metadata as an Arrow stream."""
    sink = pa.BufferOutputStream()
    schema = table.schema.with_metadata({_NAME: str(name).encode(), **(metadata or {})})
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(table)
    stream: bytes = sink.getvalue().to_pybytes()
    return stream


def unpacked(payload: Payload) -> Iterator[tuple[int, pa.Table]]:
    """Yield tables that `packed` made, one behind the other, and their numbers. They are views of the payload."""
    source = pa.BufferReader(payload)
    while source.tell() < source.size():
        table = pa.ipc.open_stream(source).read_all()
        yield int(table.schema.metadata[_NAME]), table


@dataclass
class Sender:
    """Collects tables for partitions, and gives them as blocks."""

    source: int
    #: What all partitions together may hold back.
    most: int = 8 * BLOCK_BYTES
    _numbers: int = 0
    _waiting: dict[int, list[bytes]] = field(default_factory=dict)
    _size: int = 0

    def add(self, partition: int, name: int, table: pa.Table) -> Iterator[ExchangedBlock]:
        """Send a table; the blocks that are full."""
        for part in cut(table):
            data = packed(part, name)
            self._waiting.setdefault(partition, []).append(data)
            self._size += len(data)
            if self._size >= self.most:
                yield from self.rest()

    def rest(self) -> Iterator[ExchangedBlock]:
        """Yield the blocks that remain."""
        for partition, streams in sorted(self._waiting.items()):
            for payload in _joined(streams):
                yield self.block(partition, payload)
        self._waiting, self._size = {}, 0

    def block(self, partition: int, payload: bytes) -> ExchangedBlock:
        """Return a payload as a block."""
        self._numbers += 1
        return ExchangedBlock(partition, self.source, self._numbers, payload)


def _joined(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield streams behind each other, as long as they are about a block."""
    streams, size = list[bytes](), 0
    for part in parts:
        if streams and size + len(part) > BLOCK_BYTES:
            yield b"".join(streams)
            streams, size = [], 0
        streams.append(part)
        size += len(part)
    if streams:
        yield b"".join(streams)


#: Of what the driver may hold, the part that statistics for tables by key may have, all together: merging them and
#: making tables of them takes several times as much.
_PART = 16
#: `row`: the table's values in order, doubles by their bits.
_ROWS = "table int, key string, row array<bigint>"
_ROWS_SCHEMA = pa.schema([("table", pa.int32()), ("key", pa.string()), ("row", pa.list_(pa.int64()))])
#: Rows of a batch on its way to the JVM.
_BATCH_ROWS = 10_000


def is_by_key(step: BoundOp, statistic: Statistic) -> bool:
    """Return whether tasks can make tables of a statistic of a step, key by key."""
    by_key = isinstance(step.op, EstimatorOp) and step.op.by_key
    return by_key and bool(statistic.key) and statistic.kind == "text"


def most_in_driver(spark: SparkSession) -> int:
    """Return bytes of statistics for tables by key, all together, that the driver takes into its memory."""
    return driver_python_bytes(spark) // _PART


@dataclass(frozen=True)
class KeyedStep:
    """An operator whose statistics with keys are in a frame."""

    op: EstimatorOp
    types: Mapping[str, ValueType]
    #: By the number under which the frame has it: the statistic's name.
    names: Mapping[int, str]
    #: What has no keys.
    ungrouped: Partials

    def finish(self, parts: Partials) -> FittedState:
        """Return what the operator makes of a part of the keys; a statistic that is not in `parts` has none of them."""
        statistics: Mapping[str, Statistic] = self.op.statistics(self.types)
        keyed = {name: parts.get(name, empty(statistics[name])) for name in self.names.values()}
        return self.op.finish({**self.ungrouped, **keyed}, self.types)


def keyed_tables(
    merged: DataFrame, steps: Mapping[tuple[int, int], KeyedStep], folder: Location, owner: object = None
) -> dict[tuple[int, int], FittedState]:
    """Return what steps (chain, step) learn, their tables in files.

    Args:
        merged: (name int, statistic binary): statistics, all groups of a key in one partition.
        steps: by chain and step.
        folder: a local one, for the files.
        owner: what removes the folder when no table is left.
    """
    from headrace.features.vocabulary.frame_codes import ordered

    learned = {place: step.finish({}) for place, step in steps.items()}
    # Tables are numbered through, in this order.
    tables = [(place, name, table.schema) for place, state in learned.items() for name, table in state.tables.items()]
    numbers = {(place, name): i for i, (place, name, _) in enumerate(tables)}
    work = FinishParts(steps, numbers)
    folder.make_dir()
    files = {i: folder.local_path() / f"{i}.parquet" for i in range(len(tables))}
    writers = TableWriters({i: TableWriter(files[i], schema, KEY) for i, (_, _, schema) in enumerate(tables)})
    rows = merged.mapInArrow(work.run, _ROWS).persist(StorageLevel.DISK_ONLY)
    try:
        with small_batches(merged.sparkSession):
            rows.count()
        for batch in streamed(ordered(rows, ["table", "key"], "key")):
            for number in pc.unique(batch.column(0)).to_pylist():
                rows_of_table = batch.filter(pc.equal(batch.column(0), number))
                writers.add(number, decoded(rows_of_table.column(1), rows_of_table.column(2), tables[number][2]))
    finally:
        rows.unpersist()
    writers.finish()
    return {
        place: FittedState(
            state.states, {name: FileKeyedTable(files[numbers[place, name]], owner) for name in state.tables}
        )
        for place, state in learned.items()
    }


@dataclass(frozen=True)
class FinishParts:
    """Make the rows of the tables whose keys are in a partition (_ROWS). Runs in a task."""

    steps: Mapping[tuple[int, int], KeyedStep]
    numbers: Mapping[tuple[tuple[int, int], str], int]

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        parts: dict[int, list[Partial]] = {}
        for batch in batches:
            for statistic in batch.column(1):
                for number, table in unpacked(statistic.as_buffer()):
                    parts.setdefault(number, []).append(table.replace_schema_metadata(None))
        if not parts:
            return
        # They were cut for the way: no group is twice.
        merged = {number: pa.concat_tables(pieces) for number, pieces in parts.items()}
        for place, step in self.steps.items():
            pieces = {name: merged[number] for number, name in step.names.items() if number in merged}
            for name, table in step.finish(pieces).tables.items():
                number = pa.repeat(pa.scalar(self.numbers[place, name], pa.int32()), len(table))
                yield from pa.table([number, *encoded(table)], schema=_ROWS_SCHEMA).to_batches(_BATCH_ROWS)


def encoded(table: pa.Table) -> tuple[pa.ChunkedArray, pa.ListArray]:
    """Return the keys of a keyed table, and of each row its values: doubles by their bits, so that none of them
    changes.
    """
    columns = [table.column(name).combine_chunks() for name in table.column_names if name != KEY]
    n, width = table.num_rows, len(columns)
    values, none = np.zeros((n, width), np.int64), np.zeros((n, width), np.bool_)
    for i, column in enumerate(columns):
        values[:, i] = column.fill_null(0).to_numpy().view(np.int64)
        none[:, i] = column.is_null().to_numpy(zero_copy_only=False)
    offsets = pa.array(np.arange(n + 1, dtype=np.int32) * np.int32(width))
    return table.column(KEY), pa.ListArray.from_arrays(offsets, pa.array(values.ravel(), mask=none.ravel()))


def decoded(keys: pa.Array, rows: pa.ListArray, schema: pa.Schema) -> pa.Table:
    """Return rows of the table that `encoded` was given."""
    width = len(schema) - 1
    flat = rows.flatten()
    values = flat.fill_null(0).to_numpy(zero_copy_only=False).reshape(-1, width)
    none = flat.is_null().to_numpy(zero_copy_only=False).reshape(-1, width)
    columns = []
    for i, value in enumerate(f for f in schema if f.name != KEY):
        column_values = np.ascontiguousarray(values[:, i])
        columns.append(
            pa.array(column_values.view(value.type.to_pandas_dtype()), value.type, mask=none[:, i], from_pandas=False)
        )
    columns.insert(schema.get_field_index(KEY), keys)
    return pa.Table.from_arrays(columns, schema=schema)
