"""Large bzip2 files as plain text in a load's folder, by many tasks: that text can be read in parts.

A bzip2 file is one stream or several behind each other, each of blocks of at most 900,000 bytes before they are
decompressed. A block begins at any bit, with a mark of 48 bits, and decompresses by itself; at a stream's end another
mark stands, and a checksum of its blocks' checksums (format: bzip2's own compress.c and decompress.c).

A task decompresses the blocks that begin in its range of bytes, and writes the whole lines among them. The driver joins
lines that begin in one range and end in another. So each line's number is known, and no block is decompressed twice.
"""

from __future__ import annotations

import bz2
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from pyspark.sql import SparkSession

from headrace.lake.landing.blocks import Part, UnreadableError
from headrace.lake.spark.tasks import run_tasks
from headrace.storage import Location, StoreAway

_BLOCK, _END = 0x314159265359, 0x177245385090
_MARK_BITS, _CHECKSUM_BITS = 48, 32
#: Bytes from a block's beginning by which the next mark must have come: a block of 900,000 bytes takes little more.
_MOST_BLOCK = 2 << 20
#: `BZh` and the size of blocks, `1` to `9`.
_HEADER = 4
#: Marks that are none, being part of a block's bits, which are passed over in a block.
_MOST_FALSE = 2
#: Smaller files are read by one task; larger ones by tasks of about so many bytes, at most of so many.
LEAST_BYTES, _MOST_RANGE_BYTES = 4 << 20, 16 << 20
_TASKS_A_CORE = 4
#: A line that is longer than this and is cut by a range keeps its file from being split.
_MOST_CUT = 4 << 20


@dataclass(frozen=True)
class Mark:
    """Beginning of a block, or of the end of a stream."""

    #: Bits from the beginning of the data.
    bit: int
    is_end: bool


@dataclass
class Checksums:
    """Checksums of the blocks and streams of a range, in their order: (whether it is a stream's, the checksum)."""

    values: list[tuple[bool, int]]


def decompressed(path: Location, start: int, end: int, checksums: Checksums) -> Iterator[bytes]:
    """Yield the contents of the blocks that begin in bytes [start, end) of a file; add their checksums to `checksums`.

    Raises:
        UnreadableError: the range is no whole part of a bzip2 file.
        OSError: the file cannot be read.
    """
    with path.open() as file:
        size = file.seek(0, 2)
        file.seek(start)
        data = file.read(end - start + _MOST_BLOCK)
    is_last = start + len(data) == size
    known_marks = marks(data)
    if start == 0 and not _header_at(data, 0, known_marks):
        raise UnreadableError(f"{path}: no bzip2 data", is_of_content=True)
    end_bit, k = 8 * (end - start), 0
    while k < len(known_marks) and known_marks[k].bit < end_bit:
        if known_marks[k].is_end:
            checksums.values.append((True, _bits(data, known_marks[k].bit + _MARK_BITS, _CHECKSUM_BITS)))
            after = -(-(known_marks[k].bit + _MARK_BITS + _CHECKSUM_BITS) // 8)
            if not (is_last and after == len(data)) and not _header_at(data, after, known_marks):
                raise UnreadableError(f"{path}: something other than a stream behind a stream", is_of_content=True)
            k += 1
            continue
        for last in range(k + 1, min(k + 2 + _MOST_FALSE, len(known_marks))):
            checksum = _bits(data, known_marks[k].bit + _MARK_BITS, _CHECKSUM_BITS)
            text = _block(data, known_marks[k].bit, known_marks[last].bit, checksum)
            if text is not None:
                break
        else:
            raise UnreadableError(f"{path}: a block is damaged, or has no end", is_of_content=True)
        checksums.values.append((False, checksum))
        yield text
        k = last


def check(checksums: Iterable[tuple[bool, int]], path: Location) -> None:
    """Raise UnreadableError where blocks are not those of whole streams."""
    combined, is_ended = 0, False
    for is_stream, checksum in checksums:
        is_ended = is_stream
        if not is_stream:
            combined = ((combined << 1 | combined >> 31) & 0xFFFFFFFF) ^ checksum
        elif combined != checksum:
            raise UnreadableError(f"{path}: blocks are missing or were changed", is_of_content=True)
        else:
            combined = 0
    if not is_ended:
        raise UnreadableError(f"{path}: it ends in the middle", is_of_content=True)


def marks(data: bytes) -> list[Mark]:
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
                    places.append(Mark(8 * (place - 1) + shift, is_end))
                place = data.find(inner, place + 1)
    return sorted(places, key=lambda mark: mark.bit)


def _header_at(data: bytes, offset: int, known_marks: list[Mark]) -> bool:
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
        except (UnreadableError, OSError) as e:
            yield {"unreadable": str(e)}

    def _unpack(self, path: Location, start: int, end: int, place: Location) -> Piece:
        checksums = Checksums([])
        # Of the first range the first line, too, is whole.
        head, tail, size, lines, inside = b"", b"", 0, 0, start == 0
        with place.new_file() as plain, plain.open("wb") as out:
            for text in decompressed(path, start, end, checksums):
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
                    raise UnreadableError(f"{path}: a line of more than {_MOST_CUT:,} bytes", is_of_content=True)
        return Piece(place.name, size, lines, head.decode("latin-1"), tail.decode("latin-1"), checksums.values)


def unpack(
    spark: SparkSession | None, files: Mapping[int, tuple[Location, int]], cores: int, folder: Location
) -> dict[int, list[Part]]:
    """Unpack files into a folder; return parts of plain text by file, without files that cannot be read in ranges.

    Args:
        spark: None: tasks run here.
        files: by number: place and bytes of bzip2 files.
        cores: tasks that run at once.
        folder: seen by all executors.
    """
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
    parts = {}
    for number, result in pieces.items():
        try:
            parts[number] = _joined(number, files[number][0], result, folder)
        except UnreadableError:
            # What is wrong with it, and where, is found by whoever reads it from its beginning.
            for piece in result:
                if "name" in piece:
                    (folder / piece["name"]).remove_quietly()
    return parts


def _joined(number: int, path: Location, results: Sequence[Mapping[str, Any]], folder: Location) -> list[Part]:
    """Return the parts of one file, in its order: the lines of the ranges, and between them those that were cut."""
    for result in results:
        if "unreadable" in result:
            raise UnreadableError(result["unreadable"], is_of_content=True)
    pieces = [Piece(**result) for result in results]
    check(((is_stream, checksum) for piece in pieces for is_stream, checksum in piece.checksums), path)
    parts: list[Part] = []
    line, cut = 1, b""

    def add_cut() -> None:
        nonlocal line, cut
        place = folder / f"plain-{uuid.uuid4()}"
        place.transient().put_bytes(cut)
        parts.append(Part(number, place, 0, len(cut), line))
        line, cut = line + 1, b""

    for piece in pieces:
        cut += piece.head.encode("latin-1")
        if cut.endswith(b"\n"):
            add_cut()
        if piece.size:
            parts.append(Part(number, folder / piece.name, 0, piece.size, line))
            line += piece.lines
        cut += piece.tail.encode("latin-1")
    if cut:
        add_cut()
    return parts
