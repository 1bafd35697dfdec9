"""What Spark's tasks do where rows are joined in: say which are needed, read them from the saved files, take them.

A frame of users, or of anything that a task works on, is cut in parts, each a partition of its own. Rows of tables come
to a part in columns ROWS, as many rows a message as MESSAGE_BYTES hold, before what is to be scored there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.embeddings.checkpoint.saved_rows import FoundRows, SavedFile, assemble
from headrace.models.joined import joined_tables, set_rows
from headrace.models.predictor import network_of
from headrace.score.joined.held import HeldRows
from headrace.score.joined.needed import CodesOf, JoinedModel

#: Bytes of rows, or of codes, in a message about; at least a row.
MESSAGE_BYTES = 8 << 20
#: Spark's columns of what a part asks of a file, and of the rows that come back. Codes are int64, one behind another.
ASKED = "part int, file int, table_name string, codes binary"
ROWS = "part int, table_name string, level int, first_column int, stored string, codes binary, rows binary"
_ROWS_NAMES = tuple(column.split(" ")[0] for column in ROWS.split(", "))


@dataclass(frozen=True)
class Ask:
    """Of each part, the codes that it needs of each file."""

    #: Makes what finds the codes of a part's rows.
    needed: Callable[[], CodesOf]
    files: tuple[SavedFile, ...]
    #: Of the columns behind the first, which says the part.
    names: tuple[str, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        needed: dict[int, CodesOf] = {}
        for batch in batches:
            for part, rows in _runs(batch):
                if part not in needed:
                    needed[part] = self.needed()
                needed[part].add(pa.RecordBatch.from_arrays(rows.columns[1:], list(self.names)))
        for part, of in needed.items():
            for table, codes in of.found().items():
                for number, file in enumerate(self.files):
                    asked = codes[file.may_have(table, codes)]
                    for some in _pieces(asked, 8):
                        yield _batch(ASKED, part, number, table, some.tobytes())


@dataclass(frozen=True)
class Read:
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
                asked = np.frombuffer(codes.as_buffer(), np.int64)
                # A few at a time: rows that are found are copied.
                for some in _pieces(asked, 64):
                    for found in file.read(table.as_py(), some):
                        yield from _messages(part.as_py(), table.as_py(), found)


def after_table_rows(
    task: JoinedModel, batches: Iterable[pa.RecordBatch], names: Sequence[str], held: HeldRows | None
) -> Iterator[pa.RecordBatch]:
    """What a task works on, by its own columns' names; before it the model takes the rows of tables of its part.

    Args:
        task: the model.
        batches: ROWS, and behind them the other columns: of a part first rows of tables, then what is worked on, whose
            `table_name` is null.
        names: the other columns.
        held: is told how many rows came.
    """
    network = network_of(task.load()[0])
    assert network is not None
    tables = {t.name: t for t in joined_tables(network.model, task.joined)}
    came: dict[str, list[FoundRows]] = {}
    current: int | None = None
    rows = size = most = 0
    for batch in batches:
        for part, run in _runs(batch):
            messages = run.filter(run.column("table_name").is_valid())
            asking = run.filter(run.column("table_name").is_null())
            for message in zip(*messages.columns[1 : len(_ROWS_NAMES)], strict=True):
                table, found = _found(message)
                came.setdefault(table, []).append(found)
            if not asking.num_rows:
                continue
            if part != current:
                taken = {name: assemble(tables[name], parts) for name, parts in came.items()}
                set_rows(network.model, task.joined, taken)
                count = sum(t.codes.numel() for t in taken.values())
                rows, most = rows + count, max(most, count)
                size += sum(t.rows.nbytes for t in taken.values())
                came, current = {}, part
            yield pa.RecordBatch.from_arrays(asking.columns[len(_ROWS_NAMES) :], list(names))
    if held is not None and current is not None:
        held.add(rows, size, most)


def _runs(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """A batch whose first column ascends, cut where that changes."""
    parts = batch.column(0).to_numpy(zero_copy_only=False)
    cuts = [0, *(np.flatnonzero(parts[1:] != parts[:-1]) + 1).tolist(), len(parts)]
    for start, end in pairwise(cuts):
        if end > start:
            yield int(parts[start]), batch.slice(start, end - start)


def _messages(part: int, table: str, found: FoundRows) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(found.codes), each := max(1, MESSAGE_BYTES // (8 + found.rows.shape[1]))):
        some = slice(start, start + each)
        codes, rows = found.codes[some].tobytes(), np.ascontiguousarray(found.rows[some]).tobytes()
        yield _batch(ROWS, part, table, found.level, found.first_column, found.dtype, codes, rows)


def _found(message: tuple[pa.Scalar, ...]) -> tuple[str, FoundRows]:
    table, level, first, stored, codes, rows = message
    numbers = np.frombuffer(codes.as_buffer(), np.int64)
    values = np.frombuffer(rows.as_buffer(), np.uint8).reshape(len(numbers), -1)
    return table.as_py(), FoundRows(level.as_py(), first.as_py(), stored.as_py(), numbers, values)


def _pieces(codes: NDArray[np.int64], row_bytes: int) -> Iterator[NDArray[np.int64]]:
    each = max(1, MESSAGE_BYTES // row_bytes)
    return (codes[start : start + each] for start in range(0, len(codes), each))


_ARROW: dict[str, Callable[[], pa.DataType]] = {"int": pa.int32, "string": pa.string, "binary": pa.binary}


def _batch(schema: str, *row: object) -> pa.RecordBatch:
    """A batch of one row."""
    columns = [column.split(" ") for column in schema.split(", ")]
    arrays = [pa.array([value], _ARROW[type_]()) for value, (_, type_) in zip(row, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, [name for name, _ in columns])
