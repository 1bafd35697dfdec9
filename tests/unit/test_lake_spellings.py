"""Delimited text as sources spell it: quoted fields, numbers and times, against Python's `csv`."""

from __future__ import annotations

import csv
import re
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.config import LandingSource, Table, build_spec
from headrace.config.schema import TableColumn, TimeFormat
from headrace.errors import UserError
from headrace.lake.landing.arrow_rows import declaration_of
from headrace.lake.landing.blocks import Declaration, LineBlock, TimeRange, read_block
from headrace.lake.landing.convert import from_text
from headrace.lake.landing.delimited import STRAY, UNCLOSED, DelimitedForm, DelimitedReader, QuotedFields
from headrace.lake.landing.spellings import Spelling, spellings_of
from tests.csv_dialects import COLUMNS, Dialect, dialects, read, rows, written


@settings(max_examples=200)
@given(rows(), dialects())
def test_a_file_in_any_dialect_is_read_by_arrow(source_rows: list[tuple[Any, ...]], dialect: Dialect) -> None:
    """All rows, none left to other rules, and the values that Python reads of the same bytes."""
    body = written(source_rows, dialect)
    source = LandingSource.model_validate(dialect.source() | {"path": "in/*"})
    table = Table.model_validate({"columns": COLUMNS})
    declaration = declaration_of(source, table, ())
    form = DelimitedForm(
        declaration.names, source.separator, header=True, escape=source.escape, nulls=source.null_texts
    )
    read_rows = read_block(DelimitedReader(form, declaration), LineBlock(body, 1), declaration, TimeRange(None, 2**62))
    expected = {row[0]: row for row in read(body, dialect)}
    assert set(expected) == {row[0] for row in source_rows}
    by_number = {row[0]: row for row in zip(*(c.to_pylist() for c in read_rows.columns), strict=True)}
    # A field that is not quoted may have a quote behind its first sign: that is another rule's to judge.
    odd = {row[0] for row in source_rows if row[1] is not None and '"' in row[1] and not dialect.quote_all}
    assert set(expected) - odd <= set(by_number)
    for number, row in by_number.items():
        assert row == expected[number]


@given(st.datetimes(datetime(1900, 1, 1), datetime(2068, 12, 31)), st.sampled_from(["%Y", "%y"]))
def test_times_of_every_directive(moment: datetime, year: str) -> None:
    assume(year == "%Y" or moment.year >= 1969)
    for text in (
        f"%d.%m.{year} %H:%M:%S.%f",
        f"%b %d {year} %I:%M:%S.%f %p",
        f"%A, %d %B {year}, %T,%f",
        f"{year}%m%d%H%M%S%f",
    ):
        plain = Spelling(time_format=TimeFormat(text)).plain(pa.array([f"{moment:{text}}", None, "x"]))
        assert plain.to_pylist() == [moment.isoformat(timespec="microseconds"), None, None], text


@pytest.mark.parametrize(
    ("text", "spelling", "expected"),
    [
        ("1.234.567,5", Spelling(",", "."), "1234567.5"),
        ("1.234.567", Spelling(",", "."), "1234567"),
        ("12.34", Spelling(",", "."), None),
        ("1,234,56", Spelling(".", ","), None),
        ("2.81", Spelling(","), None),
        ("-,5", Spelling(","), "-.5"),
        ("1\u202f234", Spelling(",", " "), "1234"),
        ("1'234.5e3", Spelling(".", "'"), "1234.5e3"),
        ("31.12.2026", Spelling(time_format=TimeFormat("%d.%m.%Y")), "2026-12-31"),
        ("1.2.2026", Spelling(time_format=TimeFormat("%d.%m.%Y")), "2026-02-01"),
        ("2026106", Spelling(time_format=TimeFormat("%Y%m%d")), None),
        ("5 Smarch 2026", Spelling(time_format=TimeFormat("%d %B %Y")), None),
        ("1/2/2026 13:00 PM", Spelling(time_format=TimeFormat("%m/%d/%Y %I:%M %p")), None),
        ("2026-01-06 03:04:05.123456789", Spelling(time_format=TimeFormat("%F %T.%f")), "2026-01-06T03:04:05.123456"),
        ("06/Jan/2026:03:04 -07", Spelling(time_format=TimeFormat("%d/%b/%Y:%R %z")), "2026-01-06T03:04:00-07:00"),
        ("2026-01-06 03:04 CET", Spelling(time_format=TimeFormat("%F %R %Z")), None),
    ],
)
def test_texts_of_people(text: str, spelling: Spelling, expected: str | None) -> None:
    assert spelling.plain(pa.array([text])).to_pylist() == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-06 03:04:05 UTC", "2026-01-06T03:04:05+00:00"),
        ("2026-01-06 03:04:05,25", "2026-01-05T18:04:05.250000+00:00"),
        ("2026-01-06T03:04:05.1234567Z", "2026-01-06T03:04:05.123456+00:00"),
        ("2026-01-06 03:04:05.123456+00", "2026-01-06T03:04:05.123456+00:00"),
        ("2026-01-06 03:04 -0130", "2026-01-06T04:34:00+00:00"),
    ],
)
def test_iso_8601_of_other_systems(text: str, expected: str) -> None:
    (moment,) = from_text(pa.array([text]), "timestamp", "Asia/Tokyo", None).to_pylist()
    assert moment.isoformat() == expected


def test_numbers_since_1970_and_whole_floats() -> None:
    for unit, text in (("epoch_microseconds", "1767668645123456"), ("epoch_nanoseconds", "1767668645123456789")):
        (moment,) = from_text(pa.array([text]), "timestamp", "UTC", unit).to_pylist()  # type: ignore[arg-type]
        assert moment == datetime(2026, 1, 6, 3, 4, 5, 123456, UTC)
    (moment,) = from_text(pa.array(["-1"]), "timestamp", "UTC", "epoch_nanoseconds").to_pylist()
    assert moment == datetime(1969, 12, 31, 23, 59, 59, 999999, UTC)
    texts = ["100054.0", "12345678901234567.0", "1.2E7", "-3.", "1.5", "1e-1", None, "x"]
    expected = [100054, 12345678901234567, 12_000_000, -3, None, None, None, None]
    assert from_text(pa.array(texts), "bigint", "UTC", None).to_pylist() == expected


@pytest.mark.parametrize(
    ("source", "columns", "message"),
    [
        ({"timestamps": {"a": "%d.%m.%Y"}}, [{"name": "a"}], "declare it timestamp or timestamp_ntz or date"),
        ({"timestamps": {"a": "%d.%m.%Y %H"}}, [{"name": "a", "type": "date"}], "has an hour, and a date has none"),
        ({"timestamps": {"a": "%F %T %z"}}, [{"name": "a", "type": "timestamp_ntz"}], "has a zone"),
        ({"timestamps": {"a": "%d.%m"}}, [{"name": "a", "type": "timestamp"}], "must have one year"),
        ({"timestamps": {"a": "%Y-%q"}}, [{"name": "a", "type": "timestamp"}], "%q is no directive"),
        ({"decimal": ",", "thousands": ","}, [{"name": "a"}], "decimal and thousands are both ','"),
        ({"format": "jsonl", "decimal": ","}, [{"name": "a"}], "decimal: format 'jsonl'"),
        ({"escape": '"'}, [{"name": "a"}], "must be one character of ASCII"),
        ({"escape": "\\", "format": "jsonl"}, [{"name": "a"}], "escape: fields of format 'jsonl' have none"),
    ],
)
def test_what_cannot_be_meant_is_refused(source: dict[str, Any], columns: list[Any], message: str) -> None:
    spec = {
        "pipeline": "p",
        "source": {"format": "csv", "path": "in/*"} | source,
        "table": {"columns": columns},
        "features": {"label": "a", "workflow": [], "split": {"by": "position"}},
    }
    with pytest.raises(UserError) as e:
        build_spec(spec)
    assert message in str(e.value)


def test_plain_sources_have_no_spellings() -> None:
    source = LandingSource.model_validate({"format": "csv", "path": "in/*", "timestamps": {"at": "epoch_seconds"}})
    assert spellings_of(source, Table.model_validate({"columns": COLUMNS})) == {}


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
    for line in lines:
        record = QuotedFields(",").rfc4180(line.encode())
        if strictly(line) is None:
            assert record in (STRAY, UNCLOSED)
        else:
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
