"""Memory that is used again: row groups and batches come and go, and fresh pages from the kernel cost a fault each."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

#: Idle blocks that are looked at before a new one is made.
_LOOKS = 64


class BufferPool:
    """Arrays out of blocks of memory that go back to the pool when their last user lets go. For any threads.

        x = pool.empty((26, 8192), np.int64)

    Each array has an owner, which holds its block. The array, its views, tensors and Arrow buffers over it keep the
    owner alive; its end, in whichever thread, gives the block back.

    Args:
        keep: idle blocks that are kept, at most.
    """

    def __init__(self, keep: int = 32) -> None:
        self._keep = keep
        #: The last one came last: it is most likely still in a cache.
        self._idle: list[_Block] = []
        # An owner may end in a thread that holds the lock: an allocation can run the garbage collector.
        self._lock = threading.RLock()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array of undefined values, C order."""
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        block = self._take(size)
        if block is None:
            # A little more than is asked for: row groups of a dataset are about as large as each other.
            block = np.empty(size + (size >> 4) + 64, np.uint8).view(_Block)
        owner = block.view(_Owner)
        owner.pool, owner.block = self, block
        return np.ndarray(shape, kind, buffer=owner)

    def give_back(self, block: _Block) -> None:
        """Of an owner that ends. Where there is no room for it, the block that was idle longest goes."""
        with self._lock:
            self._idle.append(block)
            if len(self._idle) > self._keep:
                del self._idle[0]

    def _take(self, size: int) -> _Block | None:
        """An idle block that is large enough, and not much larger."""
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
