"""Landing files, or ranges of their bytes, as blocks of whole lines; the contract of what reads them.

Some lines no fast parser may take. A reader knows the declaration of the source, and the rows of all readers pass the
same checks. A block's lines become good rows, lines to skip, and lines to be judged one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.config.schema import EpochUnit, TableColumn
from headrace.lake.landing.compression import ARROW_NAMES, DamagedError, damage_of, ending, open_plain
from headrace.lake.landing.convert import lengths, lines_library, zone_offset
from headrace.lake.landing.spellings import Spelling
from headrace.storage import Location, StoreError

Mask = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]

NEWLINE, RETURN, TAB, BLANK = 10, 13, 9, 32
#: Bytes of the longest line, without its newline, that is read. Of a longer one no more than its first bytes are kept,
#: for the quarantine, so that memory does not grow with a file's longest line (a gzip bomb is one).
LINE_BYTES = 16 << 20
_SHOWN_BYTES = 4096
#: Why such a line is no row.
TOO_LONG = f"a line of more than {LINE_BYTES:,} bytes"
BOM = b"\xef\xbb\xbf"
_OPEN, _CLOSE = ord("{"), ord("}")
#: Jackson limits the digits of a number (those of its fraction and exponent too) and the depth of an object; lines
#: shorter than the first reach neither. The last is the limit of a text.
_LONG, _DIGITS, _MOST_DEPTH, _MOST_TEXT = 900, re.compile(rb"[0-9.eE+-]+"), 400, 20_000_000
_NOT_FINITE = re.compile(rb"[:,\[] *[-+]?(?:NaN|Inf)")
_NUL = b"\\u0000"
#: A second half of a surrogate pair without its first one.
_LONE = re.compile(rb"(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]")


class UnreadableError(Exception):
    """A file that cannot be read to its end; says why."""

    def __init__(self, cause: str, is_of_content: bool) -> None:
        """`is_of_content`: whether its bytes are at fault, and not the file system that does not give them."""
        super().__init__(cause)
        self.is_of_content = is_of_content


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
    def compression(self) -> str:
        """The ending that says how the file is compressed; empty of a plain one."""
        return ending(self.path.name)


class LineBlock:
    """Some lines that follow each other."""

    def __init__(self, data: bytes, first_line: int, too_long: bool = False) -> None:
        """Split bytes into lines.

        Args:
            data: bytes that end with a newline.
            first_line: number of the first line.
            too_long: whether they are the beginning of one line that is TOO_LONG."""
        self.data = data
        self.first_line = first_line
        self.too_long = too_long
        #: Records that go over several lines, by the places of their first lines. Their lines are empty ones.
        self.records: Mapping[int, bytes] = {}
        #: Why lines are no rows, by their places, where that is known already.
        self.faults: Mapping[int, str] = {}
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(data, np.uint8)
        self.control_characters = _control_characters_of(self.bytes)
        #: Place of each line's newline. int64 [lines].
        self.newlines: I64 = _places_of_newlines(self.bytes, self.control_characters.newlines)
        #: Place of each line's first byte. int64 [lines].
        self.starts: I64 = np.concatenate([[0], self.newlines[:-1] + 1])

    def __len__(self) -> int:
        return len(self.newlines)

    @cached_property
    def ends(self) -> I64:
        """Place behind each line's last byte, without carriage returns at its end. int64 [lines]."""
        trimmed = self._returns_before(self.newlines)
        if not trimmed.any():
            return self.newlines
        ends = self.newlines - trimmed
        again = np.flatnonzero(self._returns_before(ends))
        if len(again):  # lines that end in several: each goes on to where the run of returns begins
            returns = np.flatnonzero(self.bytes == RETURN)
            begins = np.append(True, np.diff(returns) > 1)
            first = np.maximum.accumulate(np.where(begins, np.arange(len(returns)), 0))
            ends[again] = returns[first[np.searchsorted(returns, ends[again] - 1)]]
        return ends

    def _returns_before(self, places: I64) -> Mask:
        """Return whether a carriage return stands before each line's place, in the line. bool [lines]."""
        is_return: Mask = (places > self.starts) & (self.bytes[np.maximum(places - 1, 0)] == RETURN)
        return is_return

    @cached_property
    def lines(self) -> pa.BinaryArray:
        """The lines with their newlines; no copy."""
        offsets = np.append(self.starts, len(self.data)).astype(np.int32)
        return pa.Array.from_buffers(pa.binary(), len(self), [None, pa.py_buffer(offsets), pa.py_buffer(self.data)])

    def texts(self, lines: Mask) -> pa.StringArray:
        """Return some lines without newlines, carriage returns kept: the bytes as they are, be they UTF-8 or not."""
        chosen = np.flatnonzero(lines)
        starts, ends = self.starts[chosen], self.newlines[chosen]
        pieces = [self.data[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        if self.records:
            pieces = [self.records.get(i, piece) for i, piece in zip(chosen.tolist(), pieces, strict=True)]
        return pa.array(pieces, pa.binary()).view(pa.string())

    def number(self, lines: Mask) -> I64:
        """Return the numbers of some lines. int64 [lines chosen]."""
        return self.first_line + np.flatnonzero(lines)

    def line_of(self, places: npt.NDArray[Any]) -> I64:
        """Return the lines (counted from 0) in which bytes lie."""
        return np.searchsorted(self.newlines, places)


class _ControlCharacters(NamedTuple):
    """Numbers of control characters: bytes below 32, and some of them."""

    all: int
    tabs: int
    newlines: int


def _control_characters_of(data: npt.NDArray[np.uint8]) -> _ControlCharacters:
    """Count the control characters of a text."""
    lib = lines_library()
    if lib is None:
        return _ControlCharacters(*(int(np.count_nonzero(x)) for x in (data < 32, data == 9, data == 10)))
    counts = np.empty(3, np.int64)
    lib.headrace_control_characters(data.ctypes.data, len(data), counts.ctypes.data)
    return _ControlCharacters(*counts.tolist())


def _places_of_newlines(data: npt.NDArray[np.uint8], count: int) -> I64:
    """Return the places of a text's newlines, whose number is known. int64 [count]."""
    lib = lines_library()
    if lib is None:
        return np.flatnonzero(data == 10)
    places = np.empty(count, np.int64)
    lib.headrace_newlines(data.ctypes.data, len(data), count, places.ctypes.data)
    return places


def blocks(part: Part, size: int) -> Iterator[LineBlock]:
    """Yield the lines of a part, about `size` bytes at once.

    Raises:
        UnreadableError: the file is damaged.
    """
    with opened(part) as (stream, offset):
        yield from _blocks(part, stream, offset, size)


def count_lines(part: Part, size: int = 8 << 20) -> int:
    """Count the lines that begin in a part of an uncompressed file, whose `end` is at most the file's size."""
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
def opened(part: Part) -> Iterator[tuple[Any, int]]:
    """Open a part one byte before its beginning, if there is one; yield (stream, place of its first byte).

    Raises:
        UnreadableError: the file cannot be read, or not to its end.
    """
    try:
        with _stream_of(part) as stream:
            offset = max(part.start - 1, 0)
            if offset:
                stream.seek(offset)
            yield stream, offset
    except StoreError:  # nothing is known of the file
        raise
    except DamagedError as e:
        raise UnreadableError(str(e), is_of_content=True) from None
    except (OSError, EOFError, pa.ArrowException) as e:
        # Arrow's errors of decompression have no number of the system's.
        if not part.compression or (isinstance(e, OSError) and e.errno is not None):
            raise UnreadableError(getattr(e, "strerror", None) or str(e), is_of_content=False) from None
        raise UnreadableError(damage_of(e, part.compression), is_of_content=True) from None


@contextmanager
def _stream_of(part: Part) -> Iterator[Any]:
    with ExitStack() as files:
        if part.compression and part.compression not in ARROW_NAMES:
            yield files.enter_context(open_plain(part.path))
            return
        if part.path.scheme == "file":
            source: Any = str(part.path)
        else:  # in ranges: the file need not have room on this host
            source = files.enter_context(part.path.open())
        compression = ARROW_NAMES.get(part.compression)
        yield files.enter_context(pa.input_stream(source, compression=compression, buffer_size=0))


def _blocks(part: Part, stream: Any, begin: int, size: int) -> Iterator[LineBlock]:
    number, skipping = part.first_line, part.start > 0
    for text in whole_lines(stream.read, size):
        data, end = text.data, begin + text.bytes
        if skipping:  # the line that began before the part
            skipping = False
            first = data.index(b"\n") + 1
            begin, data = (end, b"") if text.too_long else (begin + first, data[first:])
        if part.end is not None and begin >= part.end:
            return
        if part.end is not None and end >= part.end and not text.too_long:
            data = data[: data.index(b"\n", part.end - 1 - begin) + 1]
        if data:
            block = LineBlock(data, number, text.too_long)
            yield block
            number += len(block)
        if part.end is not None and end >= part.end:
            return
        begin = end


@dataclass(frozen=True)
class WholeLines:
    """Lines that follow each other, or the beginning of one that is TOO_LONG."""

    #: Ends with a newline.
    data: bytes
    #: Bytes of the text that these are: as many as `data` has, but for a last line that had no newline, and for one
    #: that is too long.
    bytes: int
    too_long: bool = False


def whole_lines(read: Callable[[int], bytes], size: int, most: int = LINE_BYTES) -> Iterator[WholeLines]:
    """Yield a text as whole lines, in linear time, never holding more of it than `most` + 2 `size` bytes.

    Args:
        read: returns up to so many next bytes of the text, none at its end.
        size: bytes to read at once, at most `most`.
        most: bytes of the longest line without its newline.
    """
    pieces: list[bytes] = []
    #: Bytes of the line whose end has not come; where they are too many, `pieces` has only the first of them.
    held = 0
    while data := read(size):
        first = data.find(b"\n") + 1
        if not first:
            if held <= most:
                pieces.append(data)
            held += len(data)
            continue
        if held + first - 1 > most:
            if held <= most:
                pieces.append(data[:first])
            yield _too_long(pieces, held + first)
            data, pieces, held = data[first:], [], 0
        cut = data.rfind(b"\n") + 1
        if cut:  # the bytes are copied once
            yield WholeLines(b"".join((*pieces, memoryview(data)[:cut])), held + cut)
        held = len(data) - cut
        pieces = [data[cut:]] if held else []
    if held > most:
        yield _too_long(pieces, held)
    elif held:
        yield WholeLines(b"".join((*pieces, b"\n")), held)


def _too_long(pieces: list[bytes], length: int) -> WholeLines:
    """Return the first bytes of a line: whole characters, where it is UTF-8."""
    beginning = b"".join(piece[: _SHOWN_BYTES + 1] for piece in pieces).removesuffix(b"\n")
    if len(beginning) > _SHOWN_BYTES:
        end = _SHOWN_BYTES
        while end > _SHOWN_BYTES - 4 and beginning[end] & 0xC0 == 0x80:
            end -= 1
        beginning = beginning[:end]
    return WholeLines(beginning + b"\n", length, too_long=True)


def odd_bytes(block: LineBlock) -> Mask:
    """Return a mask of lines that are not UTF-8, have control characters (tabs and carriage returns at the end aside),
    begin with a byte order mark, begin and end with a blank, or are too long. bool [lines].
    """
    if block.too_long:
        return np.ones(len(block), np.bool_)
    odd = np.zeros(len(block), np.bool_)
    data, ends = block.bytes, block.ends
    returns = int((block.newlines - ends).sum())
    control = block.control_characters
    if control.all != len(block) + control.tabs + returns:
        strange = np.flatnonzero((data < BLANK) & (data != NEWLINE) & (data != TAB))
        lines = block.line_of(strange)
        odd[lines[strange < ends[lines]]] = True
    if returns and int((block.newlines - ends).max()) > 1:
        odd |= block.newlines - ends > 1
    if not block.data.isascii():
        for i in _not_utf8(block):
            odd[i] = True
        last = len(data) - 1
        odd |= np.all([data[np.minimum(block.starts + k, last)] == sign for k, sign in enumerate(BOM)], axis=0)
    odd |= (ends > block.starts) & (data[block.starts] == BLANK) & (data[ends - 1] == BLANK)
    return odd


def odd_json(block: LineBlock) -> Mask:
    """Return a mask of lines that are not `{...}` from first byte to last, that JSON parsers disagree on, or that have
    a NUL character as JSON spells it. bool [lines].
    """
    data, starts, ends = block.bytes, block.starts, block.ends
    odd: Mask = (data[starts] != _OPEN) | (data[np.maximum(ends - 1, 0)] != _CLOSE) | (ends == starts)
    for pattern, sign in ((_NOT_FINITE, b"NaN"), (_NOT_FINITE, b"Inf"), (_LONE, b"\\ud"), (_LONE, b"\\uD")):
        if _has(block, sign):
            places = np.array([m.end() - 1 for m in pattern.finditer(block.data)], np.int64)
            odd[block.line_of(places)] = True
    if _has(block, _NUL):
        places = np.array([m.start() for m in re.finditer(re.escape(_NUL), block.data)], np.int64)
        odd[block.line_of(places)] = True
    for i in np.flatnonzero(ends - starts > _LONG).tolist():
        line = block.data[starts[i] : ends[i]]
        deep = line.count(b"{") + line.count(b"[") > _MOST_DEPTH
        odd[i] |= deep or len(line) > _MOST_TEXT or max(map(len, _DIGITS.findall(line)), default=0) >= _LONG
    return odd


def _has(block: LineBlock, text: bytes) -> bool:
    """Return whether a text is in the block: as `in` does, several times as fast where its first byte is rare."""
    if text[:1] not in block.data:
        return False
    places = np.flatnonzero(block.bytes[: 1 - len(text)] == text[0])
    for k, sign in enumerate(text[1:], 1):
        places = places[block.bytes[places + k] == sign]
    return len(places) > 0


def _not_utf8(block: LineBlock) -> list[int]:
    try:
        block.data.decode()
    except UnicodeDecodeError:
        pass
    else:
        return []
    lines = np.unique(block.line_of(np.flatnonzero(block.bytes > 127)))
    invalid = []
    for i in lines.tolist():
        try:
            block.data[block.starts[i] : block.ends[i]].decode()
        except UnicodeDecodeError:
            invalid.append(i)
    return invalid


@dataclass(frozen=True)
class Declaration:
    """Parts of a spec that decide about rows."""

    columns: tuple[TableColumn, ...]
    #: Undeclared columns that the table has: kept as text.
    extra: tuple[str, ...]
    timezone: str
    timestamps: Mapping[str, EpochUnit]
    ranges: Mapping[str, tuple[float | None, float | None]]
    event_time: str | None
    #: Text columns whose values are ids.
    ids: tuple[str, ...] = ()
    #: UTF-8 bytes of an id at most; None: any number.
    id_bytes: int | None = None
    #: Whether an id may be the empty text.
    empty_ids: bool = True
    #: By column, how the source spells it where that is not plain.
    spellings: Mapping[str, Spelling] = field(default_factory=dict)
    #: Whether an id, and another text, may have a NUL character.
    nul_in_ids: bool = False
    nul_in_texts: bool = False
    #: Days that an event may be late, for reasons.
    late_days: int = 0
    #: Column of times whose greatest value says how far a day has come.
    watermark: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that readers give, in this order."""
        return (*(c.name for c in self.columns), *self.extra)


@dataclass(frozen=True)
class TimeRange:
    """Range of a landing day's event times: microseconds since 1970, [first, end); None: no limit."""

    first: int | None
    end: int


@dataclass
class SeenColumns:
    """Columns that a reader has seen in a file."""

    #: Declared columns that a row has a key (a field) for.
    present: set[str] = field(default_factory=set)
    #: Undeclared columns.
    extra: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Parsed:
    """Rows of lines."""

    #: Of each row the place of its line among the given ones. int64 [rows].
    places: I64
    #: By `Declaration.names`, in the declared types.
    columns: list[pa.Array]
    #: Whether the row must be judged line by line. bool [rows].
    unsure: Mask


class Reader(Protocol):
    """Reads the blocks of one file, in their order or from the middle."""

    seen: SeenColumns
    #: Bytes of the blocks that it works best on.
    block_size: int

    def odd(self, block: LineBlock) -> Mask:
        """Return a mask of lines that the reader does not parse. bool [lines]."""
        ...

    def skipped(self, block: LineBlock) -> Mask:
        """Return a mask of lines that are no rows. bool [lines]."""
        ...

    def parse(self, lines: pa.BinaryArray) -> Parsed:
        """Parse lines, each of which ends with a newline, to rows."""
        ...


@dataclass(frozen=True)
class ReadBlock:
    """A block's lines, each in one of three places."""

    #: Numbers of the good rows' lines; int64 [rows], ascending.
    lines: I64
    #: The good rows, by `Declaration.names`.
    columns: list[pa.Array]
    #: Lines that are no rows.
    skipped: int
    #: Lines that are to be judged one by one. bool [lines].
    unsure: Mask

    def drop_rows(self, rows: Mask) -> ReadBlock:
        """Return the same block without some of the good rows. `rows`: bool [rows]."""
        if not rows.any():
            return self
        keep = pa.array(~rows)
        return replace(self, lines=self.lines[~rows], columns=[c.filter(keep) for c in self.columns])


def read_block(reader: Reader, block: LineBlock, declaration: Declaration, times: TimeRange) -> ReadBlock:
    """Sort the lines of a block into good rows, lines to skip, and lines to be judged one by one."""
    skip = (block.ends == block.starts) | reader.skipped(block)
    skip[[*block.records]] = False
    unsure: Mask = (odd_bytes(block) | reader.odd(block)) & ~skip
    unsure[[*block.records, *block.faults]] = True
    chosen = ~(skip | unsure)
    if not chosen.any():
        empty = [pa.nulls(0, pa.string()) for _ in declaration.names]
        return ReadBlock(np.zeros(0, np.int64), empty, int(skip.sum()), unsure)
    lines = np.flatnonzero(chosen)
    parsed = reader.parse(block.lines if len(lines) == len(block) else block.lines.filter(pa.array(chosen)))
    wrong = parsed.unsure | out_of_bounds(parsed.columns, declaration, times)
    columns, places = parsed.columns, parsed.places
    if wrong.any():
        right = pa.array(~wrong)
        columns, places = [c.filter(right) for c in columns], places[~wrong]
    good = lines[places]
    unsure[lines] = True
    unsure[good] = False
    return ReadBlock(block.first_line + good, columns, int(skip.sum()), unsure)


def out_of_bounds(columns: Sequence[pa.Array], declaration: Declaration, times: TimeRange) -> Mask:
    """Return a mask of rows that lack a required value, have an id that is empty or too long, are outside a range, or
    whose event was at another time. bool [rows].

    NUL characters are not looked for: whole lines that have one are left out before (`odd_bytes`, `odd_json`).
    """
    wrong = np.zeros(len(columns[0]), np.bool_)
    by_name = dict(zip(declaration.names, columns, strict=True))
    for c in declaration.columns:
        if c.required and by_name[c.name].null_count:
            wrong |= by_name[c.name].is_null().to_numpy(zero_copy_only=False)
    for name in declaration.ids:
        size = lengths(by_name[name])
        if declaration.id_bytes is not None:
            wrong |= size > declaration.id_bytes
        if not declaration.empty_ids and len(size) and not size.all():
            wrong |= (size == 0) & by_name[name].is_valid().to_numpy(zero_copy_only=False)
    for name, (low, high) in declaration.ranges.items():
        value = by_name[name].cast(pa.float64(), safe=False)
        if low is not None:
            wrong |= _true(pc.less(value, low))
        if high is not None:
            wrong |= _true(pc.greater(value, high))
    if declaration.event_time is not None:
        micros = event_micros(by_name[declaration.event_time], declaration.timezone)
        if times.first is not None:
            wrong |= _true(pc.less(micros, times.first))
        wrong |= _true(pc.greater_equal(micros, times.end))
    return wrong


def event_micros(time: pa.Array, timezone: str) -> pa.Array:
    """Return microseconds since 1970 of timestamps, or of dates: of their midnight in the time zone."""
    if pa.types.is_date(time.type) and timezone != "UTC":
        days = time.dictionary_encode()
        local = days.dictionary.cast(pa.timestamp("us")).cast(pa.int64()).to_pylist()
        return pa.array([micros - zone_offset(micros, timezone) for micros in local], pa.int64()).take(days.indices)
    return time.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())


def _true(condition: pa.Array) -> Mask:
    mask: Mask = pc.fill_null(condition, False).to_numpy(zero_copy_only=False)
    return mask
