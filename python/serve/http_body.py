"""A body that arrives in parts."""

from __future__ import annotations

import numpy as np

#: Bytes for which room is made at once; beyond them, as bytes come and not as they are said to come.
_FIRST = 1 << 20


class Body:
    """Of a known length; the bytes are read from the connection into where they stay.

    Attributes:
        length: of all.
        filled: bytes that have come.
    """

    def __init__(self, length: int) -> None:
        self.length, self.filled = length, 0
        self._bytes = _room(min(length, _FIRST))

    def free(self) -> memoryview:
        """Where the next bytes go; empty when all have come."""
        if self.filled == len(self._bytes) < self.length:
            larger = _room(min(self.length, 2 * self.filled))
            larger[: self.filled] = self._bytes
            self._bytes = larger
        return self._bytes[self.filled :]

    def add(self, data: memoryview) -> None:
        """Take bytes that are elsewhere, no more than are missing."""
        while data:
            free = self.free()
            count = min(len(data), len(free))
            free[:count] = data[:count]
            self.filled += count
            data = data[count:]

    def all(self) -> memoryview:
        """What has come."""
        return self._bytes[: self.filled]


def _room(count: int) -> memoryview:
    # NumPy leaves memory as it is found, so that no page is there before bytes come.
    return np.empty(count, np.uint8).data
