"""Random columns, each array in memory of exactly its size, through a library built with sanitizers.

    LD_PRELOAD=libasan.so python -m tests.native.fuzz LIBRARY TRIALS   ends with 0, or with a sanitizer's report
    LD_PRELOAD=libasan.so python -m tests.native.fuzz LIBRARY break    reads one byte too far on purpose

Offsets may be wrong in any way: nothing outside `values` may be read.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.udfs.library import HostLibrary, NativeColumn

_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]


class Exact:
    """Memory of exactly so many bytes, between the sanitizer's red zones."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def room(self, size: int) -> int:
        self.blocks.append(_libc.malloc(size))
        return self.blocks[-1]

    def copy(self, array: npt.NDArray[np.generic]) -> int:
        address = self.room(array.nbytes)
        ctypes.memmove(address, array.ctypes.data, array.nbytes)
        return address

    def read(self, address: int, count: int) -> npt.NDArray[np.int32]:
        return np.frombuffer(ctypes.string_at(address, 4 * count), np.int32)

    def free(self) -> None:
        for address in self.blocks:
            _libc.free(address)


#: Bytes that meet every branch of the decoder.
_BYTES = np.frombuffer(bytes.fromhex("00417f808f909fa0bfc0c2dfe0e1edeff0f1f4f5ff"), np.uint8)


def column(rng: np.random.Generator, memory: Exact, rows: int, text: bool) -> NativeColumn:
    length = int(rng.integers(0, 60))
    values = rng.choice(_BYTES, length) if text else rng.integers(-(2**63), 2**63 - 1, length)
    kind = rng.integers(0, 4)
    if kind == 0 and not text:
        offsets = None  # a value a row, perhaps too few
    elif kind == 1:
        offsets = rng.integers(-(2**31), 2**31 - 1, rows + 1).astype(np.int32)
    elif kind == 2:
        offsets = rng.integers(-5, length + 5, rows + 1).astype(np.int32)
    else:
        offsets = np.sort(rng.integers(0, length + 1, rows + 1)).astype(np.int32)
    first, value_first = int(rng.integers(0, 12)), int(rng.integers(0, 12))
    bits = rng.integers(0, 256, (first + rows + 7) // 8).astype(np.uint8) if rng.random() < 0.6 else None
    value_bits = rng.integers(0, 256, (value_first + length + 7) // 8).astype(np.uint8) if rng.random() < 0.6 else None
    return NativeColumn(
        None if offsets is None else memory.copy(offsets),
        memory.copy(values),
        length,
        None if bits is None else memory.copy(bits),
        first,
        None if value_bits is None else memory.copy(value_bits),
        value_first,
    )


def trial(lib: HostLibrary, rng: np.random.Generator) -> None:
    memory = Exact()
    rows = int(rng.integers(0, 20))
    offsets, bits = memory.room(4 * (rows + 1)), memory.room((rows + 7) // 8)
    most, buckets = int(rng.integers(0, 6)), int(rng.integers(1, 2**31 - 1))
    text, n = column(rng, memory, rows, True), int(rng.integers(1, 9))
    lib.ngrams_offsets(text, rows, n, most, offsets, bits)
    total = int(memory.read(offsets, rows + 1)[-1])
    lib.ngrams(text, rows, n, most, buckets, offsets, memory.room(4 * total))

    columns = [column(rng, memory, rows, False) for _ in range(int(rng.integers(1, 9)))]
    lib.cross_offsets(columns, rows, most + 1, offsets, bits)
    total = int(memory.read(offsets, rows + 1)[-1])
    lib.cross(columns, rows, most + 1, buckets, offsets, memory.room(4 * total))

    hashes = int(rng.integers(1, 9))
    lib.minhash(columns[0], rows, hashes, memory.room(8 * rows * hashes), bits)

    seeds = memory.copy(rng.integers(-(2**63), 2**63 - 1, rows)) if rng.random() < 0.5 else None
    lib.xxhash64_text(text, rows, seeds, memory.room(8 * rows))
    lib.xxhash64_integers(memory.copy(rng.integers(-(2**63), 2**63 - 1, rows)), rows, seeds, memory.room(8 * rows))
    memory.free()


def main(library: str, trials: str) -> None:
    lib = HostLibrary(Path(library))
    memory = Exact()
    if trials == "break":
        offsets = memory.copy(np.array([0, 9], np.int32))
        lib.ngrams_offsets(NativeColumn(offsets, memory.room(8), 9), 1, 1, 0, memory.room(8), None)
    else:
        rng = np.random.default_rng(20260108)
        for _ in range(int(trials)):
            trial(lib, rng)
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
