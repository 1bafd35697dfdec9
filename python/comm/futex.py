"""Numbers in memory that processes share: set by one, waited for by others (native/cpp/futex.cpp)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace import native

_UINT32 = 2**32 - 1


def set_and_wake(word: NDArray[np.int64], value: int) -> None:
    """Set the lower half of a number in shared memory, after all that was written before, and wake who waits for it."""
    lib = native.library()
    assert lib is not None
    lib.headrace_set_and_wake(word.ctypes.data, value & _UINT32)


def wait_until(word: NDArray[np.int64], value: int, microseconds: int) -> bool:
    """Wait until `set_and_wake` has set a number to `value` or beyond (it may wrap around); False: it took too long."""
    lib = native.library()
    assert lib is not None
    return bool(lib.headrace_wait_until(word.ctypes.data, value & _UINT32, microseconds))
