"""Lines that are plain JSON objects as columns, by native/cpp/json_lines.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.lake.blocks import native
from headrace.lake.blocks.lines import I64, Mask

_KINDS = {pa.string(): 0, pa.int64(): 1, pa.float64(): 2, pa.bool_(): 3}
_DTYPES = {pa.int64(): np.int64, pa.float64(): np.float64, pa.bool_(): np.uint8}


@dataclass(frozen=True)
class PlainRows:
    """What was parsed of some lines."""

    #: Which of the lines. bool [lines].
    taken: Mask
    #: By name: a value for each line that was taken.
    columns: dict[str, pa.Array]
    #: Keys that no column was asked for.
    others: set[str]


def parse_plain(
    data: npt.NDArray[np.uint8], offsets: I64, kinds: Mapping[str, pa.DataType], pass_others: bool
) -> PlainRows | None:
    """Parse the lines that are plainly objects with values of these kinds; a key that is not there is null.

    Args:
        data: UTF-8.
        offsets: of the lines and the end of the last one, in `data`; int64 [lines + 1].
        kinds: by key, the type that its values are read as: string, int64, float64 or bool.
        pass_others: whether a line may have other keys; else it is left.

    Returns:
        None where the library is not there, or a kind is another one.
    """
    lib = native.library()
    if lib is None or not kinds.keys() or any(kind not in _KINDS for kind in kinds.values()):
        return None
    names = [name.encode() for name in kinds]
    ends = np.cumsum([len(name) for name in names], dtype=np.int64)
    codes = np.array([_KINDS[kind] for kind in kinds.values()], np.uint8)
    lines = lib.headrace_json_lines(b"".join(names), _at(ends), _at(codes), len(names))
    if not lines:
        raise MemoryError("no memory to parse lines")
    try:
        n = len(offsets) - 1
        size = int(offsets[-1] - offsets[0])
        # Texts are copied out: together they are as long as the lines, and each has room for all of them.
        columns = [_Column(kind, n, size) for kind in kinds.values()]
        for k, column in enumerate(columns):
            lib.headrace_json_lines_column(lines, k, _at(column.values), _at(column.valid), _at(column.offsets))
        taken = np.empty(n, np.uint8)
        rows = lib.headrace_json_lines_parse(lines, _at(data), _at(offsets), n, pass_others, _at(taken))
        if rows < 0:
            raise MemoryError("no memory to parse lines")
        found = {name: column.array(rows) for name, column in zip(kinds, columns, strict=True)}
        return PlainRows(taken.view(np.bool_), found, _others(lib, lines))
    finally:
        lib.headrace_json_lines_free(lines)


class _Column:
    """Where a column's values go."""

    def __init__(self, kind: pa.DataType, lines: int, size: int) -> None:
        self._kind = kind
        is_text = kind == pa.string()
        self.values = np.empty(size if is_text else lines, np.uint8 if is_text else _DTYPES[kind])
        self.valid = np.empty(lines, np.uint8)
        self.offsets = np.empty(lines + 1 if is_text else 0, np.int32)

    def array(self, rows: int) -> pa.Array:
        """The first rows."""
        valid = self.valid[:rows]
        nulls = rows - int(np.count_nonzero(valid))
        bits = pa.py_buffer(np.packbits(valid, bitorder="little")) if nulls else None
        if self._kind == pa.string():
            offsets = self.offsets[: rows + 1].copy()
            data = self.values[: offsets[-1]].copy()
            buffers = [bits, pa.py_buffer(offsets), pa.py_buffer(data)]
        elif self._kind == pa.bool_():
            buffers = [bits, pa.py_buffer(np.packbits(self.values[:rows], bitorder="little"))]
        else:
            buffers = [bits, pa.py_buffer(self.values[:rows].copy() if rows < len(self.values) else self.values)]
        return pa.Array.from_buffers(self._kind, rows, buffers, null_count=nulls)


def _others(lib: ctypes.CDLL, lines: int) -> set[str]:
    size = np.zeros(1, np.int64)
    found: set[str] = set()
    while name := lib.headrace_json_lines_other(lines, len(found), _at(size)):
        found.add(ctypes.string_at(name, int(size[0])).decode())
    return found


def _at(x: npt.NDArray[Any]) -> int:
    return int(x.__array_interface__["data"][0])
