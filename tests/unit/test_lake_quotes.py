"""Quoted fields of delimited text, against Python's `csv` in its strict form."""

from __future__ import annotations

import csv
import re

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.lake.landing.block_reader import Declaration, TimeRange, read_block
from headrace.lake.landing.blocks import LineBlock
from headrace.lake.landing.delimited import STRAY, UNCLOSED, DelimitedForm, DelimitedReader, QuotedFields, in_rfc4180
from headrace.schema import TableColumn

LINE = st.text(alphabet='ab\\"", é;', max_size=12)
FIELDS = st.lists(st.text(alphabet='ab\\"", é;', max_size=6), min_size=2, max_size=4)


def strictly(line: str) -> list[str] | None:
    """Return the fields of a line of RFC 4180; None where a quoted field is not closed, or text stands behind it."""
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return None


def escaped(field: str) -> str:
    r"""Write a field as Spark does: within quotes `\"` and `\\`, and a backslash before other text as it is."""
    if not re.search(r'[",\n]', field):
        return field
    inside = re.sub(r'\\(?=["\\]|$)|"', lambda m: "\\" + m.group(), field)
    return f'"{inside}"'


@given(st.lists(LINE, max_size=8))
def test_lines_are_of_rfc_4180_where_the_strict_reader_takes_them(lines: list[str]) -> None:
    read, faults = in_rfc4180(pa.array([line.encode() for line in lines], pa.binary()), QuotedFields(","))
    for line, record, fault in zip(lines, read.to_pylist(), faults.to_pylist(), strict=True):
        if strictly(line) is None:
            assert fault in (STRAY, UNCLOSED)
            assert record is None
        else:
            assert fault is None
            assert record == line.encode()


@given(FIELDS)
def test_escaped_quotes_in_the_form_of_rfc_4180(fields: list[str]) -> None:
    record = QuotedFields(",", escape="\\").rfc4180(",".join(map(escaped, fields)).encode())
    assert isinstance(record, bytes)
    assert strictly(record.decode()) == fields


@given(st.lists(FIELDS, min_size=1, max_size=6), st.sampled_from(["\\", "^", None]), st.sampled_from([",", ";", "|"]))
def test_arrow_reads_what_was_written(rows: list[list[str]], escape: str | None, separator: str) -> None:
    """Arrow leaves to other rules only lines that have a quote in a field without quotes."""
    width = max(map(len, rows))
    rows = [[*row, *[""] * (width - len(row))] for row in rows]

    def written(field: str) -> str:
        if escape is None or len(field) % 2:
            return '"' + field.replace('"', '""') + '"'
        return '"' + re.sub(rf'["{re.escape(escape)}]', lambda m: escape + m.group(), field) + '"'

    def doubled(field: str) -> str:
        # A doubled quote is read with an escape, too; an escape before another sign is text, but not before itself.
        return field if escape is None else re.sub(re.escape(escape) + r'(["' + re.escape(escape) + "])", r"\1", field)

    columns = tuple(TableColumn(name=f"c{k}") for k in range(width))
    declaration = Declaration(columns, (), "UTC", {}, {}, None)
    form = DelimitedForm(declaration.names, separator, escape=escape)
    block = LineBlock("".join(separator.join(map(written, row)) + "\r\n" for row in rows).encode(), 1)
    read = read_block(DelimitedReader(form, declaration), block, declaration, TimeRange(None, 1))
    expected = [[(field if len(field) % 2 == 0 else doubled(field)) or None for field in row] for row in rows]
    read_rows = [list(row) for row in zip(*(c.to_pylist() for c in read.columns), strict=True)]
    if escape is None:
        assert read_rows == expected
    else:
        for line, row in zip(read.lines.tolist(), read_rows, strict=True):
            assert row == expected[line - 1]


@pytest.mark.parametrize(
    ("line", "trim", "expected"),
    [
        (' "a" , b ,"c"\t', True, '"a", b ,"c"'),
        (' "a" , b', False, ' "a" , b'),
        ('"a" x', True, STRAY),
        ('a 5" b,c', False, 'a 5" b,c'),
        ('"a,b', False, UNCLOSED),
        ('"a\\",b', False, '"a\\",b'),
        ('""', False, '""'),
        ('"",', False, '"",'),
    ],
)
def test_lines_of_people(line: str, trim: bool, expected: str) -> None:
    read = QuotedFields(",", trim).rfc4180(line.encode())
    assert (read if isinstance(read, str) else read.decode()) == expected


def test_a_long_field_of_quotes_takes_linear_time() -> None:
    line = b'"' + b'""' * 500_000 + b'",x'
    fields = QuotedFields(",", escape="\\")
    assert fields.rfc4180(line) == line
    assert fields.rfc4180(b'"' + b"\\" * 1_000_000) == UNCLOSED
    assert in_rfc4180(pa.array([line] * 3, pa.binary()), fields)[1].null_count == 3
