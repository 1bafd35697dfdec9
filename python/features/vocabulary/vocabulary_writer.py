"""Vocabularies that no process holds, on their way to files: of each all its values, of the table's new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.vocabulary import lookup
from headrace.features.vocabulary.table_writer import Pieces, TableWriter, TableWriters

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
            mine = batch.filter(pc.equal(batch.column(0), name))
            self._files.add(name, pa.Table.from_batches([mine.select(["value", "code"])]))
            new = mine.filter(mine.column(3).is_valid())
            if new.num_rows:
                self.new[name] = self.new.get(name, 0) + new.num_rows
                self._adds += map(self._write, self._new.add(pa.Table.from_batches([new]).cast(_SCHEMA)))

    def finish(self) -> tuple[dict[str, Path], list[dict[str, Any]]]:
        """The vocabularies' files, and the data files of new rows."""
        files = self._files.finish()
        rest = self._new.rest()
        if rest.num_rows:
            self._adds.append(self._write(rest))
        return files, self._adds
