"""A landing file, or a range of its bytes, as blocks of whole lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.lake.blocks import native
from headrace.storage import Location, StoreAway

Mask = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]

NEWLINE, RETURN, TAB, BLANK = 10, 13, 9, 32
#: The longest line that is read in a block; offsets of Arrow's strings have 32 bits.
MOST_LINE = 256 << 20
BOM = b"\xef\xbb\xbf"
#: Endings of files that are decompressed while they are read.
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2"}


class UnreadableError(Exception):
    """A file that this reader cannot read to its end: damaged, or with a line of more than MOST_LINE bytes."""


@dataclass(frozen=True)
class Part:
    """Lines of one landing file: those that begin in a range of its bytes."""

    #: The number of the file in its batch.
    file: int
    path: Location
    #: Bytes of the file (uncompressed ones, where it is split); `end` None: to the end of the file.
    start: int = 0
    end: int | None = None
    #: Number of the first line, from 1.
    first_line: int = 1

    @property
    def compression(self) -> str | None:
        """As Arrow names it."""
        return COMPRESSIONS.get(self.path.suffix)


class Block:
    """Some lines that follow each other."""

    def __init__(self, data: bytes, first_line: int) -> None:
        """`data`: bytes that end with a newline."""
        self.data = data
        self.first_line = first_line
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(data, np.uint8)
        self.control_characters = native.control_characters(self.bytes)
        #: Place of each line's newline. int64 [lines].
        self.newlines: I64 = native.places_of_newlines(self.bytes, self.control_characters.newlines)
        #: Place of each line's first byte. int64 [lines].
        self.starts: I64 = np.concatenate([[0], self.newlines[:-1] + 1])

    def __len__(self) -> int:
        return len(self.newlines)

    @cached_property
    def ends(self) -> I64:
        """Place behind each line's last byte, without carriage returns at its end. int64 [lines]."""
        ends = self.newlines
        while True:
            trimmed = (ends > self.starts) & (self.bytes[np.maximum(ends - 1, 0)] == RETURN)
            if not trimmed.any():
                return ends
            ends = ends - trimmed

    @cached_property
    def lines(self) -> pa.BinaryArray:
        """The lines with their newlines; no copy."""
        offsets = np.append(self.starts, len(self.data)).astype(np.int32)
        return pa.Array.from_buffers(pa.binary(), len(self), [None, pa.py_buffer(offsets), pa.py_buffer(self.data)])

    def texts(self, which: Mask) -> pa.StringArray:
        """Some lines without their newlines, carriage returns kept: the bytes as they are, be they UTF-8 or not."""
        chosen = np.flatnonzero(which)
        starts, ends = self.starts[chosen], self.newlines[chosen]
        pieces = [self.data[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        return pa.array(pieces, pa.binary()).view(pa.string())

    def number(self, which: Mask) -> I64:
        """The numbers of some lines."""
        return self.first_line + np.flatnonzero(which)

    def line_of(self, places: npt.NDArray[Any]) -> I64:
        """The lines (counted from 0) in which bytes lie."""
        return np.searchsorted(self.newlines, places)


def blocks(part: Part, size: int) -> Iterator[Block]:
    """The lines of a part, about `size` bytes at once.

    Raises:
        UnreadableError: the file is damaged, or has too long a line.
    """
    try:
        with _opened(part) as (stream, at):
            yield from _blocks(part, stream, at, size)
    except StoreAway:  # nothing is known of the file
        raise
    except (OSError, EOFError, pa.ArrowException) as e:
        raise UnreadableError(f"{part.path}: {e}") from None


def count_lines(part: Part, size: int = 8 << 20) -> int:
    """The lines that begin in a part of an uncompressed file, whose `end` is at most the file's size."""
    assert part.end is not None
    first = max(part.start, 1) - 1
    left = part.end - 1 - first
    count = int(part.start == 0 and part.end > 0)
    with part.path.open() as stream:
        stream.seek(first)
        while left > 0 and (data := stream.read(min(size, left))):
            count += data.count(b"\n")
            left -= len(data)
    return count


@contextmanager
def _opened(part: Part) -> Iterator[tuple[Any, int]]:
    """(stream, place of its first byte): one byte before the part, where something is before it."""
    at = max(part.start - 1, 0)
    with ExitStack() as opened:
        if part.path.scheme == "file":
            source: Any = str(part.path)
        else:  # in ranges: the file need not have room on this host
            source = opened.enter_context(part.path.open())
        stream = opened.enter_context(pa.input_stream(source, compression=part.compression, buffer_size=0))
        if at:
            stream.seek(at)
        yield stream, at


def _blocks(part: Part, stream: Any, at: int, size: int) -> Iterator[Block]:
    number, rest = part.first_line, b""
    skipping = part.start > 0
    while True:
        data = stream.read(size)
        if not data:
            break
        if skipping:  # the line that began before the part
            place = data.find(b"\n")
            if place < 0:
                at += len(data)
                continue
            at, data, skipping = at + place + 1, data[place + 1 :], False
        begin = at - len(rest)
        if part.end is not None and begin >= part.end:
            return
        at += len(data)
        if part.end is not None and at >= part.end:
            whole = rest + data
            last = whole.find(b"\n", part.end - 1 - begin)
            if last >= 0:
                yield Block(whole[: last + 1], number)
                return
        cut = data.rfind(b"\n") + 1
        if not cut:
            rest += data
            if len(rest) > MOST_LINE:
                raise UnreadableError(f"{part.path}: line {number} has more than {MOST_LINE:,} bytes")
            continue
        # The bytes are copied once.
        block = Block(b"".join((rest, memoryview(data)[:cut])), number)
        yield block
        number, rest = number + len(block), data[cut:]
    if rest:
        yield Block(rest + b"\n", number)
