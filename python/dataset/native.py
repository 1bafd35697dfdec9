"""The C++ loops of native/cpp/dataset.cpp, where `make native` has built them; elsewhere Arrow and NumPy work."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.workspace import checkout

_VERSION = 1


def library_path() -> Path:
    """Where the build puts it."""
    return checkout() / "build" / "native" / "libheadrace_dataset.so"


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None where it was not built (or by another version of its source)."""
    try:
        found = ctypes.CDLL(str(library_path()))
        if found.headrace_dataset_version() != _VERSION:
            return None
    except (OSError, AttributeError):
        return None
    i64, p = ctypes.c_int64, ctypes.c_void_p
    found.headrace_read_plain.argtypes = [ctypes.c_int, i64, i64, i64, ctypes.c_int, i64, p]
    found.headrace_read_plain.restype = ctypes.c_int
    found.headrace_gather.argtypes = [p, i64, p, i64, p, i64]
    found.headrace_gather.restype = None
    return found


def read_plain(
    fd: int, start: int, end: int, width: int, optional: bool, values: int, out: npt.NDArray[np.uint8]
) -> bool:
    """Read a column chunk that is PLAIN, not compressed and without nulls. Lets other threads run.

    Args:
        fd: the open file.
        start: of the first page, in the file.
        end: an upper bound of the last one's end.
        width: bytes of a value.
        optional: whether there are definition levels.
        values: how many.
        out: uint8 [values * width], is filled.

    Returns:
        Whether it was read; what is in `out` where it was not is not said.
    """
    lib = library()
    assert lib is not None
    assert out.nbytes == values * width
    return bool(lib.headrace_read_plain(fd, start, end, width, optional, values, _at(out)))


def gather(source: npt.NDArray[Any], order: npt.NDArray[np.int32], out: npt.NDArray[Any]) -> None:
    """out[i] = source[order[i]], as `out`'s dtype. `order` is int32, contiguous and within `source`."""
    lib = library()
    a, b = source.dtype, out.dtype
    known = (a == b and a.itemsize in (4, 8) and a.kind in "if") or (a == np.int32 and b == np.int64)
    if lib is None or not (known and source.flags.c_contiguous and out.flags.c_contiguous):
        out[:] = source.take(order)
        return
    lib.headrace_gather(_at(source), a.itemsize, _at(order), len(order), _at(out), b.itemsize)


def _at(x: npt.NDArray[Any]) -> int:
    return int(x.__array_interface__["data"][0])
