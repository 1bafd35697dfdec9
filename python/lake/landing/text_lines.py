"""Landing files as numbered lines, and records that go over several lines.

A record of delimited text may go over several lines where a quoted field has line breaks (RFC 4180). Such a record
stands on its first line; the others are empty ones, so every line of a file still is one row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.lake.landing.blocks import TOO_LONG, LineBlock, Part, opened, whole_lines
from headrace.lake.landing.delimited import UNCLOSED, QuotedFields

#: Bytes that are read and handed on at once.
BLOCK_BYTES = 4 << 20
#: A quoted field that is not closed within so many bytes is taken for one that lacks its closing quote: its record's
#: first line is bad, and reading goes on with the second.
RECORD_BYTES = 1 << 20
_QUOTE = b'"'


@dataclass(frozen=True)
class NumberedLines:
    """Lines that follow each other."""

    #: Each without its line feed, arbitrary bytes. string [lines].
    texts: pa.Array
    #: Why a line is no row, where that is known already: TOO_LONG, UNCLOSED; else null. string [lines].
    faults: pa.Array


def lines_of(stream: BinaryIO, block: int = BLOCK_BYTES) -> Iterator[NumberedLines]:
    """Yield the lines of a text; nothing behind the last line feed.

    `block`: bytes that are read at once.
    """
    for text in whole_lines(stream.read, block):
        texts = _split(text.data)
        faults = pa.array([TOO_LONG], pa.string()) if text.too_long else pa.nulls(len(texts), pa.string())
        yield NumberedLines(texts, faults)


def whole_records(
    lines: Iterable[NumberedLines], fields: QuotedFields, most: int = RECORD_BYTES
) -> Iterator[NumberedLines]:
    """Yield lines with each record on its first one, its line feeds within, and empty lines for the others.

    Each line is looked at twice at most, so time grows with the bytes, whatever quotes they have.

    Args:
        lines: those of a text.
        fields: of the records.
        most: bytes of the longest record. What begins a quoted field that is not closed within them, or at all, is
            UNCLOSED.
    """
    joiner = _Joiner(fields, most)
    for part in lines:
        too_long = part.faults.null_count < len(part.faults)
        # Most batches of most files have no line break in quotes to be looked for.
        if joiner.idle and (too_long or not pc.any(pc.match_substring(part.texts.view(pa.binary()), _QUOTE)).as_py()):
            yield part
            continue
        if too_long:  # it is longer than any record
            joiner.end()
            if joiner.done:
                yield joiner.take()
            yield part
            continue
        for line in part.texts.view(pa.binary()).to_pylist():
            joiner.add(line)
        if joiner.done:
            yield joiner.take()
    joiner.end()
    if joiner.done:
        yield joiner.take()


def record_blocks(part: Part, fields: QuotedFields) -> Iterator[LineBlock]:
    """Yield the records of a file as blocks of its lines.

    Raises:
        UnreadableError: the file is damaged.
    """
    number = part.first_line
    with opened(part) as (stream, _):
        for lines in whole_records(lines_of(stream), fields):
            block = _block_of(lines, number)
            yield block
            number += len(block)


def _block_of(lines: NumberedLines, number: int) -> LineBlock:
    """Return lines as a block; a record that goes over several is apart, and its lines are empty."""
    faults = lines.faults.to_pylist() if lines.faults.null_count < len(lines.faults) else []
    texts = lines.texts.view(pa.binary()).to_pylist()
    if faults == [TOO_LONG]:
        return LineBlock(texts[0] + b"\n", number, too_long=True)
    records = {i: text for i, text in enumerate(texts) if b"\n" in text}
    for i in records:
        texts[i] = b""
    block = LineBlock(b"\n".join(texts) + b"\n", number)
    block.records, block.faults = records, {i: fault for i, fault in enumerate(faults) if fault is not None}
    return block


class _Joiner:
    """Puts the lines of records together."""

    def __init__(self, fields: QuotedFields, most: int) -> None:
        self._separator, self._trim, self._most = fields.separator.encode(), fields.trim, most
        self._fields = fields
        #: Lines of an open record: each but the first ends in a quoted field if it begins in one.
        self._open: deque[bytes] = deque()
        self._bytes = 0
        self.done: list[bytes] = []
        self._unclosed: list[int] = []

    @property
    def idle(self) -> bool:
        """True while no record is open."""
        return not self._open

    def add(self, line: bytes) -> None:
        """Take the next line."""
        is_open = bool(self._open)
        if self._ends_inside(line, inside=is_open):
            self._open.append(line)
            self._bytes += len(line) + 1
            while self._bytes > self._most and self._open:
                self._give_up()
        elif is_open:
            self.done += [b"\n".join((*self._open, line)), *[b""] * len(self._open)]
            self._open.clear()
            self._bytes = 0
        else:
            self.done.append(line)

    def end(self) -> None:
        """Take it that no further line comes."""
        while self._open:
            self._give_up()

    def take(self) -> NumberedLines:
        """Return the lines that are done."""
        faults = np.full(len(self.done), None, object)
        faults[self._unclosed] = UNCLOSED
        lines = pa.array(self.done, pa.binary()).view(pa.string())
        self.done, self._unclosed = [], []
        return NumberedLines(lines, pa.array(faults, pa.string()))

    def _give_up(self) -> None:
        """Take the open record's first line for a bad one, and look for a record that begins in one of the others."""
        self._unclosed.append(len(self.done))
        self._pop()
        # A record that begins in one of them is open, too, at the end of the last: none of them closes a field.
        while self._open and not self._ends_inside(self._open[0], inside=False):
            self._pop()

    def _pop(self) -> None:
        line = self._open.popleft()
        self._bytes -= len(line) + 1
        self.done.append(line)

    def _ends_inside(self, line: bytes, inside: bool) -> bool:
        """Return whether a line ends within a quoted field; `inside`: whether it begins in one."""
        if _QUOTE not in line:
            return inside
        offset = 0
        while True:
            if self._trim and not inside:
                while line.startswith(b" ", offset):
                    offset += 1
            if inside:
                offset = self._fields.closing(line, offset)
                if offset < 0:
                    return True
                inside = False
            elif line.startswith(_QUOTE, offset):
                inside, offset = True, offset + 1
                continue
            offset = line.find(self._separator, offset)
            if offset < 0:
                return False
            offset += len(self._separator)


def _split(data: bytes) -> pa.Array:
    """Split bytes into lines that each end with a line feed."""
    buffer = pa.py_buffer(data)
    ends = np.flatnonzero(np.frombuffer(buffer, np.uint8) == ord("\n"))
    # Each string is cut from the same bytes: from behind one line feed to before the next.
    starts = np.concatenate([np.zeros(1, np.int64), ends + 1])
    with_ends = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(ends), [None, pa.py_buffer(starts), buffer])
    lines = pc.binary_slice(with_ends, 0, -1)
    # Bytes that are no UTF-8 stay as they are: a line that is no text is told from the others later.
    return lines.cast(pa.binary()).view(pa.string())
