"""Compressed landing files. The ending of a file's name says how it is compressed:

  .gz      gzip, several members too
  .bz2     bzip2, several streams too
  .zst     Zstandard, several frames too
  .snappy  blocks of raw Snappy framed as Hadoop does it, which is what Spark and Hive write (not the framing format of
           snzip and python-snappy, whose files end in .sz)

Anything else is plain.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, BinaryIO

import pyarrow as pa

from headrace.storage import Location, StoreAway

#: Ending -> name of the compression.
COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".zst": "Zstandard", ".snappy": "Snappy"}
#: Endings of files that are compressed in another way.
UNREADABLE_ENDINGS = frozenset({".deflate", ".lz4", ".lzo", ".xz", ".zstd", ".sz", ".z"})
#: Ending -> Arrow's name of the compression, where Arrow decompresses streams of it.
ARROW_NAMES = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
#: Most bytes that a block of Snappy may say it holds. Hadoop writes 256 KiB.
_MOST_BLOCK = 1 << 28
_TRUNCATED = "it ends in the middle (truncated)"


class DamagedError(Exception):
    """Compressed data that cannot be read to their end; says why."""


def ending(name: str) -> str:
    """Return the ending that says how a file is compressed; empty of a plain one."""
    suffix = PurePath(name).suffix.lower()
    return suffix if suffix in COMPRESSIONS else ""


def without_ending(name: str) -> str:
    """Return the name that the file has when it is not compressed."""
    return name[: len(name) - len(ending(name))]


@contextmanager
def open_plain(path: Location, begin: bool = False) -> Iterator[BinaryIO]:
    """Open a file whose content is decompressed while it is read.

    Args:
        path: the file.
        begin: little of it is read: of a file in a store no more is fetched than that takes.

    Raises:
        DamagedError: the compressed data are damaged or end in the middle; raised where that is come upon in the block.
        OSError: the file cannot be read.
    """
    kind = ending(path.name)
    with path.open_parts() if begin else path.open() as raw:
        if not kind:
            yield raw
            return
        try:
            if kind == ".snappy":
                yield io.BufferedReader(_HadoopSnappy(raw))
            else:
                yield io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, "r"), ARROW_NAMES[kind]))
        except StoreAway:  # nothing is known of the file
            raise
        except (OSError, pa.ArrowException) as e:
            # Arrow's errors of decompression have no number of the system's.
            if isinstance(e, OSError) and e.errno is not None:
                raise
            raise DamagedError(damage_of(e, kind)) from None


def damage_of(error: Exception, kind: str) -> str:
    """Return what an error of decompression says of the data. `kind`: the ending of the file's name."""
    cut = isinstance(error, EOFError) or "Truncated" in str(error)
    return _TRUNCATED if cut else f"its {COMPRESSIONS[kind]} data are damaged"


class _HadoopSnappy(io.RawIOBase):
    """Blocks of (bytes of the block, chunks of (compressed bytes, raw Snappy) until the block is whole)."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._codec = raw, pa.Codec("snappy")
        #: Bytes of the block that are still to come.
        self._missing = 0
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with what is decompressed; 0 at the end."""
        while not self._ready:
            if not self._missing:
                head = self._raw.read(4)
                if not head:
                    return 0
                self._missing = _number(head)
            elif not self._next_chunk():
                raise pa.ArrowInvalid("a block is longer than it says")
        n = min(len(self._ready), len(buffer))
        buffer[:n], self._ready = self._ready[:n], self._ready[n:]
        return n

    def _next_chunk(self) -> bool:
        size = _number(self._raw.read(4))
        data = self._raw.read(size)
        if len(data) < size:
            raise pa.ArrowInvalid("Truncated")
        held = _length(data)
        if held > self._missing:
            return False
        self._ready = memoryview(self._codec.decompress(data, held).to_pybytes() if held else b"")
        self._missing -= held
        return True


def _number(head: bytes) -> int:
    if len(head) < 4:
        raise pa.ArrowInvalid("Truncated")
    (n,) = struct.unpack(">I", head)
    if n > _MOST_BLOCK:
        raise pa.ArrowInvalid(f"a block of {n} bytes")
    return int(n)


def _length(data: bytes) -> int:
    """Return the decompressed size of raw Snappy: a varint at its beginning."""
    n = 0
    for i, byte in enumerate(data[:5]):
        n |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return n
    raise pa.ArrowInvalid("no length")
