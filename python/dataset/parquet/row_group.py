"""A row group's columns from its file, one at a time.

The features stage writes what is cheapest to read: PLAIN pages, neither compressed nor with nulls. Reading those is
finding where the values are, and one copy from the file; Arrow's decoder copies twice, into memory that is fresh each
time. A column is read when it is asked for: what it is read into is in the processor's cache while it is used, and
serves for the next column. What is not like that (lists, text, files of others) Arrow decodes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.dataset import native
from headrace.dataset.buffers import BufferPool
from headrace.errors import UserError

#: Parquet's physical types whose PLAIN values are Arrow's, where no logical type says otherwise.
_TYPES = {"INT32": (pa.int32(), 4), "INT64": (pa.int64(), 8), "FLOAT": (pa.float32(), 4), "DOUBLE": (pa.float64(), 8)}


class StoredRowGroup:
    """A row group as it lies in its file.

        with StoredRowGroup(path, 0, ["user", "click"], buffers) as rows:
            user = rows.column("user").to_numpy()

    Args:
        path: the file.
        index: of the row group in it.
        columns: those that may be asked for.
        buffers: where the memory comes from; the caller's thread's.
        name: of the file in messages, where `path` is a copy.

    Raises:
        UserError: the file is damaged or gone.
    """

    def __init__(
        self, path: str, index: int, columns: Sequence[str], buffers: BufferPool, name: str | None = None
    ) -> None:
        self._name, self._index, self._buffers = name or path, index, buffers
        try:
            self._file = pq.ParquetFile(path)
            footer = self._file.metadata
            self.num_rows: int = footer.row_group(index).num_rows
            self._schema: pa.Schema = footer.schema.to_arrow_schema()
            self._chunks = self._plain_chunks(set(columns)) if native.library() is not None else {}
            self._fd = os.open(path, os.O_RDONLY)
        except (pa.ArrowException, OSError) as e:
            raise self._unreadable(e) from e
        for chunk in self._chunks.values():  # one request for all: the disk works ahead
            os.posix_fadvise(self._fd, chunk.start, chunk.end - chunk.start, os.POSIX_FADV_WILLNEED)

    def type_of(self, name: str) -> pa.DataType:
        """The type of a column."""
        return self._schema.field(name).type

    def column(self, name: str) -> pa.ChunkedArray | pa.Array:
        """The values of a column, as Arrow would read them. Its memory is used again when nothing refers to it.

        Raises:
            UserError: the file is damaged.
        """
        chunk = self._chunks.get(name)
        try:
            if chunk is not None:
                kind, width = _TYPES[chunk.physical]
                block = self._buffers.empty((self.num_rows * width,), np.uint8)
                if native.read_plain(self._fd, chunk.start, chunk.end, width, chunk.optional, self.num_rows, block):
                    return pa.Array.from_buffers(kind, self.num_rows, [None, pa.py_buffer(block)], null_count=0)
            return self._file.read_row_group(self._index, columns=[name]).column(0)
        except (pa.ArrowException, OSError) as e:
            raise self._unreadable(e) from e

    def values(self, name: str) -> npt.NDArray[Any]:
        """A column as NumPy has it; text and the like as objects. Raises UserError, see `column`."""
        column = self.column(name)
        found: npt.NDArray[Any] = column.to_numpy() if isinstance(column, pa.ChunkedArray) else column.to_numpy(False)
        return found

    def close(self) -> None:
        os.close(self._fd)
        self._file.close()

    def __enter__(self) -> StoredRowGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _plain_chunks(self, wanted: set[str]) -> dict[str, _Chunk]:
        """The columns that may be PLAIN: what a footer does not say, their pages do."""
        footer = self._file.metadata
        group, schema, found = footer.row_group(self._index), footer.schema, {}
        for i in range(footer.num_columns):
            leaf = schema.column(i)
            if leaf.path not in wanted or leaf.physical_type not in _TYPES or leaf.converted_type != "NONE":
                continue
            levels, stored = leaf.max_definition_level, group.column(i)
            if levels > 1 or leaf.max_repetition_level or stored.compression != "UNCOMPRESSED":
                continue
            start = stored.data_page_offset
            found[leaf.path] = _Chunk(leaf.physical_type, levels == 1, start, start + stored.total_compressed_size)
        return found

    def _unreadable(self, e: BaseException) -> UserError:
        return unreadable(self._name, e)


def unreadable(name: str, e: BaseException) -> UserError:
    """What to say of a file of a dataset, by its name, that is damaged or gone."""
    return UserError(
        f"{name} cannot be read ({' '.join(str(e).split())}). Delete the dataset's folder and run the features stage "
        f"again"
    )


class _Chunk:
    """Where a column chunk is: its first data page, and an upper bound of its end."""

    __slots__ = ("end", "optional", "physical", "start")

    def __init__(self, physical: str, optional: bool, start: int, end: int) -> None:
        self.physical, self.optional, self.start, self.end = physical, optional, start, end
