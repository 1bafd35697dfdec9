"""Rows of embedding tables that Spark joins in by id, where no host has the whole table. Imports torch.

A frame of users, or of other rows, is cut into parts, each a partition of its own. Tasks compute the codes that each
part looks up, read these rows from the saved files, and send them to the part in columns ROWS, as many rows a message
as MESSAGE_BYTES hold. A task receives the rows of its part before the rows to score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from headrace.embeddings.checkpoint.saved_rows import FoundRows, SavedFile, assemble
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.models.joined import (
    joined_files,
    joined_tables,
    needed_codes,
    null_codes,
    read_rows,
    set_rows,
    united_codes,
)
from headrace.models.predictor import Predictor, network_folder, network_of
from headrace.score.joined_tables import Partitioning, ReceivedRows
from headrace.score.loaded_model import Columns, PairFeatures, features_of_rows, gather, take_rows
from headrace.score.ranking import ITEMS, CandidateLists, TaskInputs
from headrace.storage import Location

#: Items or pairs in memory at once.
_ROWS = 65_536

Codes = Mapping[str, NDArray[np.int64]]


class JoinedModel(Protocol):
    """Model as a task describes it."""

    @property
    def model(self) -> Location:
        """The saved model's folder."""
        ...

    @property
    def joined(self) -> frozenset[str]:
        """The tables whose rows it is given."""
        ...

    def load(self) -> tuple[Predictor, FittedWorkflow]:
        """Return the model, opened once in each process."""
        ...


class VectorModel(JoinedModel, Protocol):
    """A model in retrieval form, as headrace.score.vectors has it."""

    def features_of(self, batch: pa.RecordBatch) -> Iterator[Columns]:
        """Yield the features of some rows, a block at a time."""
        ...

    def features_of_nothing(self) -> tuple[Columns, Columns]:
        """Return the features of a row of nulls, and of one whose values no vocabulary has."""
        ...


class CodesOf(Protocol):
    """Finds the codes, or raw ids, of joined tables that batches look up."""

    def add(self, batch: pa.RecordBatch) -> None:
        """Look at a batch of what a task works on."""
        ...

    def codes(self) -> dict[str, NDArray[np.int64]]:
        """Return the codes by table: int64, ascending."""
        ...


class SeenCodes:
    """The codes of joined tables that features have been seen to look up.

    Args:
        task: the joined tables. The model is opened where it is not.
    """

    def __init__(self, task: JoinedModel) -> None:
        predictor, self.fitted = task.load()
        network = network_of(predictor)
        assert network is not None
        self._model, self._joined = network.model, task.joined
        #: Codes of nulls are always included: a side's vectors are computed without the other side.
        self._parts: list[Codes] = [null_codes(self._model, self._joined)]

    def add(self, columns: Columns) -> None:
        """Look at features of some rows."""
        self._parts = [united_codes([*self._parts, needed_codes(self._model, self._joined, columns)])]

    def codes(self) -> dict[str, NDArray[np.int64]]:
        """Return the codes by table: int64, ascending."""
        self._parts = [united_codes(self._parts)]
        return dict(self._parts[0])


class CodesOfRows:
    """The codes, or raw ids, of whole rows, by joined table.

    Args:
        task: the joined tables. The model is opened where it is not.
        context: constants for columns that the rows lack.
    """

    def __init__(self, task: JoinedModel, context: Mapping[str, pa.Scalar]) -> None:
        self._codes, self._context = SeenCodes(task), context

    def add(self, batch: pa.RecordBatch) -> None:
        """Look at rows with the columns that the features read, and perhaps others."""
        for columns in features_of_rows(self._codes.fitted, batch, self._context):
            self._codes.add(columns)

    def codes(self) -> dict[str, NDArray[np.int64]]:
        """Return the codes by table: int64, ascending."""
        return self._codes.codes()


class CodesOfUsers:
    """The codes, or raw ids, of some users, of some items and of pairs of both, by joined table.

    Args:
        task: its items, their features and the joined tables. The model is opened where it is not.
    """

    def __init__(self, task: TaskInputs) -> None:
        self._task, self._codes = task, SeenCodes(task)
        self._features = PairFeatures(task.user_columns, task.item_names, task.context, self._codes.fitted)
        self._items: list[NDArray[np.int32]] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Look at users (the key, the user's columns, perhaps `__items`) and all that they are to be scored with."""
        if ITEMS in batch.schema.names:
            lists = CandidateLists.from_batch(batch)
            self.add_pairs(batch, lists.lengths, lists.items)
        else:
            self.add_first_items(batch, self._task.items.rows)

    def add_first_items(self, users: pa.RecordBatch, count: int) -> None:
        """Look at users with the first items: so many of each, all items at most."""
        n, count = users.num_rows, min(count, self._task.items.rows)
        self.add_pairs(users, np.full(n, count, np.int64), np.tile(np.arange(count, dtype=np.int32), n))

    def add_pairs(self, users: pa.RecordBatch, lengths: NDArray[np.int64], items: NDArray[np.int32]) -> None:
        """Look at users and their items.

        Args:
            users: the key and the user's columns, [n].
            lengths: how many items each has, [n], N in all.
            items: rows of items, [N].
        """
        features = self._features
        self._codes.add(features.user_columns(users))
        self._items = [np.unique(np.concatenate([*self._items, items]))]
        if not features.of_pair:
            return
        user_batch = users.select([c for c in features.user if c in users.schema.names])
        pair_users = np.repeat(np.arange(users.num_rows, dtype=np.int32), lengths)
        for start in range(0, len(items), _ROWS):
            rows = items[start : start + _ROWS]
            parts = [self._task.items.take(c, rows) for c in features.item_parts]
            item_batch = pa.RecordBatch.from_arrays(parts, list(features.item_parts))
            self._codes.add(
                features.cross_columns(take_rows(user_batch, pair_users[start : start + _ROWS]), item_batch)
            )

    def codes(self) -> dict[str, NDArray[np.int64]]:
        """Return the codes by table: int64, ascending."""
        of_items = self._task.item_features.open()
        for items in self._items:
            for start in range(0, len(items), _ROWS):
                rows = items[start : start + _ROWS]
                self._codes.add(gather({}, of_items, rows[:0], rows))
        self._items = []
        return self._codes.codes()


class CodesOfVectors:
    """The codes, or raw ids, that vectors of some rows look up, and those of rows of which nothing is known.

    Args:
        vectors: the model and the side.
    """

    def __init__(self, vectors: VectorModel) -> None:
        self._vectors, self._codes = vectors, SeenCodes(vectors)
        for columns in vectors.features_of_nothing():
            self._codes.add(columns)

    def add(self, batch: pa.RecordBatch) -> None:
        """Look at rows that have the side's columns, and perhaps others."""
        for columns in self._vectors.features_of(batch):
            self._codes.add(columns)

    def codes(self) -> dict[str, NDArray[np.int64]]:
        """Return the codes by table: int64, ascending."""
        return self._codes.codes()


def take_few_rows(task: TaskInputs, users: pa.RecordBatch, items: int) -> None:
    """Give the model the rows of its joined tables that some users look up with the first items.

    Args:
        task: the items and the model, which is opened where it is not.
        users: the key and the user's columns, [n].
        items: how many, at most.
    """
    network, folder = network_of(task.load()[0]), network_folder(task.model)
    assert network is not None
    assert folder is not None
    needed = CodesOfUsers(task)
    needed.add_first_items(users, items)
    set_rows(network.model, task.joined, read_rows(folder, network.model, task.joined, needed.codes()))


#: Approximate size of a message with rows or codes, in bytes; at least one row.
MESSAGE_BYTES = 8 << 20
#: Columns of a part's requests to a file, and of the rows in answer. `codes` are packed int64 numbers.
REQUESTS = "part int, file int, table_name string, codes binary"
ROWS = "part int, table_name string, level int, first_column int, stored string, codes binary, rows binary"
_ROWS_NAMES = tuple(column.split(" ")[0] for column in ROWS.split(", "))


@dataclass(frozen=True)
class RequestRows:
    """Request of each part: the codes that it needs of each file."""

    #: Creates the collector of a part's codes.
    needed: Callable[[], CodesOf]
    files: tuple[SavedFile, ...]
    #: Names of the columns after the first, which is the part.
    names: tuple[str, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        needed: dict[int, CodesOf] = {}
        for batch in batches:
            for part, rows in _runs(batch):
                if part not in needed:
                    needed[part] = self.needed()
                needed[part].add(pa.RecordBatch.from_arrays(rows.columns[1:], list(self.names)))
        for part, part_codes in needed.items():
            for table, codes in part_codes.codes().items():
                for number, file in enumerate(self.files):
                    requested = codes[file.may_have(table, codes)]
                    for piece in _pieces(requested, 8):
                        yield _batch(REQUESTS, part, number, table, piece.tobytes())


@dataclass(frozen=True)
class ReadRows:
    """The rows that were asked of files: each file is compared with its checksum, and then read where it must be."""

    files: tuple[SavedFile, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        checked: set[int] = set()
        for batch in batches:
            for part, number, table, codes in zip(*batch.columns, strict=True):
                file = self.files[number.as_py()]
                if number.as_py() not in checked:
                    file.check()
                    checked.add(number.as_py())
                requested = np.frombuffer(codes.as_buffer(), np.int64)
                # A few at a time, since the rows are copied.
                for piece in _pieces(requested, 64):
                    for table_rows in file.read(table.as_py(), piece):
                        yield from _messages(part.as_py(), table.as_py(), table_rows)


def after_table_rows(
    task: JoinedModel, batches: Iterable[pa.RecordBatch], names: Sequence[str], received: ReceivedRows | None
) -> Iterator[pa.RecordBatch]:
    """Yield a task's batches under its own columns' names, after the model has taken the table rows of its part.

    Args:
        task: the model.
        batches: ROWS, and behind them the other columns: of a part first rows of tables, then what is worked on, whose
            `table_name` is null.
        names: the other columns.
        received: is told how many rows came.
    """
    network = network_of(task.load()[0])
    assert network is not None
    tables = {t.name: t for t in joined_tables(network.model, task.joined)}
    pending: dict[str, list[FoundRows]] = {}
    current: int | None = None
    rows = size = largest = 0
    for batch in batches:
        for part, run in _runs(batch):
            messages = run.filter(run.column("table_name").is_valid())
            asking = run.filter(run.column("table_name").is_null())
            for message in zip(*messages.columns[1 : len(_ROWS_NAMES)], strict=True):
                table, table_rows = _parse_message(message)
                pending.setdefault(table, []).append(table_rows)
            if not asking.num_rows:
                continue
            if part != current:
                taken = {name: assemble(tables[name], parts) for name, parts in pending.items()}
                set_rows(network.model, task.joined, taken)
                count = sum(t.codes.numel() for t in taken.values())
                rows, largest = rows + count, max(largest, count)
                size += sum(t.rows.nbytes for t in taken.values())
                pending, current = {}, part
            yield pa.RecordBatch.from_arrays(asking.columns[len(_ROWS_NAMES) :], list(names))
    if received is not None and current is not None:
        received.add(rows, size, largest)


def _runs(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield a batch whose first column ascends, cut where that changes."""
    parts = batch.column(0).to_numpy(zero_copy_only=False)
    cuts = [0, *(np.flatnonzero(parts[1:] != parts[:-1]) + 1).tolist(), len(parts)]
    for start, end in pairwise(cuts):
        if end > start:
            yield int(parts[start]), batch.slice(start, end - start)


def _messages(part: int, table: str, table_rows: FoundRows) -> Iterator[pa.RecordBatch]:
    for start in range(
        0, len(table_rows.codes), message_rows := max(1, MESSAGE_BYTES // (8 + table_rows.rows.shape[1]))
    ):
        piece = slice(start, start + message_rows)
        codes, rows = table_rows.codes[piece].tobytes(), np.ascontiguousarray(table_rows.rows[piece]).tobytes()
        yield _batch(ROWS, part, table, table_rows.level, table_rows.first_column, table_rows.dtype, codes, rows)


def _parse_message(message: tuple[pa.Scalar, ...]) -> tuple[str, FoundRows]:
    table, level, first, stored, codes, rows = message
    numbers = np.frombuffer(codes.as_buffer(), np.int64)
    values = np.frombuffer(rows.as_buffer(), np.uint8).reshape(len(numbers), -1)
    return table.as_py(), FoundRows(level.as_py(), first.as_py(), stored.as_py(), numbers, values)


def _pieces(codes: NDArray[np.int64], row_bytes: int) -> Iterator[NDArray[np.int64]]:
    piece_rows = max(1, MESSAGE_BYTES // row_bytes)
    return (codes[start : start + piece_rows] for start in range(0, len(codes), piece_rows))


_ARROW: dict[str, Callable[[], pa.DataType]] = {"int": pa.int32, "string": pa.string, "binary": pa.binary}


def _batch(schema: str, *row: object) -> pa.RecordBatch:
    """Return a batch of one row."""
    columns = [column.split(" ") for column in schema.split(", ")]
    arrays = [pa.array([value], _ARROW[type_]()) for value, (_, type_) in zip(row, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, [name for name, _ in columns])


#: Candidate numbers per partition. The probability that Spark's hash sends none of them to a partition is e^-64.
_NUMBERS_EACH = 64


def map_with_table_rows(
    spark: SparkSession,
    task: JoinedModel,
    needed: Callable[[], CodesOf],
    frame: DataFrame,
    names: Sequence[str],
    parts: Partitioning,
    work: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: StructType | str,
    received: ReceivedRows | None = None,
) -> DataFrame:
    """Return `frame.mapInArrow(work, schema)` with a partition for each part, whose task's model has the rows that it
    looks up.

    Args:
        spark: the session.
        task: the model and its joined tables.
        needed: makes what finds the codes that rows of the frame look up; picklable.
        frame: with columns c0, c1, ...
        names: what these are called, to `needed` and to `work`.
        parts: how it is cut.
        work: what a task does with the rows of its part.
        schema: of what that makes.
        received: is told what rows of tables the tasks were brought.

    Raises:
        UserError: a record of the saved model is missing or damaged.
    """
    column_names = tuple(names)

    def behind_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from work(after_table_rows(task, batches, column_names, received))

    return _table_rows_before(spark, task, needed, frame, column_names, parts).mapInArrow(behind_rows, schema)


def _table_rows_before(
    spark: SparkSession,
    task: JoinedModel,
    needed: Callable[[], CodesOf],
    frame: DataFrame,
    names: tuple[str, ...],
    parts: Partitioning,
) -> DataFrame:
    """Return the columns ROWS, and the frame's after them, for `tasks.after_table_rows`. Each part is a partition.

    Three exchanges: of the frame by part, whose tasks say what they need; of that by file; of rows and, once more, of
    the frame by part. One task reads a file.
    """
    folder = network_folder(task.model)
    assert folder is not None
    files = joined_files(folder, task.joined)
    parted = frame.select(_part(spark, parts).alias("part"), "*")
    requests = parted.repartition(parts.count, "part").mapInArrow(RequestRows(needed, files, names), REQUESTS)
    by_file = requests.repartition(max(1, len(files)), "file").sortWithinPartitions("file")
    rows = by_file.mapInArrow(ReadRows(files), ROWS)
    combined = rows.unionByName(parted, allowMissingColumns=True).repartition(parts.count, "part")
    return combined.sortWithinPartitions("part", F.col("table_name").isNull(), parts.order)


def _part(spark: SparkSession, parts: Partitioning) -> Column:
    """Return the part of a row: a number whose hash partitions differ, for `repartition(count, "part")`."""
    numbers = spark.range(_NUMBERS_EACH * parts.count).select(F.col("id").cast("int").alias("part"))
    # The same function as Spark's hash partitioning, since table rows have no key to hash.
    by_partition = numbers.groupBy(F.pmod(F.hash("part"), F.lit(parts.count)).alias("partition")).agg(F.min("part"))
    part_numbers = [str(number) for _, number in sorted(tuple(row) for row in by_partition.collect())]
    assert len(part_numbers) == parts.count
    numbers_by_part = F.split(F.lit(",".join(part_numbers)), ",").cast("array<int>")
    return F.element_at(numbers_by_part, parts.number + 1)
