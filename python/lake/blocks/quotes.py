"""Quoted fields of delimited text: which lines RFC 4180 has, and its form of those with escaped quotes.

A field that begins with a quote ends with one, and nothing but a separator or the line's end stands behind it. A quote
within is doubled or, where the source has an escape character, escaped (as Spark, Hive and MySQL write it): behind that
character a quote, and the character itself, stand for themselves; before anything else it is text like any other. A
field that begins otherwise may have quotes and escape characters within: they are text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.lake.blocks.lines import Block, Mask

#: Why a record cannot be cut into fields.
STRAY, UNCLOSED = "text behind a closing quote", "a quoted field is not closed"
_QUOTE = b'"'


@dataclass(frozen=True)
class QuotedFields:
    """How the fields of delimited text are told from each other."""

    #: One character.
    separator: str
    #: Whether blanks may stand around the quotes of a field.
    trim: bool = False
    #: Besides a second quote, what makes a quote a part of a quoted field.
    escape: str | None = None

    @cached_property
    def _signs(self) -> re.Pattern[bytes]:
        """What may end a quoted field, or keep a quote from doing so."""
        return re.compile(b"|".join(re.escape(s.encode()) for s in ('"', self.escape) if s is not None))

    @cached_property
    def _blanks(self) -> bytes:
        return bytes(c for c in b" \t" if c not in self.separator.encode()) if self.trim else b""

    def closing(self, line: bytes, at: int) -> int:
        """Return the place behind the quote that closes a field, looked for from `at` on; -1 where there is none."""
        while (found := self._signs.search(line, at)) is not None:
            at = found.end()
            if found.group() != _QUOTE or line.startswith(_QUOTE, at):
                at += 1
            else:
                return at
        return -1

    def pattern(self) -> str:
        """Return a regular expression (RE2) of records whose fields are all as RFC 4180 or the escape has them."""
        between = re.escape(self.separator)
        inside = '[^"]|""' if self.escape is None else rf'[^"{re.escape(self.escape)}]|{re.escape(self.escape)}.|""'
        field = f'(?:[^"{between}]*|"(?:{inside})*")'
        return f"(?s)^{field}(?:{between}{field})*\\r?\\n?$"

    def rfc4180(self, line: bytes) -> bytes | str:
        """Return a record with its quotes as RFC 4180 has them, or why it has no such form."""
        separator, pieces, at = self.separator.encode(), list[bytes](), 0
        while True:
            start = at
            at += len(line) - at - len(line[at:].lstrip(self._blanks)) if self._blanks else 0
            if line.startswith(_QUOTE, at):
                end = self.closing(line, at + 1)
                if end < 0:
                    return UNCLOSED
                pieces.append(_QUOTE + self._unescaped(line[at + 1 : end - 1]) + _QUOTE)
                while self._blanks and line[end : end + 1] and line[end] in self._blanks:
                    end += 1
                if end < len(line) and not line.startswith(separator, end):
                    return STRAY
            else:
                end = line.find(separator, at)
                end = len(line) if end < 0 else end
                pieces.append(line[start:end])
            if end == len(line):
                return separator.join(pieces)
            at = end + len(separator)

    def _unescaped(self, inside: bytes) -> bytes:
        if self.escape is None or (escape := self.escape.encode()) not in inside:
            return inside
        either = re.escape(escape)

        def one(found: re.Match[bytes]) -> bytes:
            return escape if found.group() == 2 * escape else 2 * _QUOTE

        return re.sub(rb'""|%b["%b]' % (either, either), one, inside)


def odd_quotes(block: Block, fields: QuotedFields) -> Mask:
    """Lines whose quotes are not as RFC 4180, or the escape, has them in all fields. bool [lines]."""
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


def in_rfc4180(records: pa.BinaryArray, fields: QuotedFields) -> tuple[pa.BinaryArray, pa.StringArray]:
    """Return records with their quotes as RFC 4180 has them, null where they have no such form, and why they have none.

    Both arrays have the length of `records`, which have no line ends. Most records come back as they are, in one piece.
    """
    looked_at = pc.match_substring(records, _QUOTE)
    if fields.escape is None:
        looked_at = pc.and_not(looked_at, pc.match_substring_regex(records, fields.pattern()))
    places = np.flatnonzero(looked_at.to_numpy(zero_copy_only=False))
    if not len(places):
        return records, pa.nulls(len(records), pa.string())
    read = [fields.rfc4180(line) for line in records.take(pa.array(places)).to_pylist()]
    faults: list[str | None] = [None] * len(records)
    for place, one in zip(places.tolist(), read, strict=True):
        if isinstance(one, str):
            faults[place] = one
    mended = pa.array([None if isinstance(one, str) else one for one in read], pa.binary())
    return pc.replace_with_mask(records, looked_at, mended), pa.array(faults, pa.string())


@dataclass(frozen=True)
class QuotesTask:
    """A task over rows with a column `_text`: adds `_record`, the text in RFC 4180's form, and `_quotes`, why it has
    none. Pickled into tasks.
    """

    fields: QuotedFields

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            text = batch.column(batch.schema.get_field_index("_text"))
            records, faults = in_rfc4180(text.view(pa.binary()), self.fields)
            columns = [*batch.columns, records.view(pa.string()), faults]
            yield pa.RecordBatch.from_arrays(columns, [*batch.schema.names, "_record", "_quotes"])
