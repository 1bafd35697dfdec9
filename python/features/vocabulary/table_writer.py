"""Tables that no process holds, on their way to Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.features.vocabulary import lookup

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
