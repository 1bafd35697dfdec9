"""NumPy arrays in one file, read by memory map: what tasks hand to each other within a run."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_ALIGN = 64


def save_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write one-dimensional arrays of numbers under their names; a reader sees all of the file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head, at = [], 0
    for name, array in arrays.items():
        head.append([name, array.dtype.str, len(array), at])
        at += -(-array.nbytes // _ALIGN) * _ALIGN
    text = json.dumps(head).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    with open(partial, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            whole = np.ascontiguousarray(array)
            f.write(whole.data)
            f.write(b"\0" * (-whole.nbytes % _ALIGN))
    os.replace(partial, path)


def load_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """What `save_arrays` wrote, memory-mapped and read-only."""
    data = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    out = {}
    for name, dtype, length, at in json.loads(data[8:start].tobytes()):
        kind = np.dtype(dtype)
        begin = start + at
        # A plain view: every operation on a memmap object costs a check of its class.
        out[name] = data[begin : begin + length * kind.itemsize].view(np.ndarray).view(kind)
    return out
