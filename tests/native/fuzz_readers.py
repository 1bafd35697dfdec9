"""Damaged pages of Parquet, JSON lines and times through a library built with sanitizers.

    LD_PRELOAD=libasan.so python -m tests.native.fuzz_readers LIBRARY TRIALS   ends with 0, or with a sanitizer's report
    LD_PRELOAD=libasan.so python -m tests.native.fuzz_readers LIBRARY break    reads one byte too far on purpose

What a file says may be wrong in any way: nothing outside what was given may be read or written.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.dataset.native import DATASET
from headrace.lake.landing.convert import LINES
from tests.native.fuzz import Exact

#: Parquet's numbers of a page's type, and of encodings.
DATA, DICTIONARY, PLAIN, RLE = 0, 2, 0, 8
#: Pieces of JSON lines, of such as are not UTF-8 too.
_JSON = rb"""{"s": "|"i": |"d":|"b"|{|}|[|]|"|,|:| |\|\u00e9|\ud83d|\ude00|null|true|1|-0|1e999|0.5""".split(b"|")
_JSON += [
    b"\xc3\xa9",
    b"\xff",
    b"\0",
    b"9223372036854775808",
    b'"x": {"y": [1, {}]}',
    b'{"s": "text", "i": 12, "d": 1.5, "b": false}',
]
_TIME = np.frombuffer(b"0123456789-:T. Z+9", np.uint8)


def varint(n: int) -> bytes:
    """An unsigned number of Thrift's compact protocol, and of runs."""
    encoded = b""
    while n > 0x7F:
        encoded, n = encoded + bytes([n & 0x7F | 0x80]), n >> 7
    return encoded + bytes([n])


def page(kind: int, values: int, encoding: int, body: bytes, size: int | None = None) -> bytes:
    """The header of a page. `size`: of the body where it is not compressed any more."""
    field = {DATA: 5, DICTIONARY: 7}[kind]
    inner = [values, encoding, *([3] if kind == DATA else [])]
    return (
        _numbers([kind, len(body) if size is None else size, len(body)])
        + bytes([(field - 3) << 4 | 12])
        + _numbers(inner)
        + b"\0\0"
    )


def _numbers(values: Sequence[int]) -> bytes:
    """Fields that follow each other, of 32 bits."""
    return b"".join(b"\x15" + varint(2 * value) for value in values)


def _chunk(rng: np.random.Generator) -> tuple[bytes, int, int, bool]:
    """(bytes, rows, physical type, whether it has definition levels) of a column chunk."""
    physical, optional = int(rng.choice([1, 2, 6])), bool(rng.random() < 0.5)
    size, rows = int(rng.integers(1, 20)), int(rng.integers(1, 60))
    texts = [bytes(rng.integers(0, 256, rng.integers(0, 30)).astype(np.uint8)) + bytes([i]) for i in range(size)]
    if physical == 6:
        body = b"".join(len(t).to_bytes(4, "little") + t for t in texts)
    else:
        body = np.arange(size, dtype=np.int32 if physical == 1 else np.int64).tobytes()
    pages = page(DICTIONARY, size, PLAIN, body) + body
    width = int(rng.integers(0, 34))
    groups = -(-rows // 8)
    packed = (
        bytes(rng.integers(0, 256, groups * width).astype(np.uint8)) if rng.random() < 0.5 else bytes(groups * width)
    )
    numbers = bytes([width]) + varint(groups << 1 | 1) + packed
    if rng.random() < 0.5:
        numbers = bytes([width]) + varint(rows << 1) + bytes([size - 1, 0, 0, 0, 0])[: -(-width // 8)]
    if optional:
        levels = varint(groups << 1 | 1) + bytes(rng.integers(0, 256, groups).astype(np.uint8))
        numbers = len(levels).to_bytes(4, "little") + levels + numbers
    pages += page(DATA, rows, RLE, numbers) + numbers
    if physical == 6 and rng.random() < 0.5:
        more = b"".join(len(t).to_bytes(4, "little") + t for t in texts)
        return pages + page(DATA, size, PLAIN, more) + more, rows + size, physical, optional
    return pages, rows, physical, optional


def _snappy(rng: np.random.Generator) -> bytes:
    """A dictionary page in raw Snappy: bytes as they are, and copies of those before, which overlap or not."""
    body, size = b"", 0
    for _ in range(int(rng.integers(1, 12))):
        if not size or rng.random() < 0.5:
            length = int(rng.choice([1, 16, 60, 61, 300]))
            wide = 0 if length <= 60 else int(rng.integers(2 if length > 256 else 1, 5))
            tag = bytes([59 + wide << 2]) + (length - 1).to_bytes(wide, "little") if wide else bytes([length - 1 << 2])
            body += tag + bytes(rng.integers(0, 256, length, np.uint8))
        else:
            length, kind, offset = int(rng.integers(1, 65)), int(rng.integers(2, 4)), int(rng.integers(1, size + 1))
            body += bytes([(length - 1) << 2 | kind]) + offset.to_bytes(2 if kind == 2 else 4, "little")
        size += length
    body = varint(size) + body
    return page(DICTIONARY, size // 4, PLAIN, body, size) + body


def _damaged(rng: np.random.Generator, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(int(rng.integers(0, 4))):
        offset = int(rng.integers(0, len(damaged)))
        damaged[offset] = int(rng.integers(0, 256))
    return bytes(damaged[: int(rng.integers(1, len(damaged) + 1))] if rng.random() < 0.2 else damaged)


class Parquet:
    """Reads column chunks, and takes them to memory of exactly their size."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self._lib = lib
        self.complete_chunks = 0

    def read(self, data: bytes, rows: int, physical: int, codec: int, optional: bool) -> bool:
        """Read a chunk, and return whether it could be read."""
        memory, lib = Exact(), self._lib
        with tempfile.TemporaryFile() as file:
            os.write(file.fileno(), data)
            chunk = lib.headrace_chunk_read(file.fileno(), 0, len(data), rows, physical, codec, optional)
            if physical != 6:
                width = 4 if physical == 1 else 8
                lib.headrace_read_plain(file.fileno(), 0, len(data), width, optional, rows, memory.room(rows * width))
        if chunk:
            size, nulls = ctypes.c_int64(), ctypes.c_int64()
            n = lib.headrace_chunk_size(chunk, ctypes.byref(size), ctypes.byref(nulls))
            index, offsets, values = memory.room(4 * rows), memory.room(4 * (n + 1)), memory.room(size.value)
            lib.headrace_chunk_take(chunk, 4, index, offsets, values)
            assert rows == 0 or memory.read(index, rows).max() < n + (nulls.value > 0)
            lib.headrace_chunk_free(chunk)
            self.complete_chunks += 1
        memory.free()
        return bool(chunk)


def _lines(lib: ctypes.CDLL, rng: np.random.Generator) -> int:
    """Random lines; how many of them were parsed."""
    memory = Exact()
    lines = [b"".join(_JSON[k] for k in rng.integers(0, len(_JSON), rng.integers(0, 9))) for _ in range(9)]
    lines[0] = _JSON[-1]
    ends = np.cumsum([0, *map(len, lines)])
    data, n = memory.copy(np.frombuffer(b"".join(lines), np.uint8)), len(lines)
    names, kinds = memory.copy(np.frombuffer(b"sidb", np.uint8)), memory.copy(np.arange(4, dtype=np.uint8))
    parser = lib.headrace_json_lines(
        ctypes.cast(names, ctypes.c_char_p), memory.copy(np.arange(1, 5, dtype=np.int64)), kinds, 4
    )
    for k, room in enumerate((int(ends[-1]), 8 * n, 8 * n, n)):
        lib.headrace_json_lines_column(parser, k, memory.room(room), memory.room(n), memory.room(4 * (n + 1)))
    parsed: int = lib.headrace_json_lines_parse(parser, data, memory.copy(ends), n, rng.random() < 0.5, memory.room(n))
    index, size = 0, ctypes.c_int64()
    while name := lib.headrace_json_lines_other(parser, index, ctypes.byref(size)):
        ctypes.string_at(name, size.value)
        index += 1
    lib.headrace_json_lines_free(parser)

    text = np.frombuffer(b"\n".join(lines), np.uint8)
    address = memory.copy(text)
    lib.headrace_control_characters(address, len(text), memory.room(24))
    line_count = int((text == ord("\n")).sum())
    lib.headrace_newlines(address, len(text), line_count, memory.room(8 * line_count))
    memory.free()
    return parsed


def _times(lib: ctypes.CDLL, rng: np.random.Generator) -> None:
    memory = Exact()
    sizes = rng.integers(0, 36, 20)
    offsets = np.cumsum([0, *sizes])
    text: npt.NDArray[np.uint8] = rng.choice(_TIME, offsets[-1])
    lib.headrace_instants(
        memory.copy(offsets), memory.copy(text), len(sizes), memory.room(8 * 20), memory.room(20), memory.room(20)
    )
    memory.free()


def declared(library: str) -> ctypes.CDLL:
    """The library, which has functions of two others."""
    lib = ctypes.CDLL(library)
    for name, (result, arguments) in {**DATASET.functions, **LINES.functions}.items():
        if hasattr(lib, name):
            getattr(lib, name).restype, getattr(lib, name).argtypes = result, list(arguments)
    return lib


def main(library: str, trials: str) -> None:
    """See the module."""
    lib, rng = declared(library), np.random.default_rng(20261122)
    if trials == "break":
        memory = Exact()
        lib.headrace_control_characters(memory.room(8), 9, memory.room(24))
    else:
        parquet, parsed = Parquet(lib), 0
        for _ in range(int(trials)):
            data, rows, physical, optional = _chunk(rng)
            parquet.read(_damaged(rng, data), rows, physical, 0, optional)
            parquet.read(_damaged(rng, _snappy(rng)), rows, 1, 1, optional)
            parsed += _lines(lib, rng)
            _times(lib, rng)
        # Not all was refused at the first byte.
        assert parquet.complete_chunks > int(trials) // 10, parquet.complete_chunks
        assert parsed > int(trials)
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
