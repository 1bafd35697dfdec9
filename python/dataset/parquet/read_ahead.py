"""Files of row groups are fetched from a store of objects while those before them are used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

from headrace.dataset.buffers import BufferPool
from headrace.dataset.parquet.layout import RowGroup
from headrace.dataset.parquet.row_group import StoredRowGroup, unreadable
from headrace.errors import UserError
from headrace.storage import release_copy
from headrace.storage.objects.calls import ChangedInPlace

T = TypeVar("T")
#: Files that are fetched at once: one answer of a store is late, its bandwidth is that of many.
_AT_ONCE = 8
#: Row groups of a stream that are fetched or there, whatever their size: one is used, one is on its way.
_LEAST = 2
#: That are, however small.
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
        # Somebody else on this host needed its room since: it is fetched again.
        path = self._named(place.local_path)
        return StoredRowGroup(str(path), self.group.index, columns, buffers, name=str(place))

    def release(self) -> None:
        """Say that it is not read soon again."""
        if self.file is not None:
            release_copy(self.file.result())


class StoredRowGroups:
    """Row groups of any files, opened one after another.

    Args:
        columns: those that may be asked for.
        arriving: may be endless.

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
        """Nothing is open between two of them."""


class ReadAhead:
    """Fetches what the streams of a loader read next, in threads that they share.

        with ReadAhead(streams=4, mib=256) as ahead:
            for read, arriving in ahead.follow(order, lambda read: groups[read.group]): ...

    What is fetched and not yet used takes at most `mib` of this host's disk, or two row groups of each stream where
    these are more. Each file is fetched once for all processes of a host (headrace.storage.objects.copies).

    Args:
        streams: how many share it.
        mib: see above.
    """

    def __init__(self, streams: int, mib: int) -> None:
        self._bytes_each = (mib << 20) // max(1, streams)
        self._pool = ThreadPoolExecutor(min(_AT_ONCE, _LEAST * max(1, streams)), "read ahead")

    def follow(self, order: Iterator[T], group_of: Callable[[T], RowGroup]) -> Iterator[tuple[T, ArrivingRowGroup]]:
        """The same in the same order, each with its row group; asked for one, those behind it are on their way."""
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
