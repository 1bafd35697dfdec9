"""Tables that no process holds, on their way to Parquet files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

#: Rows of a row group, as in a file that is written of one table.
_GROUP_ROWS = 1 << 20


class TableWriter:
    """A table's file, with the bytes that it has where it is written of one table."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        """Begin the file."""
        self.path = path
        self._schema = schema
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._waiting: list[pa.RecordBatch] = []
        self._rows, self._written = 0, False

    def add(self, rows: pa.Table) -> None:
        """Write rows behind the others."""
        self._waiting += rows.cast(self._schema).to_batches()
        self._rows += rows.num_rows
        while self._rows >= _GROUP_ROWS:
            self._flush(_GROUP_ROWS)

    def finish(self) -> None:
        """End the file."""
        if self._rows or not self._written:
            self._flush(self._rows)
        self._writer.close()

    def _flush(self, rows: int) -> None:
        whole = pa.Table.from_batches(self._waiting, self._schema)
        self._writer.write_table(whole.slice(0, rows).combine_chunks(), max(rows, 1))
        self._written, rest = True, whole.slice(rows)
        self._waiting, self._rows = rest.to_batches(), rest.num_rows
