"""Lines of fields between separators, by pyarrow's CSV reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from headrace.lake.blocks.convert import arrow_type, element_type, from_text, list_of, split_list
from headrace.lake.blocks.lines import Block, Mask
from headrace.lake.blocks.quotes import QuotedFields, odd_quotes, with_doubled_quotes
from headrace.lake.blocks.reader import Declaration, Found, Parsed
from headrace.lake.blocks.text import bounds

_BLOCK = 4 << 20


@dataclass(frozen=True)
class DelimitedForm:
    """How one file is written."""

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


class DelimitedReader:
    """Reads one file."""

    block_size = _BLOCK

    def __init__(self, form: DelimitedForm, declaration: Declaration) -> None:
        self._form, self._declaration = form, declaration
        declared = {c.name for c in declaration.columns}
        self.found = Found({n for n in form.names if n in declared}, {n for n in form.names if n not in declared})
        self._fields = QuotedFields(form.separator, escape=form.escape)
        self._places = {name: f"f{k}" for k, name in enumerate(form.names)}
        wanted = [self._places[n] for n in declaration.names if n in self._places]
        self._read = pcsv.ReadOptions(
            use_threads=False, block_size=1 << 30, column_names=[f"f{k}" for k in range(len(form.names))]
        )
        self._convert = pcsv.ConvertOptions(
            check_utf8=False,
            column_types={f"f{k}": pa.string() for k in range(len(form.names))},
            null_values=["", *form.nulls],
            strings_can_be_null=True,
            quoted_strings_can_be_null=True,
            # Without any, all are read.
            include_columns=wanted or ["f0"],
        )

    def odd(self, block: Block) -> Mask:
        """Lines whose quotes are not in order."""
        if not self._form.names:
            return np.ones(len(block), np.bool_)
        if self._form.quotes:
            return odd_quotes(block, self._fields)
        return np.zeros(len(block), np.bool_)

    def skipped(self, block: Block) -> Mask:
        """The header."""
        found = np.zeros(len(block), np.bool_)
        found[0] = self._form.header and block.first_line == 1
        return found

    def parse(self, lines: pa.BinaryArray) -> Parsed:
        """Rows of lines, those with another number of fields left out."""
        if self._form.escape is not None:
            lines = with_doubled_quotes(lines, self._fields)
        other: set[bytes] = set()

        def note(row: pcsv.InvalidRow) -> str:
            # Not by its number, which is wrong behind the first one.
            other.add(row.text.encode())
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
        if other:
            right = [line.rstrip(b"\r\n") not in other for line in lines.to_pylist()]
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
