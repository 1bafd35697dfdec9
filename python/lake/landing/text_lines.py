"""Landing files as text: decompressed streams, numbered lines, and records that go over several lines.

The ending of a file's name says how it is compressed:

  .gz      gzip, several members too
  .bz2     bzip2, several streams too
  .zst     Zstandard, several frames too
  .snappy  blocks of raw Snappy framed as Hadoop does it, which is what Spark and Hive write (not the framing format of
           snzip and python-snappy, whose files end in .sz)

Anything else is plain.

Lines are cut without the JVM. A record of delimited text may go over several lines where a quoted field has line breaks
(RFC 4180). Such a record stands on its first line; the others are empty ones, so every line of a file still is one row.
"""

from __future__ import annotations

import io
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.lake.landing.blocks import TOO_LONG, whole_lines
from headrace.lake.landing.delimited import UNCLOSED, QuotedFields
from headrace.storage import Location, StoreAway, StoreError

#: Ending -> name of the compression.
COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".zst": "Zstandard", ".snappy": "Snappy"}
#: Endings of files that are compressed in another way.
UNREADABLE_ENDINGS = frozenset({".deflate", ".lz4", ".lzo", ".xz", ".zstd", ".sz", ".z"})
_ARROW_NAMES = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
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
                yield io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, "r"), _ARROW_NAMES[kind]))
        except StoreAway:  # nothing is known of the file
            raise
        except (OSError, pa.ArrowException) as e:
            # Arrow's errors of decompression have no number of the system's.
            if isinstance(e, OSError) and e.errno is not None:
                raise
            cut = isinstance(e, EOFError) or "Truncated" in str(e)
            raise DamagedError(_TRUNCATED if cut else f"its {COMPRESSIONS[kind]} data are damaged") from None


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


#: Bytes that are read and handed on at once.
BLOCK_BYTES = 4 << 20
#: A quoted field that is not closed within so many bytes is taken for one that lacks its closing quote: its record's
#: first line is bad, and reading goes on with the second.
RECORD_BYTES = 1 << 20
#: What a task's error says of a file that cannot be read to its end, for the driver to find: then its number and why.
#: The first is of its content, the second of the file system.
DAMAGED, UNREADABLE = "LANDING_FILE_DAMAGED", "LANDING_FILE_UNREADABLE"
_QUOTE = b'"'


@dataclass(frozen=True)
class NumberedLines:
    """Lines that follow each other."""

    #: Each without its line feed, arbitrary bytes. string [lines].
    texts: pa.Array
    #: Why a line is no row, where that is known already: TOO_LONG, UNCLOSED; else null. string [lines].
    faults: pa.Array


@dataclass(frozen=True)
class ReadLines:
    """A task over places in `files`: `id` -> `_file`, `_line` from 1, `_text`, `_fault`. Pickled into tasks."""

    #: Number and place of each file.
    files: tuple[tuple[int, Location], ...]
    #: Where records may go over several lines; None: each line is a record.
    fields: QuotedFields | None

    SCHEMA = "_file int, _line bigint, _text string, _fault string"

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for i in batch.column(0).to_pylist():
                yield from self._read(*self.files[i])

    def _read(self, number: int, path: Location) -> Iterator[pa.RecordBatch]:
        line = 1
        try:
            with open_plain(path) as stream:
                lines = lines_of(stream)
                for part in lines if self.fields is None else whole_records(lines, self.fields):
                    n = len(part.texts)
                    columns = [
                        pa.array(np.full(n, number, np.int32)),
                        pa.array(np.arange(line, line + n)),
                        part.texts,
                        part.faults,
                    ]
                    yield pa.RecordBatch.from_arrays(columns, ["_file", "_line", "_text", "_fault"])
                    line += n
        except DamagedError as e:
            raise RuntimeError(f"{DAMAGED} {number} {e}") from None
        except StoreError:  # nothing is known of the file
            raise
        except OSError as e:
            raise RuntimeError(f"{UNREADABLE} {number} {e.strerror or e}") from e


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
