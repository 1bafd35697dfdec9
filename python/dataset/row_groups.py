"""Row groups of a dataset: fetched ahead of their use, read from their files one column at a time.

The features stage writes what is cheapest to read: PLAIN pages, neither compressed nor with nulls. Their values are
read by one copy from the file; Arrow's decoder copies twice, into new memory each time. A column is read when it is
requested, into a buffer that stays in the processor's cache and serves the next column. Arrow decodes the rest: lists,
text, files of other programs.

Memory is reused (`BufferPool`), because each new page from the kernel costs a fault.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.dataset import native
from headrace.dataset.layout import RowGroup
from headrace.errors import UserError
from headrace.errors.stores import ChangedInPlace
from headrace.storage import release_copy

#: Parquet's physical types whose PLAIN values are Arrow's, where no logical type says otherwise.
_TYPES = {"INT32": (pa.int32(), 4), "INT64": (pa.int64(), 8), "FLOAT": (pa.float32(), 4), "DOUBLE": (pa.float64(), 8)}


class StoredRowGroup:
    """A row group of a Parquet file, read column by column.

        with StoredRowGroup(path, 0, ["user", "click"], buffers) as rows:
            user = rows.column("user").to_numpy()

    Args:
        path: the file.
        index: of the row group in it.
        columns: names of the columns that may be requested.
        buffers: pool of the columns' memory, of the caller's thread.
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
        """Return the type of a column."""
        return self._schema.field(name).type

    def column(self, name: str) -> pa.ChunkedArray | pa.Array:
        """Return the values of a column, as Arrow would read them. Its memory is used again when nothing refers to it.

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
        """Return a column as NumPy has it; text and the like as objects. Raises UserError, see `column`."""
        column = self.column(name)
        array: npt.NDArray[Any] = column.to_numpy() if isinstance(column, pa.ChunkedArray) else column.to_numpy(False)
        return array

    def close(self) -> None:
        os.close(self._fd)
        self._file.close()

    def __enter__(self) -> StoredRowGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _plain_chunks(self, columns: set[str]) -> dict[str, _Chunk]:
        """Return the columns that may be PLAIN: what a footer does not say, their pages do."""
        footer = self._file.metadata
        group, schema, chunks = footer.row_group(self._index), footer.schema, {}
        for i in range(footer.num_columns):
            leaf = schema.column(i)
            if leaf.path not in columns or leaf.physical_type not in _TYPES or leaf.converted_type != "NONE":
                continue
            levels, stored = leaf.max_definition_level, group.column(i)
            if levels > 1 or leaf.max_repetition_level or stored.compression != "UNCOMPRESSED":
                continue
            start = stored.data_page_offset
            chunks[leaf.path] = _Chunk(leaf.physical_type, levels == 1, start, start + stored.total_compressed_size)
        return chunks

    def _unreadable(self, e: BaseException) -> UserError:
        return unreadable(self._name, e)


def unreadable(name: str, e: BaseException) -> UserError:
    """Return the error that says that a file of a dataset is damaged or gone, by its name."""
    return UserError(
        f"{name} cannot be read ({' '.join(str(e).split())}). Delete the dataset's folder and run the features stage "
        f"again"
    )


class _Chunk:
    """Place of a column chunk: its first data page, and an upper bound of its end."""

    __slots__ = ("end", "optional", "physical", "start")

    def __init__(self, physical: str, optional: bool, start: int, end: int) -> None:
        self.physical, self.optional, self.start, self.end = physical, optional, start, end


T = TypeVar("T")
#: Files that are fetched at once: one answer of a store is late, its bandwidth is that of many.
_AT_ONCE = 8
#: Least row groups of a stream that are fetched ahead, whatever their size: one is in use, one on its way.
_LEAST = 2
#: Most row groups of a stream that are fetched ahead, however small.
_MOST = 64


class ArrivingRowGroup(NamedTuple):
    """A row group whose file is on this host, or will be."""

    group: RowGroup
    #: None: its store is a file system.
    file: Future[Path] | None

    def path(self) -> Path:
        """Wait for the file.

        Raises:
            UserError: the file is gone, or another one.
            OSError: the store does not give it.
        """
        return self._named(self.group.path.local_path if self.file is None else self.file.result)

    def _named(self, give: Callable[[], Path]) -> Path:
        try:
            return give()
        except (FileNotFoundError, ChangedInPlace) as e:
            raise unreadable(str(self.group.path), e) from None

    def open(self, columns: Sequence[str], buffers: BufferPool) -> StoredRowGroup:
        """Wait for the file, and open the row group.

        Raises:
            UserError: the file is damaged or gone.
            OSError: the store does not give it.
        """
        place = self.group.path
        path = self.path()
        try:
            return StoredRowGroup(str(path), self.group.index, columns, buffers, name=str(place))
        except UserError as e:
            if self.file is None or not isinstance(e.__cause__, FileNotFoundError):
                raise
        # Another process on this host has evicted the copy since.
        path = self._named(place.local_path)
        return StoredRowGroup(str(path), self.group.index, columns, buffers, name=str(place))

    def release(self) -> None:
        """Release this host's copy of the file, which is not read again soon."""
        if self.file is not None:
            release_copy(self.file.result())


class StoredRowGroups:
    """Row groups of any files, opened one after another.

    Args:
        columns: names of the columns that may be requested.
        arriving: row groups in the order of reading; may be endless.

    Raises:
        UserError: a file is damaged or gone.
    """

    def __init__(self, columns: Sequence[str], arriving: Iterator[ArrivingRowGroup]) -> None:
        self._columns, self._arriving = columns, arriving
        self._buffers = BufferPool()

    def __iter__(self) -> Iterator[StoredRowGroup]:
        for row_group in self._arriving:
            yield row_group.open(self._columns, self._buffers)

    def close(self) -> None:
        """Do nothing: no file is open between two row groups."""


class ReadAhead:
    """Fetches what the streams of a loader read next, in threads that they share.

        with ReadAhead(streams=4, mib=256) as ahead:
            for read, arriving in ahead.follow(order, lambda read: groups[read.group]): ...

    What is fetched and not yet used takes at most `mib` of this host's disk, or two row groups of each stream where
    these are more. Each file is fetched once for all processes of a host (headrace.storage.objects.copies).

    Args:
        streams: number of streams that share it.
        mib: most MiB that are fetched and not yet used.
    """

    def __init__(self, streams: int, mib: int) -> None:
        self._bytes_each = (mib << 20) // max(1, streams)
        self._pool = ThreadPoolExecutor(min(_AT_ONCE, _LEAST * max(1, streams)), "read ahead")

    def follow(self, order: Iterator[T], group_of: Callable[[T], RowGroup]) -> Iterator[tuple[T, ArrivingRowGroup]]:
        """Yield the items in their order, each with its row group, while threads fetch the next ones."""
        ahead: deque[tuple[T, ArrivingRowGroup]] = deque()
        held = 0
        for item in order:
            group = group_of(item)
            while len(ahead) >= _LEAST and (held + group.bytes > self._bytes_each or len(ahead) == _MOST):
                held -= ahead[0][1].group.bytes
                yield ahead.popleft()
            held += group.bytes
            ahead.append((item, self._arriving(group)))
        while ahead:
            yield ahead.popleft()

    def _arriving(self, group: RowGroup) -> ArrivingRowGroup:
        is_here = group.path.scheme == "file"
        return ArrivingRowGroup(group, None if is_here else self._pool.submit(group.path.local_path))

    def close(self) -> None:
        """Fetch nothing more; what is on its way arrives before this returns."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


#: Idle blocks that are looked at before a new one is made.
_LOOKS = 64


class BufferPool:
    """Pool of memory blocks for arrays: a block returns when nothing refers to its array. Safe for threads.

        x = pool.empty((26, 8192), np.int64)

    Each array has an owner, which holds its block. The array, its views, tensors and Arrow buffers over it keep the
    owner alive; its end, in whichever thread, gives the block back.

    Args:
        keep: most idle blocks to retain.
    """

    def __init__(self, keep: int = 32) -> None:
        self._keep = keep
        #: The last one came last: it is most likely still in a cache.
        self._idle: list[_Block] = []
        # An owner may end in a thread that holds the lock: an allocation can run the garbage collector.
        self._lock = threading.RLock()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array of undefined values, C order."""
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        block = self._take(size)
        if block is None:
            # A little more than requested: row groups of a dataset are about as large as each other.
            block = np.empty(size + (size >> 4) + 64, np.uint8).view(_Block)
        owner = block.view(_Owner)
        owner.pool, owner.block = self, block
        return np.ndarray(shape, kind, buffer=owner)

    def give_back(self, block: _Block) -> None:
        """Take back the block of an owner that ends.

        Where there is no room for it, the block that was idle longest goes.
        """
        with self._lock:
            self._idle.append(block)
            if len(self._idle) > self._keep:
                del self._idle[0]

    def _take(self, size: int) -> _Block | None:
        """Return an idle block that is large enough, and not much larger."""
        with self._lock:
            for i in range(len(self._idle) - 1, max(-1, len(self._idle) - 1 - _LOOKS), -1):
                if size <= self._idle[i].nbytes <= 4 * size + 4096:
                    return self._idle.pop(i)
        return None


class _Block(np.ndarray[Any, np.dtype[np.uint8]]):
    """Memory that is given out many times. A type of its own, so that NumPy does not take it for its owner's base."""


class _Owner(np.ndarray[Any, np.dtype[np.uint8]]):
    """Holds a block for as long as an array over it is used."""

    pool: BufferPool
    block: _Block

    def __del__(self) -> None:
        self.pool.give_back(self.block)
