"""Keyed tables: what was learned of each value, in memory, in a file, or in mapped files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.dataset.layout import column_bytes
from headrace.features.vocabulary.lookup import (
    SCHEMA,
    Lookup,
    MappedChunks,
    MappedLookup,
    TextRows,
    file_batches,
    write_batches,
)
from headrace.schema import FIRST_CODE
from headrace.storage import Location

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
