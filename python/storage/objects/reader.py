"""A large object as a file that is read in order, or here and there."""

from __future__ import annotations

import io
from typing import Any

from headrace.storage.objects import calls
from headrace.storage.objects.calls import Stored

#: Bytes of a request.
BLOCK = 8 << 20


class ObjectReader(io.RawIOBase):
    """Reads ranges; wrap it in a BufferedReader of BLOCK bytes."""

    def __init__(self, bucket: Any, stored: Stored) -> None:
        self._bucket, self._stored, self._position = bucket, stored, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._stored.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._stored.size - self._position)
        if size <= 0:
            return 0
        buffer[:size] = calls.get_range(self._bucket, self._stored.key, self._position, size)
        self._position += size
        return size

    def readall(self) -> bytes:
        """Read the rest by one request: io's own method makes one for each 8 KiB."""
        size = max(0, self._stored.size - self._position)
        rest = calls.get_range(self._bucket, self._stored.key, self._position, size) if size else b""
        self._position += len(rest)
        return rest
