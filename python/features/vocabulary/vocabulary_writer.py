"""Vocabularies that no process holds, on their way to files: of each all its values, of the table's new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.vocabulary import lookup
from headrace.features.vocabulary.table_writer import TableWriter


class VocabularyWriter:
    """Takes batches (name, value, code, count) in order of name and code; `count` is null where the code was known."""

    def __init__(
        self, folder: Path, names: Sequence[str], write: Callable[[pa.Table], dict[str, Any]], rows_a_file: int
    ) -> None:
        """Begin.

        Args:
            folder: for a file (value, code) of each vocabulary.
            names: of all of them.
            write: writes a data file of new rows (name, value, code, count); its `add` action.
            rows_a_file: most rows that it is given.
        """
        self._files = {name: TableWriter(folder / f"{quote(name, safe='')}.parquet", lookup.SCHEMA) for name in names}
        self._write, self._most = write, rows_a_file
        self._waiting: list[pa.RecordBatch] = []
        self._adds: list[dict[str, Any]] = []
        #: By vocabulary: how many codes are new.
        self.new: dict[str, int] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        """Take some rows."""
        for name in pc.unique(batch.column(0)).to_pylist():
            mine = batch.filter(pc.equal(batch.column(0), name))
            self._files[name].add(pa.Table.from_batches([mine.select(["value", "code"])]))
            new = mine.filter(mine.column(3).is_valid())
            if new.num_rows:
                self.new[name] = self.new.get(name, 0) + new.num_rows
                self._waiting.append(new)
        while sum(b.num_rows for b in self._waiting) >= self._most:
            self._flush(self._most)

    def finish(self) -> tuple[dict[str, Path], list[dict[str, Any]]]:
        """The vocabularies' files, and the data files of new rows."""
        for file in self._files.values():
            file.finish()
        if self._waiting:
            self._flush(sum(b.num_rows for b in self._waiting))
        return {name: file.path for name, file in self._files.items()}, self._adds

    def _flush(self, rows: int) -> None:
        whole = pa.Table.from_batches(self._waiting)
        self._adds.append(self._write(whole.slice(0, rows)))
        self._waiting = whole.slice(rows).to_batches()
