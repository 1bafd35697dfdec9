"""Text files as numbered lines, without the JVM: for compressions that Spark cannot read, and for quoted line breaks.

A record of delimited text may go over several lines where a quoted field has line breaks (RFC 4180). Such a record
stands on its first line; the others are empty ones, so every line of a file still is one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.lake.sources.compression import DamagedError, open_plain
from headrace.storage import Location

#: Bytes that are read and handed on at once.
BLOCK_BYTES = 4 << 20
#: A quoted field that is not closed within so many bytes is taken for one that lacks its closing quote: its record's
#: first line is bad, and reading goes on with the second.
RECORD_BYTES = 1 << 20
#: What a task's error says of a file that cannot be read to its end, for the driver to find.
DAMAGED = "LANDING_FILE_DAMAGED"
_QUOTE = b'"'


@dataclass(frozen=True)
class QuotedFields:
    """How the fields of delimited text are told from each other."""

    #: One character.
    separator: str
    #: Whether blanks may stand before the quote that a field begins with.
    trim: bool = False


@dataclass(frozen=True)
class ReadLines:
    """A task over numbers of files: `id` -> `_path`, `_line` from 1, `value`, `_open`. Pickled into tasks."""

    #: URI and place of each file.
    files: tuple[tuple[str, Location], ...]
    #: Where records may go over several lines; None: each line is a record.
    fields: QuotedFields | None

    SCHEMA = "_path string, _line bigint, value string, _open boolean"

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for i in batch.column(0).to_pylist():
                yield from self._read(*self.files[i])

    def _read(self, uri: str, path: Location) -> Iterator[pa.RecordBatch]:
        line = 1
        try:
            with open_plain(path) as stream:
                lines = lines_of(stream)
                records = ((x, np.zeros(len(x), bool)) for x in lines)
                for texts, unclosed in records if self.fields is None else whole_records(lines, self.fields):
                    n = len(texts)
                    columns = [
                        pa.array([uri], pa.string()).take(pa.array(np.zeros(n, np.int64))),
                        pa.array(np.arange(line, line + n)),
                        texts,
                        pa.array(unclosed),
                    ]
                    yield pa.RecordBatch.from_arrays(columns, ["_path", "_line", "value", "_open"])
                    line += n
        except DamagedError as e:
            raise RuntimeError(f"{DAMAGED} {uri} {e}") from None


def lines_of(stream: BinaryIO, block: int = BLOCK_BYTES) -> Iterator[pa.Array]:
    """The lines of a text, without their line feeds, as string arrays of arbitrary bytes; nothing behind the last one.

    `block`: bytes that are read at once.
    """
    rest: list[bytes] = []
    while data := stream.read(block):
        end = data.rfind(b"\n") + 1
        if not end:
            rest.append(data)
            continue
        yield _split(b"".join([*rest, data[:end]]))
        rest = [data[end:]] if end < len(data) else []
    if rest:
        yield _split(b"".join([*rest, b"\n"]))


def whole_records(
    lines: Iterable[pa.Array], fields: QuotedFields, most: int = RECORD_BYTES
) -> Iterator[tuple[pa.Array, np.ndarray[tuple[int], np.dtype[np.bool_]]]]:
    """Lines with each record on its first one, its line feeds within, and empty lines for the others.

    Args:
        lines: string arrays.
        fields: of the records.
        most: bytes of the longest record.

    Yields:
        lines, as many in all as there were; and which of them begin a quoted field that is not closed within `most`
        bytes, or at all: bool [n].
    """
    joiner = _Joiner(fields, most)
    for batch in lines:
        # Most batches of most files have no line break in quotes to be looked for.
        if joiner.idle and not pc.any(pc.match_substring(batch.view(pa.binary()), _QUOTE)).as_py():
            yield batch, np.zeros(len(batch), bool)
            continue
        for line in batch.view(pa.binary()).to_pylist():
            joiner.add(line)
        if joiner.done:
            yield joiner.take()
    joiner.end()
    if joiner.done:
        yield joiner.take()


class _Joiner:
    """Puts lines together."""

    def __init__(self, fields: QuotedFields, most: int) -> None:
        self._separator, self._trim, self._most = fields.separator.encode(), fields.trim, most
        #: Lines of the record whose quoted field is open, and their bytes.
        self._open: list[bytes] = []
        self._bytes = 0
        self.done: list[bytes] = []
        self._unclosed: list[int] = []

    @property
    def idle(self) -> bool:
        """Whether no record is open."""
        return not self._open

    def add(self, line: bytes) -> None:
        """The next line."""
        waiting = [line]
        while waiting:
            line = waiting.pop()
            inside = self._ends_inside(line, inside=bool(self._open))
            if self._open or inside:
                self._open.append(line)
                self._bytes += len(line) + 1
            if not inside:
                if self._open:
                    self.done += [b"\n".join(self._open), *[b""] * (len(self._open) - 1)]
                    self._open, self._bytes = [], 0
                else:
                    self.done.append(line)
            elif self._bytes > self._most:
                waiting += self._give_up()

    def end(self) -> None:
        """No further line comes."""
        while self._open:
            for line in reversed(self._give_up()):
                self.add(line)

    def take(self) -> tuple[pa.Array, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
        """The lines that are done, and which of them are unclosed."""
        unclosed = np.zeros(len(self.done), bool)
        unclosed[self._unclosed] = True
        lines = pa.array(self.done, pa.binary()).view(pa.string())
        self.done, self._unclosed = [], []
        return lines, unclosed

    def _give_up(self) -> list[bytes]:
        """Take the open record's first line for a bad one; the others, last first, are to be looked at again."""
        first, *others = self._open
        self._unclosed.append(len(self.done))
        self.done.append(first)
        self._open, self._bytes = [], 0
        return others[::-1]

    def _ends_inside(self, line: bytes, inside: bool) -> bool:
        """Whether a line ends within a quoted field; `inside`: whether it begins in one."""
        if _QUOTE not in line:
            return inside
        at = 0
        while True:
            if self._trim and not inside:
                while line.startswith(b" ", at):
                    at += 1
            if inside:
                at = _closing(line, at)
                if at < 0:
                    return True
                inside = False
            elif line.startswith(_QUOTE, at):
                inside, at = True, at + 1
                continue
            at = line.find(self._separator, at)
            if at < 0:
                return False
            at += len(self._separator)


def _closing(line: bytes, at: int) -> int:
    """The place behind the quote that closes a field; -1 where there is none. Doubled quotes are part of the field."""
    while (at := line.find(_QUOTE, at)) >= 0:
        if not line.startswith(_QUOTE, at + 1):
            return at + 1
        at += 2
    return -1


def _split(data: bytes) -> pa.Array:
    """Lines that each end with a line feed."""
    buffer = pa.py_buffer(data)
    ends = np.flatnonzero(np.frombuffer(buffer, np.uint8) == ord("\n"))
    # Each string is cut from the same bytes: from behind one line feed to before the next.
    starts = np.concatenate([np.zeros(1, np.int64), ends + 1])
    whole = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(ends), [None, pa.py_buffer(starts), buffer])
    lines = pc.binary_slice(whole, 0, -1)
    # Bytes that are no UTF-8 stay as they are: a line that is no text is told from the others later.
    return lines.cast(pa.binary()).view(pa.string())
