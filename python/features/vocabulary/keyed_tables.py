"""Keyed tables: what was learned of each value, in memory, in a file, or in mapped files.

Writers bring tables that no process holds to Parquet files.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.compute import pc
from headrace.config.schema import FIRST_CODE
from headrace.dataset.layout import column_bytes
from headrace.features.vocabulary import lookup
from headrace.features.vocabulary.lookup import (
    SCHEMA,
    Lookup,
    MappedChunks,
    MappedLookup,
    TextRows,
    file_batches,
    write_batches,
)
from headrace.storage import Location

#: Of a row group at most: rows, and bytes of its texts. A row group is what a reader holds.
_GROUP_ROWS, _GROUP_BYTES = 1 << 20, 32 << 20

K = TypeVar("K", bound=Hashable)


class Pieces:
    """Rows that come in batches, in pieces of a limited size: as many as fit, and one at least.

    Where pieces end depends on the rows alone, not on the batches.
    """

    def __init__(self, schema: pa.Schema, text: str, most_rows: int, most_bytes: int) -> None:
        """Begin.

        Args:
            schema: of the rows.
            text: the column of which a piece has at most `most_bytes`.
            most_rows: that a piece has.
            most_bytes: of that column's values.
        """
        self._schema, self._text, self._most_rows, self._most_bytes = schema, text, most_rows, most_bytes
        self._waiting: list[pa.RecordBatch] = []
        self._rows, self._bytes = 0, 0

    def add(self, rows: pa.Table) -> Iterator[pa.Table]:
        """Take rows and yield the pieces that are full."""
        self._keep(rows)
        while self._rows >= self._most_rows or self._bytes > self._most_bytes:
            table = pa.Table.from_batches(self._waiting, self._schema)
            ends = np.cumsum(self._sizes(table.slice(0, self._most_rows)))
            count = max(1, int(np.searchsorted(ends, self._most_bytes, "right")))
            self._waiting, self._rows, self._bytes = [], 0, 0
            self._keep(table.slice(count))
            yield table.slice(0, count)

    def rest(self) -> pa.Table:
        """Return the remaining rows: less than a piece."""
        return pa.Table.from_batches(self._waiting, self._schema)

    def _keep(self, rows: pa.Table) -> None:
        self._waiting += rows.to_batches()
        self._rows += rows.num_rows
        self._bytes += int(self._sizes(rows).sum())

    def _sizes(self, rows: pa.Table) -> npt.NDArray[np.int64]:
        return np.asarray(pc.fill_null(pc.binary_length(rows.column(self._text)), 0).to_numpy(), np.int64)


class TableWriter:
    """A table's file: the same bytes, in whatever parts the table comes."""

    def __init__(self, path: Path, schema: pa.Schema, text: str) -> None:
        """Begin the file. `text`: the column of texts, of which a row group has a limited size."""
        self.path = path
        self._schema = schema
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._pieces = Pieces(schema, text, _GROUP_ROWS, _GROUP_BYTES)
        self._written, self._is_finished = False, False

    def add(self, rows: pa.Table) -> None:
        """Write rows behind the others."""
        for piece in self._pieces.add(rows.cast(self._schema)):
            self._write(piece)

    def finish(self) -> None:
        """End the file; a second call does nothing."""
        if self._is_finished:
            return
        rest = self._pieces.rest()
        if rest.num_rows or not self._written:
            self._write(rest)
        self._writer.close()
        self._is_finished = True

    def _write(self, rows: pa.Table) -> None:
        self._writer.write_table(rows.combine_chunks(), max(rows.num_rows, 1))
        self._written = True


class TableWriters(Generic[K]):
    """Tables whose rows come one table after the other, so that those of one wait at a time."""

    def __init__(self, writers: Mapping[K, TableWriter]) -> None:
        """`writers`: of all tables, also of those without rows."""
        self._writers = writers
        self._current: K | None = None

    def add(self, table: K, rows: pa.Table) -> None:
        """Write rows of a table; none of the table before it come any more."""
        if self._current is not None and table != self._current:
            self._writers[self._current].finish()
        self._current = table
        self._writers[table].add(rows)

    def finish(self) -> dict[K, Path]:
        """End all files and return their paths."""
        for writer in self._writers.values():
            writer.finish()
        return {table: writer.path for table, writer in self._writers.items()}


def write_table(table: pa.Table, path: Path, text: str) -> None:
    """Write a table's file, as a TableWriter does."""
    writer = TableWriter(path, table.schema, text)
    writer.add(table)
    writer.finish()


#: Of new rows.
_SCHEMA = pa.schema([("name", pa.string()), ("value", pa.string()), ("code", pa.int64()), ("count", pa.int64())])
_TEXT = "value"


class VocabularyWriter:
    """Takes batches (name, value, code, count) in order of name and code; `count` is null where the code was known."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        write: Callable[[pa.Table], dict[str, Any]],
        rows_a_file: int,
        bytes_a_file: int,
    ) -> None:
        """Begin.

        Args:
            folder: for a file (value, code) of each vocabulary.
            names: of all of them.
            write: writes a data file of new rows (name, value, code, count); its `add` action.
            rows_a_file: most rows that it is given.
            bytes_a_file: most bytes of their values, unless one alone has more.
        """
        files = {n: TableWriter(folder / f"{quote(n, safe='')}.parquet", lookup.SCHEMA, _TEXT) for n in names}
        self._files = TableWriters(files)
        self._write = write
        self._new = Pieces(_SCHEMA, _TEXT, rows_a_file, bytes_a_file)
        self._adds: list[dict[str, Any]] = []
        #: By vocabulary: how many codes are new.
        self.new: dict[str, int] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        """Take some rows."""
        for name in pc.unique(batch.column(0)).to_pylist():
            vocabulary_rows = batch.filter(pc.equal(batch.column(0), name))
            self._files.add(name, pa.Table.from_batches([vocabulary_rows.select(["value", "code"])]))
            new = vocabulary_rows.filter(vocabulary_rows.column(3).is_valid())
            if new.num_rows:
                self.new[name] = self.new.get(name, 0) + new.num_rows
                self._adds += map(self._write, self._new.add(pa.Table.from_batches([new]).cast(_SCHEMA)))

    def finish(self) -> tuple[dict[str, Path], list[dict[str, Any]]]:
        """Return the vocabularies' files, and the data files of new rows."""
        files = self._files.finish()
        rest = self._new.rest()
        if rest.num_rows:
            self._adds.append(self._write(rest))
        return files, self._adds


#: The column of a keyed table that says which value a row is of: string, no null, none twice.
KEY = "key"


class KeyedTable:
    """A table of values by key in memory, found as codes are (headrace.features.vocabulary.lookup).

    For those that are too large: headrace.features.vocabulary.keyed_tables.
    """

    def __init__(self, table: pa.Table) -> None:
        """`table` has the column `key` and columns of int64 or float64 without nulls (nulls: a value that is missing).

        Rows are put in order of their keys, so that equal tables are equal files.
        """
        self._table = table.sort_by(KEY).combine_chunks()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def table(self) -> pa.Table:
        """All of it."""
        return self._table

    @property
    def text_bytes(self) -> int:
        """Bytes of all keys."""
        return int(self._table.column(KEY).nbytes)

    @property
    def schema(self) -> pa.Schema:
        """Schema of `table`."""
        return self._table.schema

    @property
    def values(self) -> tuple[str, ...]:
        """Names of the columns besides the key."""
        return tuple(name for name in self.schema.names if name != KEY)

    @cached_property
    def lookup(self) -> Lookup:
        """Lookup from a key to its row plus FIRST_CODE."""
        codes = np.arange(FIRST_CODE, FIRST_CODE + len(self))
        return Lookup(pa.table({"value": self.table.column(KEY), "code": pa.array(codes, pa.int64())}))

    def rows(self, keys: pa.Array) -> npt.NDArray[np.int64]:
        """Return the row of each key (text, or integers or booleans by their spelling), -1 where there is none or it is
        null.

        [n] -> int64 [n].
        """
        return np.maximum(self.lookup.codes(keys).astype(np.int64) - FIRST_CODE, -1)

    def take(self, column: str, rows: npt.NDArray[np.int64], missing: float | int | None = None) -> pa.Array:
        """Return values of a column at `rows`, `missing` (None: null) where that is -1."""
        values = self._taken(column, rows)
        if missing is None:
            return values
        return pc.if_else(pa.array(rows < 0), pa.scalar(missing, values.type), values)

    def _taken(self, column: str, rows: npt.NDArray[np.int64]) -> pa.Array:
        """Return values of a column at `rows`, null where that is -1."""
        return self.table.column(column).combine_chunks().take(pa.array(rows, mask=rows < 0))


def keyed_of(table: pa.Table | KeyedTable) -> KeyedTable:
    """Return a keyed table that is given as such or as its rows."""
    return table if isinstance(table, KeyedTable) else KeyedTable(table)


_KEYS, _VALUES = "keys", "columns.arrow"


class FileKeyedTable(KeyedTable):
    """A keyed table that stays in its file, of which a row group is in memory at a time.

    Each batch of keys costs a read of the whole file.
    """

    def __init__(self, path: Path, folder: object = None) -> None:
        """Open it.

        Args:
            path: as `FittedWorkflow.save` writes it.
            folder: what removes the file when it is gone.
        """
        self.path, self._folder = path, folder
        metadata = pq.read_metadata(path)
        self._rows, self._schema = metadata.num_rows, metadata.schema.to_arrow_schema()
        self._text_bytes = sum(column_bytes(metadata, KEY))

    def __len__(self) -> int:
        return int(self._rows)

    @property
    def table(self) -> pa.Table:
        """All of it, read anew."""
        return pq.read_table(self.path)

    @property
    def text_bytes(self) -> int:
        """See KeyedTable."""
        return self._text_bytes

    @property
    def schema(self) -> pa.Schema:
        """See KeyedTable."""
        return self._schema

    def rows(self, keys: pa.Array) -> npt.NDArray[np.int64]:
        """See KeyedTable."""
        texts = pc.if_else(keys, "true", "false") if pa.types.is_boolean(keys.type) else keys.cast(pa.string())
        encoded = texts.dictionary_encode()
        row_numbers = np.full(len(encoded.dictionary) + 1, -1, np.int64)  # the last is null's
        start = 0
        for keys_part in self._column(KEY):
            positions = TextRows(keys_part).find(encoded.dictionary)
            row_numbers[:-1] = np.where(positions >= 0, positions + start, row_numbers[:-1])
            start += len(keys_part)
        index: npt.NDArray[np.int64] = pc.fill_null(encoded.indices, len(row_numbers) - 1).to_numpy(
            zero_copy_only=False
        )
        return row_numbers[index]

    def _taken(self, column: str, rows: npt.NDArray[np.int64]) -> pa.Array:
        pieces, places, start = [pa.array([], self.schema.field(column).type)], [np.empty(0, np.int64)], 0
        for part in self._column(column):
            positions = np.flatnonzero((rows >= start) & (rows < start + len(part)))
            pieces.append(part.take(pa.array(rows[positions] - start)))
            places.append(positions)
            start += len(part)
        return _placed(pa.concat_arrays(pieces), np.concatenate(places), len(rows))

    def _column(self, name: str) -> Iterator[pa.Array]:
        return (batch.column(0) for batch in file_batches(self.path, [name]))


class MappedKeyedTable(KeyedTable):
    """A keyed table whose columns lie in mapped files, its keys found by binary search in their sorted hashes."""

    @staticmethod
    def write_file(file: Path, folder: Location) -> None:
        """Put the files into a folder, of one that `FittedWorkflow.save` wrote; of the keys, 16 bytes each are in
        memory."""
        schema = pq.read_schema(file)
        value_names = [name for name in schema.names if name != KEY]
        (folder / _KEYS).make_dir()
        MappedLookup.write(_numbered(file_batches(file, [KEY])), pq.read_metadata(file).num_rows, folder / _KEYS)
        fields = pa.schema([schema.field(name) for name in value_names])
        write_batches(file_batches(file, value_names), fields, folder / _VALUES)

    def __init__(self, folder: Location) -> None:
        """`folder`: see `write_file`."""
        self._keys, self._columns = MappedLookup(folder / _KEYS), MappedChunks(folder / _VALUES)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def table(self) -> pa.Table:
        """All of it."""
        values = pa.Table.from_batches(self._columns.batches, self._columns.schema)
        return values.add_column(0, KEY, self._keys.table.column("value").cast(pa.string()))

    @property
    def text_bytes(self) -> int:
        """See KeyedTable."""
        return self._keys.text_bytes

    @property
    def schema(self) -> pa.Schema:
        """See KeyedTable."""
        return pa.schema([pa.field(KEY, pa.string()), *self._columns.schema])

    @cached_property
    def lookup(self) -> Lookup:
        """See KeyedTable."""
        return self._keys

    def _taken(self, column: str, rows: npt.NDArray[np.int64]) -> pa.Array:
        positions = np.flatnonzero(rows >= 0)
        return _placed(self._columns.take(column, rows[positions]), positions, len(rows))


def _placed(values: pa.Array, places: npt.NDArray[np.int64], n: int) -> pa.Array:
    """Return values at their places among n, null at the others."""
    value_index = np.full(n, -1, np.int64)
    value_index[places] = np.arange(len(places))
    return values.take(pa.array(value_index, mask=value_index < 0))


def _numbered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Keys with the codes of their rows."""
    start = FIRST_CODE
    for batch in batches:
        codes = pa.array(np.arange(start, start + batch.num_rows), pa.int64())
        yield pa.RecordBatch.from_arrays([batch.column(0), codes], schema=SCHEMA)
        start += batch.num_rows
