"""A text column's buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

I64 = npt.NDArray[np.int64]


def offsets_of(text: pa.StringArray) -> tuple[I64, npt.NDArray[Any]]:
    """(offsets int64 [rows + 1], bytes uint8): row i is bytes[offsets[i]:offsets[i + 1]]; a null one is empty."""
    _, offsets, data = text.buffers()
    if offsets is None or not len(text):
        return np.zeros(len(text) + 1, np.int64), np.zeros(0, np.uint8)
    found = np.frombuffer(offsets, np.int32, len(text) + 1, text.offset * 4).astype(np.int64)
    return found, np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)


def lengths(text: pa.StringArray) -> I64:
    """Bytes of each row; int64 [rows]."""
    return np.diff(offsets_of(text)[0])


def has_byte(text: pa.StringArray, *signs: str) -> bool:
    """Whether one of some ASCII characters is in the column."""
    offsets, data = offsets_of(text)
    mine = data[offsets[0] : offsets[-1]]
    return any(bool((mine == ord(sign)).any()) for sign in signs)


def bounds(lines: pa.BinaryArray) -> tuple[int, int]:
    """The bytes of its buffer that the rows take."""
    offsets = np.frombuffer(lines.buffers()[1], np.int32, len(lines) + 1, lines.offset * 4)
    return int(offsets[0]), int(offsets[-1])
