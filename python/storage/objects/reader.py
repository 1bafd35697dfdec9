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
        self._bucket, self._stored, self._at = bucket, stored, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._stored.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._stored.size - self._at)
        if size <= 0:
            return 0
        buffer[:size] = calls.get_range(self._bucket, self._stored.key, self._at, size)
        self._at += size
        return size

    def readall(self) -> bytes:
        """The rest by one request: io's own makes one for each 8 KiB."""
        size = max(0, self._stored.size - self._at)
        found = calls.get_range(self._bucket, self._stored.key, self._at, size) if size else b""
        self._at += len(found)
        return found
