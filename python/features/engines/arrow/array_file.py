"""NumPy arrays in one file: what tasks hand to each other within a run.

Arrays whose rows belong to parts, part by part, lie in the file as blocks: what all of them have of one part is in one
piece, which a reader of that part reads at once. Were each array in one piece, a part's few kilobytes of each would
stand far from each other, and the kernel reads 128 KiB ahead for each: of files larger than the page cache, forty
times what is wanted. The other arrays are mapped into memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from headrace.storage import Location

Array = npt.NDArray[Any]
_ALIGN = 64
#: Of an array in a block.
_BLOCK_ALIGN = 8


def save_arrays(path: Location, whole: Mapping[str, Array], by_part: Mapping[str, Array], edges: Array) -> None:
    """Write one-dimensional arrays of numbers under their names; a reader sees all of the file or none.

    Args:
        path: of the file.
        whole: arrays that every reader may need all of.
        by_part: arrays [rows], whose rows `edges[k]` to `edges[k + 1]` are part k's.
        edges: int64 [parts + 1].
    """
    mapped, at = [], 0
    for name, array in whole.items():
        mapped.append([name, array.dtype.str, len(array), at])
        at += -(-array.nbytes // _ALIGN) * _ALIGN
    in_block = [[name, array.dtype.str] for name, array in by_part.items()]
    text = json.dumps({"whole": mapped, "bytes": at, "by_part": in_block}).encode()
    # Numbers and not JSON: there are as many edges as parts, and a reader of one part needs them all.
    head = np.array([len(text), len(edges), *edges], np.int64).tobytes() + text
    with path.new_file() as partial, open(partial, "wb") as f:
        f.write(head + b"\0" * (-len(head) % _ALIGN))
        for array in whole.values():
            _write(f, np.ascontiguousarray(array), _ALIGN)
        contiguous = [np.ascontiguousarray(array) for array in by_part.values()]
        for start, end in pairwise(edges.tolist()):
            for array in contiguous:
                _write(f, array[start:end], _BLOCK_ALIGN)


def _write(file: BinaryIO, array: Array, align: int) -> None:
    file.write(array.data)
    file.write(b"\0" * (-array.nbytes % align))


def load_part(path: Location, part: int) -> dict[str, Array] | None:
    """What `save_arrays` wrote, read-only; of the arrays by part the rows of this part. None: it has none."""
    data = np.memmap(path.local_path(), np.uint8, "r").view(np.ndarray)
    text, parts = data[:16].view(np.int64).tolist()
    begin = 16 + 8 * parts
    rows = np.diff(data[16:begin].view(np.int64)[: part + 2])
    if not rows[part]:
        return None
    head = json.loads(data[begin : begin + text].tobytes())
    start = -(-(begin + text) // _ALIGN) * _ALIGN
    out = {}
    for name, dtype, length, at in head["whole"]:
        kind = np.dtype(dtype)
        out[name] = data[start + at : start + at + length * kind.itemsize].view(kind)
    kinds = [(name, np.dtype(dtype)) for name, dtype in head["by_part"]]
    sizes = sum((_padded(rows * kind.itemsize) for _, kind in kinds), np.zeros_like(rows))
    block = _read(path, start + head["bytes"] + int(sizes[:part].sum()), int(sizes[part]))
    at, mine = 0, int(rows[part])
    for name, kind in kinds:
        out[name] = np.frombuffer(block, kind, mine, at)
        at += _padded(mine * kind.itemsize)
    return out


def _padded(size: Any) -> Any:
    return -(-size // _BLOCK_ALIGN) * _BLOCK_ALIGN


def _read(path: Location, offset: int, size: int) -> bytes:
    fd = os.open(path.local_path(), os.O_RDONLY)
    try:
        # Nothing around it: the block behind this one is another task's.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        found = os.pread(fd, size, offset)
        if len(found) != size:
            raise OSError(f"{path} ends before its part's {size} bytes from {offset} on")
        return found
    finally:
        os.close(fd)
