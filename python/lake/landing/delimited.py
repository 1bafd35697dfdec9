"""Delimited text: the quotes of its fields, records that go over several lines, and pyarrow's CSV reader.

A field that begins with a quote ends with one, and nothing but a separator or the line's end stands behind it. A quote
within is doubled (RFC 4180) or, where the source has an escape character, escaped (as Spark, Hive and MySQL write it):
behind that character a quote, and the character itself, stand for themselves; before anything else it is text like any
other. A field that begins otherwise may have quotes and escape characters within: they are text.

A record goes over several lines where a quoted field has line breaks. Such a record stands on its first line; the
others are empty ones, so every line of a file still is one row.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from headrace.config.schema import EpochUnit
from headrace.lake.faults import WRONG_FIELDS
from headrace.lake.landing.blocks import (
    TOO_LONG,
    Declaration,
    LineBlock,
    Mask,
    Parsed,
    Part,
    SeenColumns,
    opened,
    whole_lines,
)
from headrace.lake.landing.convert import arrow_type, bounds, element_type, from_text, list_of, split_list

#: Why a record cannot be cut into fields.
STRAY, UNCLOSED = "text behind a closing quote", "a quoted field is not closed"
_QUOTE = b'"'
#: Blanks and control characters: around a field they are no part of it where it is trimmed.
_PADDING = bytes(range(0x21))
#: Bytes that are read and handed on at once.
_BLOCK = 4 << 20
#: A quoted field that is not closed within so many bytes is taken for one that lacks its closing quote: its record's
#: first line is bad, and reading goes on with the second.
_RECORD_BYTES = 1 << 20


@dataclass(frozen=True)
class QuotedFields:
    """Rules by which a line of delimited text is cut into fields."""

    #: One character.
    separator: str
    #: Whether blanks may stand around the quotes of a field.
    trim: bool = False
    #: Besides a second quote, what makes a quote a part of a quoted field.
    escape: str | None = None

    @cached_property
    def _signs(self) -> re.Pattern[bytes]:
        """Pattern of what may end a quoted field, or keep a quote from doing so."""
        return re.compile(b"|".join(re.escape(s.encode()) for s in ('"', self.escape) if s is not None))

    @cached_property
    def _blanks(self) -> bytes:
        return bytes(c for c in b" \t" if c not in self.separator.encode()) if self.trim else b""

    def closing(self, line: bytes, start: int) -> int:
        """Return the place behind the quote that closes a field, looked for from `at` on; -1 where there is none."""
        while (match := self._signs.search(line, start)) is not None:
            start = match.end()
            if match.group() != _QUOTE or line.startswith(_QUOTE, start):
                start += 1
            else:
                return start
        return -1

    def pattern(self) -> str:
        """Return a regular expression (RE2) of records whose fields are all as RFC 4180 or the escape has them."""
        between = re.escape(self.separator)
        inside = '[^"]|""' if self.escape is None else rf'[^"{re.escape(self.escape)}]|{re.escape(self.escape)}.|""'
        field = f'(?:[^"{between}]*|"(?:{inside})*")'
        return f"(?s)^{field}(?:{between}{field})*\\r?\\n?$"

    @property
    def is_for_arrow(self) -> bool:
        """True where Arrow's CSV parser can cut lines at the separator."""
        return len(self.separator) == 1 and self.separator.isascii() and self.separator not in '"\n\r\\'

    def padded(self) -> str:
        """Return a regular expression (RE2) of lines with blanks or control characters around a field."""
        between = re.escape(self.separator)
        return f"(?:^|{between})[\\x00-\\x20]|[\\x00-\\x20](?:{between}|\\r*\\n?$)"

    def rfc4180(self, line: bytes) -> bytes | str:
        """Return a record with its quotes as RFC 4180 has them, or why it has no such form."""
        separator, pieces, offset = self.separator.encode(), list[bytes](), 0
        while True:
            start = offset
            offset += len(line) - offset - len(line[offset:].lstrip(self._blanks)) if self._blanks else 0
            if line.startswith(_QUOTE, offset):
                end = self.closing(line, offset + 1)
                if end < 0:
                    return UNCLOSED
                pieces.append(_QUOTE + self._unescaped(line[offset + 1 : end - 1]) + _QUOTE)
                while self._blanks and line[end : end + 1] and line[end] in self._blanks:
                    end += 1
                if end < len(line) and not line.startswith(separator, end):
                    return STRAY
            else:
                end = line.find(separator, offset)
                end = len(line) if end < 0 else end
                pieces.append(line[start:end])
            if end == len(line):
                return separator.join(pieces)
            offset = end + len(separator)

    def values(self, line: bytes) -> list[bytes] | str:
        """Return a record's fields without their quotes (with `trim`, blanks around them), or why it has none."""
        separator = self.separator.encode()
        if _QUOTE not in line:
            return [self._trimmed(field) for field in line.split(separator)]
        record = self.rfc4180(line)
        if isinstance(record, str):
            return record
        plain, values, offset = QuotedFields(self.separator), list[bytes](), 0
        while True:
            if record.startswith(_QUOTE, offset):
                end = plain.closing(record, offset + 1)
                values.append(record[offset + 1 : end - 1].replace(2 * _QUOTE, _QUOTE))
            else:
                end = record.find(separator, offset)
                end = len(record) if end < 0 else end
                values.append(self._trimmed(record[offset:end]))
            if end == len(record):
                return values
            offset = end + len(separator)

    def _trimmed(self, field: bytes) -> bytes:
        return field.strip(_PADDING) if self.trim else field

    def _unescaped(self, inside: bytes) -> bytes:
        if self.escape is None or (escape := self.escape.encode()) not in inside:
            return inside
        either = re.escape(escape)

        def doubled(match: re.Match[bytes]) -> bytes:
            return escape if match.group() == 2 * escape else 2 * _QUOTE

        return re.sub(rb'""|%b["%b]' % (either, either), doubled, inside)


@dataclass(frozen=True)
class NumberedLines:
    """Lines that follow each other."""

    #: Each without its line feed, arbitrary bytes. string [lines].
    texts: pa.Array
    #: Why a line is no row, where that is known already: TOO_LONG, UNCLOSED; else null. string [lines].
    faults: pa.Array


def lines_of(stream: BinaryIO, block: int = _BLOCK) -> Iterator[NumberedLines]:
    """Yield the lines of a text; nothing behind the last line feed.

    `block`: bytes that are read at once.
    """
    for text in whole_lines(stream.read, block):
        texts = _split(text.data)
        faults = pa.array([TOO_LONG], pa.string()) if text.too_long else pa.nulls(len(texts), pa.string())
        yield NumberedLines(texts, faults)


def whole_records(
    lines: Iterable[NumberedLines], fields: QuotedFields, most: int = _RECORD_BYTES
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


def odd_quotes(block: LineBlock, fields: QuotedFields) -> Mask:
    """Return a mask of lines whose quotes break RFC 4180, or the escape's rule, in a field. bool [lines]."""
    odd = np.zeros(len(block), np.bool_)
    if _QUOTE not in block.data:
        return odd
    quoted = np.unique(block.line_of(np.flatnonzero(block.bytes == _QUOTE[0])))
    lines = block.lines.take(pa.array(quoted))
    odd[quoted] = ~pc.match_substring_regex(lines, fields.pattern()).to_numpy(zero_copy_only=False)
    return odd


def with_doubled_quotes(lines: pa.BinaryArray, fields: QuotedFields) -> pa.BinaryArray:
    """Return lines, of which none is odd (`odd_quotes`), with escaped quotes doubled; each ends with a newline."""
    assert fields.escape is not None
    looked_at = pc.and_(pc.match_substring(lines, _QUOTE), pc.match_substring(lines, fields.escape.encode()))
    if not pc.any(looked_at).as_py():
        return lines
    doubled = []
    for line in lines.filter(looked_at).to_pylist():
        record = fields.rfc4180(line.rstrip(b"\r\n"))
        assert isinstance(record, bytes), "a line that is not odd has fields"
        doubled.append(record + b"\n")
    return pc.replace_with_mask(lines, looked_at, pa.array(doubled, pa.binary()))


@dataclass(frozen=True)
class LineRow:
    """A row of a line."""

    #: The text of each column of the form. One of `LineForm.null_texts` is null, as None is.
    texts: Sequence[str | None]
    #: Why the line cannot be read as such a row; None where it can.
    fault: str | None = None


class LineForm(ABC):
    """Form of a file's lines: the rules that cut them into texts of columns. Pickled into tasks.

    A subclass for lines of another form has `names` and `rows`. Its lines are judged one by one, in Python.
    """

    #: Columns of the file, in the order of a row's texts.
    names: tuple[str, ...]
    #: Whether the first line names the columns.
    header: bool = False
    #: Texts that mean null.
    null_texts: tuple[str, ...] = ()
    #: Separates the elements of lists.
    lists: str = "|"
    #: By column, a regular expression and what replaces it, before the text is cast.
    rewrites: Mapping[str, tuple[str, str]] = {}
    #: By column, the unit of times that the format spells as numbers since 1970.
    epochs: Mapping[str, EpochUnit] = {}

    @abstractmethod
    def rows(self, line: str) -> Sequence[LineRow]:
        """Return the rows of a line: usually one. None of them: the line is skipped."""


@dataclass(frozen=True)
class DelimitedForm(LineForm):
    """Form of one delimited file."""

    #: Columns of the file, in their order.
    names: tuple[str, ...]
    separator: str
    #: Whether fields may be in quotes (RFC 4180).
    quotes: bool = True
    #: Whether the first line names the columns.
    header: bool = False
    #: Besides a second quote, what makes a quote a part of a quoted field.
    escape: str | None = None
    #: Texts that mean null, besides the empty one.
    nulls: tuple[str, ...] = ()
    #: Separates the elements of lists.
    lists: str = "|"
    #: By column, a regular expression and what replaces it, before the text is cast.
    rewrites: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    #: Whether blanks around a field are no part of it.
    trim: bool = False
    #: Whether a quoted field may have line breaks.
    multiline: bool = False

    @property
    def null_texts(self) -> tuple[str, ...]:  # type: ignore[override]
        """All texts that mean null."""
        return ("", *self.nulls)

    @cached_property
    def fields(self) -> QuotedFields:
        """The rules by which its lines are cut."""
        return QuotedFields(self.separator, self.trim, self.escape)

    def rows(self, line: str) -> Sequence[LineRow]:
        """Return the fields of a line; with too few or too many of them it has a fault."""
        texts: Sequence[str | None]
        fault = None
        if not self.trim and (not self.quotes or '"' not in line):
            texts = line.split(self.separator)
        else:
            fields = self.fields.values(line.encode())
            if isinstance(fields, str):
                fault, fields = fields, []
            texts = [field.decode(errors="replace") for field in fields]
            if self.trim and len(texts) == 1 and not texts[0] and not line.strip(_PADDING.decode()):
                fault = WRONG_FIELDS
        if len(texts) != len(self.names):
            fault = fault or WRONG_FIELDS
            texts = [*texts, *[""] * (len(self.names) - len(texts))]
        return (LineRow(texts, fault),)


class DelimitedReader:
    """Reads one file."""

    block_size = _BLOCK

    def __init__(self, form: DelimitedForm, declaration: Declaration) -> None:
        self._form, self._declaration = form, declaration
        declared = {c.steps[0] for c in declaration.columns}
        present = {c.name for c in declaration.columns if c.steps[0] in form.names}
        self.seen = SeenColumns(present, {n for n in form.names if n not in declared})
        self._fields = form.fields
        places = {name: f"f{k}" for k, name in enumerate(form.names)}
        keys = {c.name: c.steps[0] for c in declaration.columns} | {name: name for name in declaration.extra}
        self._places = {name: places[key] for name, key in keys.items() if key in places}
        read_places = [self._places[n] for n in declaration.names if n in self._places]
        self._read = pcsv.ReadOptions(
            use_threads=False, block_size=1 << 30, column_names=[f"f{k}" for k in range(len(form.names))]
        )
        self._convert = pcsv.ConvertOptions(
            check_utf8=False,
            column_types={f"f{k}": pa.string() for k in range(len(form.names))},
            null_values=[*form.null_texts],
            strings_can_be_null=True,
            quoted_strings_can_be_null=True,
            # Without any, all are read.
            include_columns=read_places or ["f0"],
        )

    def odd(self, block: LineBlock) -> Mask:
        """Return a mask of lines whose quotes are not in order, or whose fields are to be trimmed."""
        if not self._form.names:
            return np.ones(len(block), np.bool_)
        odd = odd_quotes(block, self._fields) if self._form.quotes else np.zeros(len(block), np.bool_)
        if self._form.trim:
            odd |= pc.match_substring_regex(block.lines, self._fields.padded()).to_numpy(zero_copy_only=False)
        return odd

    def skipped(self, block: LineBlock) -> Mask:
        """Return a mask of the header. bool [lines]."""
        skipped = np.zeros(len(block), np.bool_)
        skipped[0] = self._form.header and block.first_line == 1
        return skipped

    def parse(self, lines: pa.BinaryArray) -> Parsed:
        """Parse lines to rows; lines with another number of fields are left out."""
        if self._form.escape is not None:
            lines = with_doubled_quotes(lines, self._fields)
        misfits: set[bytes] = set()

        def note(row: pcsv.InvalidRow) -> str:
            # Not by its number, which is wrong behind the first one.
            misfits.add(row.text.encode())
            return "skip"

        options = pcsv.ParseOptions(
            delimiter=self._form.separator,
            quote_char='"' if self._form.quotes else False,
            double_quote=self._form.quotes,
            ignore_empty_lines=False,
            invalid_row_handler=note,
        )
        start, end = bounds(lines)
        source = pa.BufferReader(lines.buffers()[2].slice(start, end - start))
        table = pcsv.read_csv(source, self._read, options, self._convert).combine_chunks()
        places = np.arange(len(lines))
        if misfits:
            right = [line.rstrip(b"\r\n") not in misfits for line in lines.to_pylist()]
            places = np.flatnonzero(right)
        if len(places) != table.num_rows:  # which line is which row is not known
            none = [pa.nulls(0, pa.string()) for _ in self._declaration.extra]
            declared = [pa.nulls(0, arrow_type(c.type)) for c in self._declaration.columns]
            return Parsed(places[:0], [*declared, *none], np.zeros(0, np.bool_))
        texts = {name: _array(table, self._places[name]) for name in self._declaration.names if name in self._places}
        unsure = np.zeros(len(places), np.bool_)
        columns: list[pa.Array] = []
        for c in self._declaration.columns:
            text = texts.get(c.name)
            if text is None:
                columns.append(pa.nulls(len(places), arrow_type(c.type)))
                continue
            value = self._typed(c.name, c.type, text)
            if value.null_count != text.null_count:
                unsure |= pc.and_(value.is_null(), text.is_valid()).to_numpy(zero_copy_only=False)
            columns.append(value)
        columns += [texts.get(name, pa.nulls(len(places), pa.string())) for name in self._declaration.extra]
        return Parsed(places, columns, unsure)

    def _typed(self, name: str, declared: str, text: pa.StringArray) -> pa.Array:
        declaration = self._declaration
        if name in self._form.rewrites:
            text = pc.replace_substring_regex(text, *self._form.rewrites[name])
        element, spelling = element_type(declared), declaration.spellings.get(name)
        if element is None:
            text = text if spelling is None else spelling.plain(text)
            return from_text(text, declared, declaration.timezone, declaration.timestamps.get(name))
        lists = split_list(text, self._form.lists)
        values = lists.values if spelling is None else spelling.plain(lists.values)
        return list_of(lists, from_text(values, element, declaration.timezone, None), declared)


def _array(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks else pa.array([], column.type)
