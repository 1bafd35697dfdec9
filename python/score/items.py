"""The items of a run as mapped files in order of their key, never in the driver's memory.

An item is known by its position in that order, its row: 32 bits in every list of candidates, whatever its key is. All
workers of a host map the same files, so that a column costs its bytes once a host.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType

from headrace.errors import UserError
from headrace.features.functions.arrays import one_batch
from headrace.features.functions.spark_expressions import col
from headrace.stage import Context
from headrace.storage import Location


def row_hashes(frame: DataFrame, columns: Sequence[str], names: Sequence[str], *first: Column) -> list[Column]:
    """Return independent 64-bit hashes of some columns, one for each of `names`: bigint each, never null.

    Args:
        frame: has the columns.
        columns: scalars or arrays of scalars.
        names: of the hashes.
        first: values, never null, that are hashed before them.
    """
    values = [x for c in columns for x in _hashed(frame.schema[c].dataType, col(c))]
    return [F.xxhash64(F.lit(seed), *first, *values).alias(name) for seed, name in enumerate(names)]


def _hashed(type_: DataType, value: Column) -> list[Column]:
    """Return columns that tell a value from each other one: Spark's hash skips nulls, and the ends of arrays."""
    if isinstance(type_, ArrayType):
        nulls = F.transform(value, lambda x: x.isNull())
        return [value.isNull(), F.coalesce(F.size(value), F.lit(0)), nulls, _exact(type_.elementType, value, True)]
    return [value.isNull(), _exact(type_, value, False)]


def _exact(type_: DataType, value: Column, is_array: bool) -> Column:
    """Return values whose hashes differ if they do: -0 and 0 have one hash, but differ as text."""
    if not isinstance(type_, (FloatType, DoubleType)):
        return value
    return F.transform(value, lambda x: x.cast("string")) if is_array else value.cast("string")


#: Two hashes of an item's key and columns, int64, to find what has changed since another run.
HASHES = ("__hash_0", "__hash_1")
#: The column of `ItemTable.frame` that has an item's row.
ITEM_ROW = "item_row"
#: Rows of a record batch: few enough for a text column's 32-bit offsets, enough for a fast search.
_CHUNK_ROWS = 262_144
_MOST_ROWS = 2**31 - 1
_FRAME_BATCH_ROWS = 65_536


@dataclass(frozen=True)
class ItemPart:
    """A file of items: those that follow the part before it."""

    file: str
    rows: int


@dataclass(frozen=True)
class ItemTable:
    """A handle on the files; small and picklable, so that tasks are given it as it is."""

    #: Where the files are, visible to all executors.
    folder: Location
    #: Column of the item's key.
    key: str
    #: Schema of the files: the key, further columns, and HASHES.
    schema: pa.Schema
    parts: tuple[ItemPart, ...]
    #: Hash of all keys and columns: equal for equal items, however they are cut into parts.
    fingerprint: str

    @staticmethod
    def write(ctx: Context, spark: SparkSession, items: DataFrame, folder: Location) -> ItemTable:
        """Write the items by Spark tasks, in ascending order of `score.item.key` (text by its UTF-8 bytes).

        The folder appears when it is whole; one that is there is replaced. The caller removes it.

        Args:
            ctx: names the key, and how many items there may be.
            spark: the session.
            items: the key, one row each (nulls are left out), and further columns.
            folder: seen by all executors.

        Raises:
            UserError: there are more than 2^31 - 1 items.
        """
        score = ctx.spec.score
        assert score is not None
        # Items that a named source lists are not subject to the limit.
        key, limit = score.item.key, score.item.limit if score.item.from_ is None else None
        names = (*items.columns, *HASHES)
        rows = items.where(col(key).isNotNull()).select(
            *[col(c) for c in items.columns], *row_hashes(items, items.columns, HASHES)
        )
        if limit is not None and limit <= _CHUNK_ROWS:
            rows = rows.repartition(1)
        else:
            # An explicit number, which adaptive execution keeps: it would join small partitions.
            rows = rows.repartitionByRange(spark.sparkContext.defaultParallelism, col(key))
        # mapInArrow reads a dot in a column's name as a field's: numbers travel, the task puts the names back.
        numbered = rows.sortWithinPartitions(col(key)).toDF(*[f"c{i}" for i in range(len(names))])
        with folder.new_folder() as building:
            task = _Write(building, names)
            written_parts = sorted(json.loads(text) for (text,) in numbered.mapInArrow(task, "part string").collect())
            # Keep parts with rows, or one empty part for the schema.
            parts = tuple(ItemPart(file, n) for _, file, n, _ in written_parts if n) or (
                _empty(building, numbered, names),
            )
            schema = _map(building, parts[:1]).schema
        table = ItemTable(folder, key, schema, parts, _fingerprint(s for *_, s in written_parts))
        if table.rows > _MOST_ROWS:
            raise UserError(f"{table.rows:,} items are more than {_MOST_ROWS:,}: set score.item.limit")
        return table

    @staticmethod
    def of_arrow(items: pa.Table, key: str, folder: Location, part_rows: int = _CHUNK_ROWS) -> ItemTable:
        """Write the items of a table in memory, without Spark. Fingerprints of equal tables are equal.

        Args:
            items: the key, one row each, in any order (nulls are left out), and further columns.
            key: the column that says which item.
            folder: replaced.
            part_rows: rows of a file.
        """
        items = items.filter(items[key].is_valid())
        items = items.take(pc.sort_indices(items[key]))
        digests = [hashlib.blake2b(repr(r).encode(), digest_size=16).digest() for r in items.to_pylist()]
        hashes = np.frombuffer(b"".join(digests), np.int64).reshape(-1, len(HASHES))
        for i, name in enumerate(HASHES):
            items = items.append_column(name, pa.array(hashes[:, i].copy()))
        parts: list[ItemPart] = []
        sums: list[list[int]] = []
        with folder.new_folder() as building:
            for start in range(0, max(len(items), 1), part_rows):
                part, sum_ = _write_part(building, items.schema, [items.slice(start, part_rows)])
                parts.append(part)
                sums.append(sum_)
        return ItemTable(folder, key, items.schema, tuple(parts), _fingerprint(sums))

    @property
    def rows(self) -> int:
        """Return the number of items."""
        return sum(p.rows for p in self.parts)

    def open(self) -> pa.Table:
        """Return the key, the columns and HASHES, mapped: pages are read when they are used, and nothing is copied."""
        return _mapped(self)

    def first(self, rows: int) -> pa.Table:
        """Return the first items, at most so many: of a store, no more parts are fetched than have them."""
        ends = accumulate(p.rows for p in self.parts)
        parts = next((i + 1 for i, end in enumerate(ends) if end >= rows), len(self.parts))
        return _map(self.folder, self.parts[:parts]).slice(0, rows)

    def keys(self, item_rows: NDArray[np.integer[Any]] | pa.Array) -> pa.Array:
        """Return the keys of some items: of rows [n], an array [n] of the key's type."""
        return self.take(self.key, item_rows)

    def take(self, column: str, item_rows: NDArray[np.integer[Any]] | pa.Array) -> pa.Array:
        """Return a column of some items: of rows [n], an array [n] of the column's type."""
        rows = np.asarray(item_rows).astype(np.int64)
        chunks = [c for c in self.open()[column].chunks if len(c)]
        if len(chunks) == 1:
            return chunks[0].take(pa.array(rows))
        if not chunks or not len(rows):
            return pa.nulls(0, self.schema.field(column).type).take(pa.array(rows))
        starts = _starts(chunks)
        chunk_numbers = np.searchsorted(starts, rows, side="right") - 1
        order = np.argsort(chunk_numbers, kind="stable")
        pieces = [chunks[c].take(pa.array(rows[places] - starts[c])) for c, places in _groups(chunk_numbers, order)]
        inverse = np.empty(len(rows), np.int64)
        inverse[order] = np.arange(len(rows))
        return pa.concat_arrays(pieces).take(pa.array(inverse))

    def rows_of(self, keys: pa.Array) -> NDArray[np.int32]:
        """Return the rows of some items by binary search in the mapped keys: int32 [n], -1 for unknown keys."""
        type_ = self.schema.field(self.key).type
        keys = keys if keys.type == type_ else keys.cast(type_)
        item_rows = np.full(len(keys), -1, np.int32)
        chunks = [c for c in self.open()[self.key].chunks if len(c)]
        known = np.flatnonzero(keys.is_valid().to_numpy(zero_copy_only=False))
        if not chunks or not len(known):
            return item_rows
        keys = keys.take(pa.array(known))
        starts = _starts(chunks)
        chunk_numbers = _insertion(pa.concat_arrays([c.slice(0, 1) for c in chunks]), keys, after_equal=True) - 1
        for c, places in _groups(chunk_numbers, np.argsort(chunk_numbers, kind="stable")):
            if c < 0:
                continue
            chunk_keys = keys.take(pa.array(places))
            insertions = _insertion(chunks[c], chunk_keys, after_equal=False)
            inside = np.minimum(insertions, len(chunks[c]) - 1)
            same = pc.equal(chunks[c].take(pa.array(inside)), chunk_keys).to_numpy(zero_copy_only=False)
            item_rows[known[places]] = np.where(same, starts[c] + inside, -1)
        return item_rows

    def frame(self, spark: SparkSession) -> DataFrame:
        """Return a frame (item_row int, the key, the columns) with a partition for each part."""
        names = [n for n in self.schema.names if n not in HASHES]
        fields = [pa.field("c0", pa.int32())]
        fields += [pa.field(f"c{i}", self.schema.field(n).type) for i, n in enumerate(names, 1)]
        read = _Read(self, tuple(names))
        count = len(self.parts)
        frame = spark.range(0, count, 1, count).mapInArrow(read, from_arrow_schema(pa.schema(fields)))
        return frame.toDF(ITEM_ROW, *names)


@dataclass(frozen=True)
class _Write:
    """Spark task that writes its partition, in order, as a part."""

    folder: Location
    names: tuple[str, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        # Rebuild the table without nullability, which differs between batches.
        tables = (pa.table(b.columns, names=list(self.names)) for b in batches if b.num_rows)
        first = next(tables, None)
        if first is None:
            return
        part, sums = _write_part(self.folder, first.schema, _chain(first, tables))
        yield pa.RecordBatch.from_pydict({"part": [json.dumps([context.partitionId(), part.file, part.rows, sums])]})


@dataclass(frozen=True)
class _Read:
    """Spark task that reads parts as rows again."""

    table: ItemTable
    names: tuple[str, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        starts = [0, *accumulate(p.rows for p in self.table.parts)]
        for batch in batches:
            for number in batch.column(0).to_pylist():
                row = starts[number]
                part = _map(self.table.folder, self.table.parts[number : number + 1])
                for piece in part.select(list(self.names)).to_batches(_FRAME_BATCH_ROWS):
                    rows = pa.array(np.arange(row, row + piece.num_rows, dtype=np.int32))
                    row += piece.num_rows
                    columns = [rows, *piece.columns]
                    yield pa.RecordBatch.from_arrays(columns, [f"c{i}" for i in range(len(columns))])


def _chain(first: pa.Table, rest: Iterable[pa.Table]) -> Iterator[pa.Table]:
    yield first
    yield from rest


def _write_part(folder: Location, schema: pa.Schema, tables: Iterable[pa.Table]) -> tuple[ItemPart, list[int]]:
    """Write a file of rows in order; return it with the sums of their hashes.

    A task that runs twice writes another file: most stores give the same bytes, written again, another tag, and a
    reader would take the file that the table names for one that was changed.
    """
    name, rows, sums = f"part-{uuid.uuid4()}.arrow", 0, [0] * len(HASHES)
    with (folder / name).new_file() as path, pa.OSFile(str(path), "wb") as sink:
        with pa.ipc.new_file(sink, schema) as writer:
            for batch in _chunks(tables):
                writer.write_batch(batch)
                rows += batch.num_rows
                for i, h in enumerate(HASHES):
                    sums[i] += int(batch.column(h).to_numpy().view(np.uint64).sum(dtype=np.uint64))
    return ItemPart(name, rows), sums


def _chunks(tables: Iterable[pa.Table]) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches of about `_CHUNK_ROWS`."""
    waiting: list[pa.Table] = []
    rows = 0
    for table in tables:
        waiting.append(table)
        rows += len(table)
        if rows >= _CHUNK_ROWS:
            yield one_batch(pa.concat_tables(waiting))
            waiting, rows = [], 0
    if rows:
        yield one_batch(pa.concat_tables(waiting))


def _empty(folder: Location, frame: DataFrame, names: tuple[str, ...]) -> ItemPart:
    schema = pa.table(frame.limit(0).toArrow().columns, names=list(names)).schema
    return _write_part(folder, schema, [])[0]


def _fingerprint(sums: Iterable[list[int]]) -> str:
    total = [sum(column) % 2**64 for column in zip(*sums, strict=True)] or [0] * len(HASHES)
    return "".join(f"{x:016x}" for x in total)


@lru_cache(maxsize=4)
def _mapped(table: ItemTable) -> pa.Table:
    """Map the files and keep them open, since tasks read them repeatedly."""
    return _map(table.folder, table.parts)


def _map(folder: Location, parts: tuple[ItemPart, ...]) -> pa.Table:
    """Map files as one table."""
    files = [pa.ipc.open_file(pa.memory_map(str((folder / p.file).local_path()))) for p in parts]
    return pa.concat_tables([f.read_all() for f in files])


def _starts(chunks: list[pa.Array]) -> NDArray[np.int64]:
    return np.cumsum([0, *(len(c) for c in chunks[:-1])], dtype=np.int64)


def _groups(labels: NDArray[np.int64], order: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each number with the places that have it, ascending; `order` sorts `labels`."""
    numbers, begins = np.unique(labels[order], return_index=True)
    yield from zip(numbers.tolist(), np.split(order, begins[1:]), strict=True)


def _insertion(ordered: pa.Array, values: pa.Array, after_equal: bool) -> NDArray[np.int64]:
    """Return where values would go in an ascending array, before or after those that are equal: int64 [n]."""
    if pa.types.is_integer(ordered.type):
        side = ordered.to_numpy(zero_copy_only=True), values.to_numpy(zero_copy_only=True)
        return np.asarray(np.searchsorted(*side, side="right" if after_equal else "left"), np.int64)
    is_before = pc.less_equal if after_equal else pc.less
    low, high = np.zeros(len(values), np.int64), np.full(len(values), len(ordered), np.int64)
    for _ in range(len(ordered).bit_length()):
        middle = np.minimum((low + high) // 2, len(ordered) - 1)
        goes_right = is_before(ordered.take(pa.array(middle)), values).to_numpy(zero_copy_only=False) & (low < high)
        low, high = np.where(goes_right, middle + 1, low), np.where(goes_right, high, np.minimum(middle, high))
    return low
