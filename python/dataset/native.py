"""The C++ loops of native/cpp/dataset.cpp, where `make native` has built them; elsewhere Arrow and NumPy work.

The library has those of native/cpp/dictionary.cpp, dictionary_chunk.cpp and row_order.cpp, too, for
headrace.features.arrow.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.compute import native

Array = npt.NDArray[Any]
Order = npt.NDArray[np.int32]

#: Raise it with that of native/cpp/dataset.cpp when a function's name, arguments or meaning change.
_VERSION = 7
_I64, _U64, _I32, _P = ctypes.c_int64, ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p
DATASET = native.Interface(
    "libheadrace_dataset.so",
    "headrace_dataset_version",
    {
        "headrace_read_plain": (_I32, (_I32, _I64, _I64, _I64, _I32, _I64, _P)),
        "headrace_permutation": (None, (_U64, _U64, _U64, _U64, _I64, _P)),
        "headrace_gather_lists": (None, (_P, _P, _I64, _P, _I64, _P, _P)),
        "headrace_pad_lists": (None, (_P, _P, _I64, _I64, _I64, _P, _I64, _I64)),
        "headrace_gather": (_U64, (_P, _I64, _P, _I64, _P, _P, _P, _I64, _I64)),
        "headrace_scatter": (_I32, (_P, _I64, _P, _I64, _P, _I64, _P)),
        "headrace_take": (_I32, (_P, _I64, _P, _I64, _P)),
        "headrace_row_order": (_I32, (_P, _P, _I64, _I64, _I64, _P, _P, _P)),
        "headrace_count": (_I32, (_P, _I64, _P, _I64, _I64, _I64, _P)),
        "headrace_narrow": (_I32, (_P, _P, _I64, _I64, _I64, _I64, _P)),
        "headrace_encode_integers": (_I64, (_P, _I64, _P, _I64, _I64, _I64, _P, _I64, _P, _P, _P)),
        "headrace_chunk_read": (_P, (_I32, _I64, _I64, _I64, _I32, _I32, _I32)),
        "headrace_chunk_free": (None, (_P,)),
        "headrace_chunk_size": (_I64, (_P, _P, _P)),
        "headrace_chunk_take": (None, (_P, _I64, _P, _P, _P)),
        "headrace_text_counts": (_P, (_I64,)),
        "headrace_text_counts_free": (None, (_P,)),
        "headrace_text_counts_add": (_I32, (_P, _P, _P, _P, _P, _I64, _I64, _I64)),
        "headrace_text_counts_size": (_I64, (_P, _I64, _P)),
        "headrace_text_counts_take": (None, (_P, _I64, _P, _P, _P, _P)),
        "headrace_text_rows": (_P, (_P, _P, _I64)),
        "headrace_text_rows_free": (None, (_P,)),
        "headrace_text_rows_find": (None, (_P, _P, _P, _I64, _P)),
    },
)


@cache
def library() -> ctypes.CDLL | None:
    """Return the library, or None where it was not built (or from other sources, which is logged)."""
    return DATASET.load(DATASET.path(), _VERSION)


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
        values: number of values.
        out: uint8 [values * width], is filled.

    Returns:
        Whether it was read; if not, `out` is undefined.
    """
    lib = library()
    assert lib is not None
    assert out.nbytes == values * width
    return bool(lib.headrace_read_plain(fd, start, end, width, optional, values, _address(out)))


def permutation(generator: np.random.Generator, n: int) -> Order:
    """Return what generator.permutation(n) gives, in little more than half the time; n < 2^31.

    Args:
        generator: a new one of `np.random.default_rng`; its state does not advance.
    """
    lib = library()
    if lib is None:
        return generator.permutation(n).astype(np.int32)
    state = generator.bit_generator.state["state"]
    out = np.empty(n, np.int32)
    halves = (half for name in ("state", "inc") for half in (state[name] >> 64, state[name] & (2**64 - 1)))
    lib.headrace_permutation(*halves, n, _address(out))
    return out


class OutputColumns:
    """Destination of a row group's rows: parts of several matrices, one after the other.

    Args:
        views: [columns, rows of the part], all of one dtype, each row contiguous.
    """

    def __init__(self, views: Sequence[Array]) -> None:
        self.views = views
        self.ends = np.cumsum([v.shape[1] for v in views], dtype=np.int64)
        self.bases = np.array([_address(v) for v in views], np.int64)
        self.strides = np.array([v.strides[0] for v in views], np.int64)


def gather(source: Array, order: Order, out: OutputColumns, column: int) -> int:
    """Write source[order[i]] to row i of column `column` of the targets, as their dtype.

    Args:
        source: [N].
        order: int32, contiguous, within `source`; as many as the targets have rows.
        out: see OutputColumns.
        column: index of the column, the same in all targets.

    Returns:
        The largest of the values taken, where they are integers, as unsigned numbers of their width.
    """
    lib, a, b = library(), source.dtype, out.views[0].dtype
    assert out.ends[-1] == len(order)
    known = (a == b and a.itemsize in (4, 8) and a.kind in "if") or (a == np.int32 and b == np.int64)
    if lib is None or not (known and source.flags.c_contiguous):
        return _gather(source, order, out, column)
    largest: int = lib.headrace_gather(
        _address(source),
        a.itemsize,
        _address(order),
        len(out.views),
        _address(out.ends),
        _address(out.bases),
        _address(out.strides),
        column,
        b.itemsize,
    )
    return largest


def gather_lists(offsets: Array, values: Array, order: Array, out_offsets: Array) -> Array | None:
    """Return lists of some rows, one behind the other; None where NumPy must do it.

    Args:
        offsets: int32 [rows + 1]; list i is values[offsets[i]:offsets[i + 1]].
        values: numbers.
        order: int32 [n]: which list; within `offsets`.
        out_offsets: int32 [n + 1]: as `offsets` of the result, from 0.
    """
    lib, width = library(), values.itemsize
    inputs = (offsets, order, out_offsets)
    if lib is None or width not in (4, 8) or not all(x.dtype == np.int32 and x.flags.c_contiguous for x in inputs):
        return None
    if not values.flags.c_contiguous:
        return None
    out = np.empty(int(out_offsets[-1]), values.dtype)
    lib.headrace_gather_lists(
        *map(_address, (offsets, values)), width, _address(order), len(order), _address(out_offsets), _address(out)
    )
    return out


def pad_lists(offsets: Array, values: Array, out: Array) -> bool:
    """Fill out [rows, length], whose columns are contiguous, with lists, 0 behind their ends; False: NumPy must do it.

    Args:
        offsets: int32 [rows + 1]; list i is values[offsets[i]:offsets[i + 1]], none longer than `length`.
        values: numbers.
    """
    lib, a, b = library(), values.dtype, out.dtype
    known = (a == b and a.itemsize in (4, 8) and a.kind in "if") or (a == np.int32 and b == np.int64)
    fits = offsets.dtype == np.int32 and offsets.flags.c_contiguous and values.flags.c_contiguous
    if lib is None or not (known and fits and out.strides[0] == b.itemsize and out.strides[1] % b.itemsize == 0):
        return False
    rows, length = out.shape
    stride = out.strides[1] // b.itemsize
    lib.headrace_pad_lists(
        _address(offsets), _address(values), a.itemsize, rows, length, _address(out), b.itemsize, stride
    )
    return True


def _gather(source: Array, order: Order, out: OutputColumns, column: int) -> int:
    taken = source.take(order)
    start = 0
    for view, end in zip(out.views, out.ends, strict=True):
        view[column] = taken[start:end]
        start = end
    return int(taken.view(f"u{taken.itemsize}").max()) if taken.dtype.kind == "i" and len(taken) else 0


def _address(x: Array) -> int:
    return int(x.__array_interface__["data"][0])
