"""Memory that is used again: row groups and batches come and go, and fresh pages from the kernel cost a fault each."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

#: What refers to a block that is not in use: the list, the loop's name for it, the argument of `getrefcount`.
_IDLE = 3
#: Blocks that are looked at before a new one is made.
_LOOKS = 64


class Buffers:
    """Arrays out of blocks that nobody refers to any more. One thread asks; the arrays may go anywhere.

        x = buffers.empty((26, 8192), np.int64)

    An array, a view of it, a tensor or an Arrow buffer over it: each holds a reference to its block, so a block is
    given out again when the last of them is gone, and never before.

    Args:
        keep: blocks that are remembered, at most.
    """

    def __init__(self, keep: int = 32) -> None:
        self._keep = keep
        self._blocks: list[npt.NDArray[np.uint8]] = []
        #: Where the search begins: blocks become idle in the order in which they were given out, more or less.
        self._at = 0

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array of undefined values, C order."""
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        block = self._idle(size)
        if block is None:
            # A little more than is asked for: row groups of a dataset are about as large as each other.
            block = np.empty(size + (size >> 4) + 64, np.uint8)
            if len(self._blocks) < self._keep:
                self._blocks.insert(self._at, block)
                self._at += 1
        return block[:size].view(kind).reshape(shape)

    def _idle(self, size: int) -> npt.NDArray[np.uint8] | None:
        """An idle block that is large enough, and not much larger. Without one, another idle one makes place."""
        unfit, count = None, len(self._blocks)
        for turn in range(min(count, _LOOKS)):
            i = (self._at + turn) % count
            block: npt.NDArray[np.uint8] = self._blocks[i]
            if sys.getrefcount(block) == _IDLE:
                if size <= block.nbytes <= 4 * size + 4096:
                    self._at = i + 1
                    return block
                unfit = i
        if unfit is not None and len(self._blocks) == self._keep:
            del self._blocks[unfit]
            self._at = min(self._at, len(self._blocks))
        return None
