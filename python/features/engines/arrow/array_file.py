"""NumPy arrays in one file, read by memory map: what tasks hand to each other within a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.storage import Location

_ALIGN = 64


def save_arrays(path: Location, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write one-dimensional arrays of numbers under their names; a reader sees all of the file or none."""
    head, at = [], 0
    for name, array in arrays.items():
        head.append([name, array.dtype.str, len(array), at])
        at += -(-array.nbytes // _ALIGN) * _ALIGN
    text = json.dumps(head).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    with path.new_file() as partial, open(partial, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            whole = np.ascontiguousarray(array)
            f.write(whole.data)
            f.write(b"\0" * (-whole.nbytes % _ALIGN))


def load_arrays(path: Location) -> dict[str, npt.NDArray[Any]]:
    """What `save_arrays` wrote, memory-mapped and read-only."""
    data = np.memmap(path.local_path(), np.uint8, "r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    out = {}
    for name, dtype, length, at in json.loads(data[8:start].tobytes()):
        kind = np.dtype(dtype)
        begin = start + at
        # A plain view: every operation on a memmap object costs a check of its class.
        out[name] = data[begin : begin + length * kind.itemsize].view(np.ndarray).view(kind)
    return out
