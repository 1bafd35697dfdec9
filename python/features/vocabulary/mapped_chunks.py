"""Columns in files that processes map."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.storage import Location

#: Of a record batch: a text column's offsets have 32 bits.
_BATCH_ROWS = 1 << 20


def of_table(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """A table's rows in batches for `write`."""
    yield from table.to_batches(_BATCH_ROWS)


def of_file(file: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Columns of a Parquet file in batches for `write`; a row group in memory at a time."""
    parquet = pq.ParquetFile(file)
    for group in range(parquet.num_row_groups):
        yield from of_table(parquet.read_row_group(group, list(columns)))


def write(batches: Iterable[pa.RecordBatch], schema: pa.Schema, file: Location) -> None:
    """Put batches into a file of `schema`."""
    with file.new_file() as path, pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


class MappedChunks:
    """The columns of a file that `write` wrote, mapped."""

    def __init__(self, file: Location) -> None:
        """Map it."""
        opened = pa.ipc.open_file(pa.memory_map(str(file.local_path())))
        self.schema: pa.Schema = opened.schema
        self.batches: list[pa.RecordBatch] = [opened.get_batch(i) for i in range(opened.num_record_batches)]
        self._ends = np.cumsum([b.num_rows for b in self.batches], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def take(self, column: str, rows: npt.NDArray[np.int64]) -> pa.Array:
        """Values of some rows of a column."""
        if not len(rows):
            return pa.array([], self.schema.field(column).type)
        which = np.searchsorted(self._ends, rows, "right")
        order = np.argsort(which, kind="stable")
        pieces = []
        for mine in np.split(order, np.flatnonzero(np.diff(which[order])) + 1):
            batch = self.batches[which[mine[0]]]
            start = int(self._ends[which[mine[0]]]) - batch.num_rows
            pieces.append(batch.column(column).take(pa.array(rows[mine] - start)))
        back = np.empty(len(rows), np.int64)
        back[order] = np.arange(len(rows))
        return pa.concat_arrays(pieces).take(pa.array(back))
