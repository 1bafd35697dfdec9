"""Compressed landing files. The ending of a file's name says how it is compressed:

  .gz      gzip, several members too
  .bz2     bzip2, several streams too
  .zst     Zstandard, several frames too
  .snappy  blocks of raw Snappy framed as Hadoop does it, which is what Spark and Hive write (not the framing format of
           snzip and python-snappy, whose files end in .sz)

Anything else is plain. One reader decompresses a file from its beginning (`open_plain`).

Large bzip2 files become plain text in a load's folder, by many tasks, for that text can be read in parts (`unpack`). A
bzip2 file is one stream or several behind each other, each of blocks of at most 900,000 bytes before they are
decompressed. A block begins at any bit, with a mark of 48 bits, and decompresses by itself; at a stream's end another
mark stands, and a checksum of its blocks' checksums (format: bzip2's own compress.c and decompress.c). A task
decompresses the blocks that begin in its range of bytes, and writes the whole lines among them. The driver joins lines
that begin in one range and end in another. So each line's number is known, and no block is decompressed twice.
"""

from __future__ import annotations

import bz2
import io
import struct
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa

from headrace.storage import Location, StoreAway

if TYPE_CHECKING:  # what `headrace init` reads files by needs no Spark
    from pyspark.sql import SparkSession

#: Ending -> name of the compression.
COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".zst": "Zstandard", ".snappy": "Snappy"}
#: Endings of files that are compressed in another way.
UNREADABLE_ENDINGS = frozenset({".deflate", ".lz4", ".lzo", ".xz", ".zstd", ".sz", ".z"})
#: Ending -> Arrow's name of the compression, where Arrow decompresses streams of it.
ARROW_NAMES = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
#: Most bytes that a block of Snappy may say it holds. Hadoop writes 256 KiB.
_MOST_SNAPPY_BLOCK = 1 << 28
_TRUNCATED = "it ends in the middle (truncated)"
#: Marks of bzip2: of a block, and of a stream's end.
_BLOCK, _END = 0x314159265359, 0x177245385090
_MARK_BITS, _CHECKSUM_BITS = 48, 32
#: Bytes from a block's beginning by which the next mark must have come: a block of 900,000 bytes takes little more.
_MOST_BLOCK_BYTES = 2 << 20
#: `BZh` and the size of blocks, `1` to `9`.
_HEADER = 4
#: Marks that are none, being part of a block's bits, which are passed over in a block.
_MOST_FALSE = 2
#: Smaller files of bzip2 are read by one task; larger ones by tasks of about so many bytes, at most of so many.
LEAST_BYTES, _MOST_RANGE_BYTES = 4 << 20, 16 << 20
_TASKS_A_CORE = 4
#: A line that is longer than this and is cut by a range keeps its file from being split.
_MOST_CUT = 4 << 20


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
                self._missing = _snappy_number(head)
            elif not self._next_chunk():
                raise pa.ArrowInvalid("a block is longer than it says")
        n = min(len(self._ready), len(buffer))
        buffer[:n], self._ready = self._ready[:n], self._ready[n:]
        return n

    def _next_chunk(self) -> bool:
        size = _snappy_number(self._raw.read(4))
        data = self._raw.read(size)
        if len(data) < size:
            raise pa.ArrowInvalid("Truncated")
        held = _snappy_length(data)
        if held > self._missing:
            return False
        self._ready = memoryview(self._codec.decompress(data, held).to_pybytes() if held else b"")
        self._missing -= held
        return True


def _snappy_number(head: bytes) -> int:
    if len(head) < 4:
        raise pa.ArrowInvalid("Truncated")
    (n,) = struct.unpack(">I", head)
    if n > _MOST_SNAPPY_BLOCK:
        raise pa.ArrowInvalid(f"a block of {n} bytes")
    return int(n)


def _snappy_length(data: bytes) -> int:
    """Return the decompressed size of raw Snappy: a varint at its beginning."""
    n = 0
    for i, byte in enumerate(data[:5]):
        n |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return n
    raise pa.ArrowInvalid("no length")


@dataclass(frozen=True)
class _Bzip2Mark:
    """Beginning of a block, or of the end of a stream."""

    #: Bits from the beginning of the data.
    bit: int
    is_end: bool


@dataclass
class _Checksums:
    """Checksums of the blocks and streams of a range, in their order: (whether it is a stream's, the checksum)."""

    values: list[tuple[bool, int]]


def _decompressed(path: Location, start: int, end: int, checksums: _Checksums) -> Iterator[bytes]:
    """Yield the contents of the blocks that begin in bytes [start, end) of a file; add their checksums to `checksums`.

    Raises:
        DamagedError: the range is no whole part of a bzip2 file.
        OSError: the file cannot be read.
    """
    with path.open() as file:
        size = file.seek(0, 2)
        file.seek(start)
        data = file.read(end - start + _MOST_BLOCK_BYTES)
    is_last = start + len(data) == size
    known_marks = bzip2_marks(data)
    if start == 0 and not _header_at(data, 0, known_marks):
        raise DamagedError(f"{path}: no bzip2 data")
    end_bit, k = 8 * (end - start), 0
    while k < len(known_marks) and known_marks[k].bit < end_bit:
        if known_marks[k].is_end:
            checksums.values.append((True, _bits(data, known_marks[k].bit + _MARK_BITS, _CHECKSUM_BITS)))
            after = -(-(known_marks[k].bit + _MARK_BITS + _CHECKSUM_BITS) // 8)
            if not (is_last and after == len(data)) and not _header_at(data, after, known_marks):
                raise DamagedError(f"{path}: something other than a stream behind a stream")
            k += 1
            continue
        for last in range(k + 1, min(k + 2 + _MOST_FALSE, len(known_marks))):
            checksum = _bits(data, known_marks[k].bit + _MARK_BITS, _CHECKSUM_BITS)
            text = _block(data, known_marks[k].bit, known_marks[last].bit, checksum)
            if text is not None:
                break
        else:
            raise DamagedError(f"{path}: a block is damaged, or has no end")
        checksums.values.append((False, checksum))
        yield text
        k = last


def _check(checksums: Iterable[tuple[bool, int]], path: Location) -> None:
    """Raise DamagedError where blocks are not those of whole streams."""
    combined, is_ended = 0, False
    for is_stream, checksum in checksums:
        is_ended = is_stream
        if not is_stream:
            combined = ((combined << 1 | combined >> 31) & 0xFFFFFFFF) ^ checksum
        elif combined != checksum:
            raise DamagedError(f"{path}: blocks are missing or were changed")
        else:
            combined = 0
    if not is_ended:
        raise DamagedError(f"{path}: it ends in the middle")


def bzip2_marks(data: bytes) -> list[_Bzip2Mark]:
    """Return all marks, in order; some may be a block's bits that look like one."""
    places = []
    for value, is_end in ((_BLOCK, False), (_END, True)):
        for shift in range(8):
            # From bit `shift` of a byte: bytes that the mark fills, and the first byte's and the last one's bits of it.
            spread = (value << (8 - shift)).to_bytes(7, "big")
            inner = spread[1:6]
            place = data.find(inner, 1)
            while place > 0:
                head = data[place - 1] & (0xFF >> shift) == spread[0]
                tail = place + 5 < len(data) and data[place + 5] & (0xFF << (8 - shift)) & 0xFF == spread[6]
                if head and (tail or not shift):
                    places.append(_Bzip2Mark(8 * (place - 1) + shift, is_end))
                place = data.find(inner, place + 1)
    return sorted(places, key=lambda mark: mark.bit)


def _header_at(data: bytes, offset: int, known_marks: list[_Bzip2Mark]) -> bool:
    """Return whether a stream begins at a byte."""
    header = data[offset : offset + _HEADER]
    begins = len(header) == _HEADER and header[:3] == b"BZh" and header[3:4] in b"123456789"
    return begins and any(mark.bit == 8 * (offset + _HEADER) for mark in known_marks)


def _bits(data: bytes, bit: int, count: int) -> int:
    """Return a number of `count` bits; bits behind the end of the data are zeros."""
    first, last = bit // 8, -(-(bit + count) // 8)
    number = int.from_bytes(data[first:last].ljust(last - first, b"\0"), "big")
    return number >> (8 * last - bit - count) & ((1 << count) - 1)


def _block(data: bytes, begin: int, end: int, checksum: int) -> bytes | None:
    """Return the contents of a block, as the only one of a stream; None where it is none."""
    bits = end - begin + _MARK_BITS + _CHECKSUM_BITS
    stream = (_bits(data, begin, end - begin) << _MARK_BITS | _END) << _CHECKSUM_BITS | checksum
    rest = -bits % 8
    decompressor = bz2.BZ2Decompressor()
    try:
        text = decompressor.decompress(b"BZh9" + (stream << rest).to_bytes((bits + rest) // 8, "big"))
    except OSError:
        return None
    return text if decompressor.eof and not decompressor.unused_data else None


@dataclass(frozen=True)
class Piece:
    """Text of a range. JSON values."""

    #: The whole lines: name of a file in the folder, bytes, and how many they are.
    name: str
    size: int
    lines: int
    #: What is before the first line feed, with it, and what is behind the last; in Latin-1. A range without a line feed
    #: is all `head`.
    head: str
    tail: str
    checksums: list[tuple[bool, int]]


@dataclass(frozen=True)
class UnpackTask:
    """Decompresses ranges of files; yields a Piece, or `unreadable`: why not."""

    #: (file, first byte, last byte).
    ranges: tuple[tuple[Location, int, int], ...]
    folder: Location

    def __call__(self, number: int) -> Iterator[dict[str, Any]]:
        path, start, end = self.ranges[number]
        place = self.folder / f"plain-{uuid.uuid4()}"
        try:
            yield asdict(self._unpack(path, start, end, place))
        except StoreAway:  # nothing is known of the file
            raise
        except (DamagedError, OSError) as e:
            yield {"unreadable": str(e)}

    def _unpack(self, path: Location, start: int, end: int, place: Location) -> Piece:
        checksums = _Checksums([])
        # Of the first range the first line, too, is whole.
        head, tail, size, lines, inside = b"", b"", 0, 0, start == 0
        with place.new_file() as plain, plain.open("wb") as out:
            for text in _decompressed(path, start, end, checksums):
                if not inside:
                    cut = text.find(b"\n") + 1
                    head += text[:cut] if cut else text
                    inside, text = bool(cut), text[cut:] if cut else b""
                cut = text.rfind(b"\n") + 1
                if cut:
                    out.write(tail)
                    out.write(memoryview(text)[:cut])
                    size, lines = size + len(tail) + cut, lines + text.count(b"\n")
                    tail = b""
                tail += text[cut:]
                if max(len(head), len(tail)) > _MOST_CUT:
                    raise DamagedError(f"{path}: a line of more than {_MOST_CUT:,} bytes")
        return Piece(place.name, size, lines, head.decode("latin-1"), tail.decode("latin-1"), checksums.values)


@dataclass(frozen=True)
class PlainLines:
    """Lines of a file that follow each other, as a file of plain text."""

    path: Location
    #: Bytes of the plain text.
    size: int
    #: Number of the first line, from 1.
    first_line: int


def unpack(
    spark: SparkSession | None, files: Mapping[int, tuple[Location, int]], cores: int, folder: Location
) -> dict[int, list[PlainLines]]:
    """Unpack bzip2 files into a folder; return their lines by file, without files that cannot be read in ranges.

    Args:
        spark: None: tasks run here.
        files: by number: place and bytes of bzip2 files.
        cores: tasks that run at once.
        folder: seen by all executors.
    """
    from headrace.lake.spark.tasks import run_tasks

    most = max(LEAST_BYTES, min(_MOST_RANGE_BYTES, sum(size for _, size in files.values()) // (_TASKS_A_CORE * cores)))
    ranges: list[tuple[int, Location, int, int]] = []
    for number, (path, size) in files.items():
        count = -(-size // most)
        edges = [size * k // count for k in range(count + 1)]
        ranges += [(number, path, a, b) for a, b in pairwise(edges)]
    task = UnpackTask(tuple((path, a, b) for _, path, a, b in ranges), folder)
    pieces: dict[int, list[dict[str, Any]]] = {}
    for (number, *_), result in zip(ranges, run_tasks(spark, len(ranges), task), strict=True):
        pieces.setdefault(number, []).append(result)
    plain = {}
    for number, result in pieces.items():
        try:
            plain[number] = _joined(files[number][0], result, folder)
        except DamagedError:
            # What is wrong with it, and where, is found by whoever reads it from its beginning.
            for piece in result:
                if "name" in piece:
                    (folder / piece["name"]).remove_quietly()
    return plain


def _joined(path: Location, results: Sequence[Mapping[str, Any]], folder: Location) -> list[PlainLines]:
    """Return the lines of one file, in its order: those of the ranges, and between them those that were cut."""
    for result in results:
        if "unreadable" in result:
            raise DamagedError(result["unreadable"])
    pieces = [Piece(**result) for result in results]
    _check(((is_stream, checksum) for piece in pieces for is_stream, checksum in piece.checksums), path)
    plain: list[PlainLines] = []
    line, cut = 1, b""

    def add_cut() -> None:
        nonlocal line, cut
        place = folder / f"plain-{uuid.uuid4()}"
        place.transient().put_bytes(cut)
        plain.append(PlainLines(place, len(cut), line))
        line, cut = line + 1, b""

    for piece in pieces:
        cut += piece.head.encode("latin-1")
        if cut.endswith(b"\n"):
            add_cut()
        if piece.size:
            plain.append(PlainLines(folder / piece.name, piece.size, line))
            line += piece.lines
        cut += piece.tail.encode("latin-1")
    if cut:
        add_cut()
    return plain
