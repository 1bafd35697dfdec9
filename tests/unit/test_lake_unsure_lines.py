"""Single texts and lines that Arrow is unsure of, without Spark: against Python's own calendar, fractions and JSON."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.schema import TableColumn
from headrace.lake.faults import BAD
from headrace.lake.landing.blocks import TOO_LONG, Declaration, LineBlock, Part, TimeRange, read_block
from headrace.lake.landing.delimited import UNCLOSED, DelimitedForm, QuotedFields, record_blocks
from headrace.lake.landing.exact_casts import (
    Members,
    cast_texts,
    double_text,
    elements_of,
    float_text,
    members_of,
    moment_text,
    text_of,
)
from headrace.lake.landing.unsure_lines import JudgedLines, LineJudge
from headrace.lake.landing.write_rows import reader_of_lines
from headrace.storage import local

COLUMNS = (
    TableColumn(name="id", required=True),
    TableColumn(name="n", type="int"),
    TableColumn(name="ts", type="timestamp"),
)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def cast(text: str, declared: str, timezone: str = "UTC") -> object:
    return cast_texts(pa.array([text]), declared, timezone, None)[0].as_py()


def judged(judge: LineJudge, *lines: str) -> JudgedLines:
    block = LineBlock("".join(f"{line}\n" for line in lines).encode(), 1)
    return judge.judge(block, np.ones(len(block), np.bool_))


ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Africa/Casablanca", "Asia/Kathmandu"]


@given(st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1)), st.sampled_from(ZONES))
def test_times_are_those_of_the_calendar(time: datetime, zone: str) -> None:
    text = time.isoformat(sep=" ")
    moment = time.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
    assert cast(text, "timestamp", zone) == moment
    plain = moment.replace(tzinfo=None)
    assert moment_text((moment - EPOCH) // timedelta(microseconds=1)) == str(plain).rstrip(
        "0" if "." in str(plain) else ""
    )


@given(st.integers(1, 254), st.integers(0, 2**23 - 1), st.sampled_from([-1, 0, 1]))
def test_a_float_is_the_nearest_one(exponent: int, mantissa: int, side: int) -> None:
    """A text at the middle between two floats, or by 1e-60 beside it: a double has lost on which side it is."""
    bits = np.array([exponent << 23 | mantissa, (exponent << 23 | mantissa) + 1], np.uint32)
    low, high = (
        (Fraction(float(f)) for f in bits.view(np.float32).tolist()) if exponent < 254 else (Fraction(1), Fraction(1))
    )
    middle = (low + high) / 2
    scaled = middle * 10**200 + side * 10**100
    text = f"{scaled.numerator // scaled.denominator}e-200"
    expected = (low, high)[mantissa % 2] if side == 0 and scaled.denominator == 1 else (high if side > 0 else low)
    if low != high and (side or scaled.denominator == 1):
        assert cast(f"{text} ", "float") == float(expected)


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85"])
def test_a_line_end_that_java_does_not_trim_is_no_part_of_a_number(end: str) -> None:
    assert cast(f"1.0{end}", "int") is None
    assert cast("1.0\r", "int") == 1


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_double_is_spelled_as_what_it_is(value: float) -> None:
    text = double_text(value)
    assert float(text).hex() == value.hex()
    # With as few digits as Python has, at least two.
    digits, shortest = (
        "".join(c for c in number.lower().split("e")[0] if c.isdigit()).strip("0") for number in (text, repr(value))
    )
    assert len(digits) <= max(2, len(shortest))


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_a_float_is_spelled_as_what_it_is(value: float) -> None:
    assert np.float32(float_text(value)) == np.float32(value)


def test_numbers_are_spelled_as_java_19_spells_them() -> None:
    """Spellings of the documentation of Java's method toString of doubles, and of its bug JDK-4511638."""
    spelled = {5e-324: "4.9E-324", 2e-323: "2.0E-323", 2e23: "2.0E23", 1e-3: "0.001", 9e-4: "9.0E-4", 1e7: "1.0E7"}
    spelled |= {2.0**-44: "5.684341886080802E-14", 1e23: "1.0E23", 100.0: "100.0", -0.0: "-0.0", 8.41e21: "8.41E21"}
    assert {value: double_text(value) for value in spelled} == spelled


@pytest.mark.parametrize(
    ("line", "members"),
    [
        ("{}", ()),
        ('{"a": 1, "a": -0, "b": "x"}', (("a", "1"), ("a", "0"), ("b", "x"))),
        ("{'a': 'it\\'s \"x\"'}", (("a", 'it\'s "x"'),)),
        ('{"a": {"k": [1.50, null, "\\u001f\\n/"]}}', (("a", '{"k":[1.5,null,"\\u001F\\n/"]}'),)),
        ('{"a": NaN, "b": 1e999}', (("a", '"NaN"'), ("b", '"Infinity"'))),
        ('{"a": INF, "b": "INF", \'c\': -INF}', (("a", '"Infinity"'), ("b", "INF"), ("c", '"-Infinity"'))),
        ('{"a": "\\ud83d"}', (("a", "\ufffd"),)),
    ],
)
def test_members_of_an_object(line: str, members: tuple[tuple[str, str], ...]) -> None:
    members_read = members_of(line)
    assert members_read is not None
    assert tuple((name, text_of(value)) for name, value in members_read) == members


@pytest.mark.parametrize(
    "line", ['{"a": 1}], [{"b": 2}', '{"a": 1}]}', '{"a": 1} {"b": 2}', "[{}]", '{"a": 1}\t', "{'a': 1]}"]
)
def test_a_line_is_one_object(line: str) -> None:
    """Spark takes the first object of the first two, and ignores the rest."""
    assert members_of(line) is None


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_nested_values_keep_what_they_say(value: object) -> None:
    members_read = members_of(json.dumps({"a": [value]}))
    assert isinstance(members_read, Members)
    assert json.loads(text_of(members_read[0][1])) == [value]


def test_a_text_may_be_a_list() -> None:
    assert elements_of(' [1, "x"]') == ["1", "x"]
    assert elements_of(r'["\ud83d"]') == ["\ufffd"]
    assert [elements_of(text) for text in ("x", "[1", "[1] x", "5")] == [None] * 4


@pytest.mark.parametrize(
    ("line", "is_object"),
    [
        ('{"a": %s1%s}' % ("[" * 998, "]" * 998), True),  # noqa: UP031
        ('{"a": %s1%s}' % ("[" * 999, "]" * 999), False),  # noqa: UP031
        ('{"a": [%s]}' % ",".join(["[]"] * 3_000), True),  # noqa: UP031
        (f'{{"a": {"1" * 1_000}}}', True),
        (f'{{"a": {"1" * 1_001}}}', False),
        (f'{{"a": 0.{"1" * 999}}}', True),
        (f'{{"a": 0.{"1" * 1_000}}}', False),
        (f'{{"{"n" * 90_000}": 1}}', True),
        ('{"a": "' + "[" * 5_000 + '"}', True),
    ],
)
def test_limits_of_an_object(line: str, is_object: bool) -> None:
    rows = judged(
        LineJudge(
            Declaration((TableColumn(name="a"),), (), "UTC", {}, {}, None),
            None,
            False,
            TimeRange(None, 0),
            (0, "d", "a"),
        ),
        line,
    )
    assert [row["_reason"] for row in rows.rows.to_pylist()] == [None if is_object else "not a JSON object"]


@given(st.lists(st.text('ab",;\\', max_size=6), min_size=1, max_size=5), st.sampled_from([None, "\\"]))
def test_fields_are_those_that_were_written(fields: list[str], escape: str | None) -> None:
    def quoted(text: str) -> str:
        if escape is None:
            return '"' + text.replace('"', '""') + '"'
        return '"' + text.replace(escape, 2 * escape).replace('"', escape + '"') + '"'

    line = ",".join(map(quoted, fields))
    assert QuotedFields(",", escape=escape).values(line.encode()) == [field.encode() for field in fields]


def test_reasons_and_counts_of_a_block() -> None:
    judge = LineJudge(
        Declaration(COLUMNS, ("z",), "UTC", {}, {"n": (0, 9)}, "ts", ids=("id",), id_bytes=3, late_days=1),
        DelimitedForm(("id", "n", "ts", "z"), ",", header=True),
        False,
        TimeRange(0, 86_400_000_000),
        (7, "1970-01-01", "a.csv"),
    )
    lines = ["id,n,ts,z", "a,5,1970-01-01,q", ",12,1970-01-02", "abcd,x,1970-01-03T00:00:00.5Z,\0", "", 'b"c,+1,,z']
    block = LineBlock("\n".join([*lines, ""]).encode(), 1)
    of_block = judge.judge(block, np.ones(len(block), np.bool_))
    rows = of_block.rows.to_pylist()
    assert [(r["_line"], r["id"], r["n"], r["_reason"]) for r in rows if r["_state"] == 0] == [
        (2, "a", 5, None),
        (6, 'b"c', 1, None),
    ]
    assert rows[0]["_extra"] == [("z", "q")]
    assert {r["_line"]: r["_reason"] for r in rows if r["_state"] == 1} == {
        3: "wrong number of fields",
        4: "n: 'x' is not an int; id: 'abcd' has 4; an id has at most 3 bytes; "
        "ts: '1970-01-03 00:00:00.5' is after the end of the day",
    }
    counts = of_block.counts
    assert (counts.skipped, counts.good, counts.bad, counts.broken) == (2, 2, 2, 1)
    assert counts.readable == {"id": 3, "n": 3, "ts": 3}
    assert counts.unreadable == {"n": [1, "x"]}
    assert counts.reasons == {"wrong number of fields": 1, "n: not an int": 1}


def test_a_line_that_is_too_long_is_bad() -> None:
    judge = LineJudge(Declaration(COLUMNS, (), "UTC", {}, {}, None), None, False, TimeRange(None, 0), (0, "d", "a"))
    of_block = judge.judge(LineBlock(b'{"id": "x...\n', 9, too_long=True), np.ones(1, np.bool_))
    assert [(r["_line"], r["_raw"], r["_reason"]) for r in of_block.rows.to_pylist()] == [(9, '{"id": "x...', TOO_LONG)]


#: Columns by a renamed field and by paths, of types that Arrow's reader leaves to the judge.
WIDE = (
    TableColumn(name="user", path="userId"),
    TableColumn(name="small", type="tinyint"),
    TableColumn(name="price", type="decimal(5,2)"),
    TableColumn(name="wall", type="timestamp_ntz"),
    TableColumn(name="key", type="binary"),
)
NAMES = ("userId", "small", "price", "wall", "key")
VALUES = {
    "user": "u",
    "small": 7,
    "price": Decimal("1.50"),
    "wall": datetime(2026, 3, 1, 5, 6, 7),
    "key": hashlib.sha256(b"ABC").hexdigest(),
}


def values_of(lines: JudgedLines, columns: tuple[TableColumn, ...]) -> list[dict[str, object]]:
    """The rows' values, or the reason of a bad one."""
    return [
        {"reason": row["_reason"]} if row["_state"] == BAD else {c.name: row[c.name] for c in columns}
        for row in lines.rows.to_pylist()
    ]


@pytest.mark.parametrize(
    ("form", "line"),
    [
        (DelimitedForm(NAMES, ","), "u,7,1.500,2026-03-01T05:06:07,QUJD"),
        (DelimitedForm(NAMES, "::"), '"u"::+7::1.5::2026-03-01 05:06:07::QUJD'),
        (DelimitedForm(NAMES, ",", trim=True), ' u ,\t7, "1.50" , 2026-03-01T05:06:07\x01,QU JD '),
        (None, '{"USERID": "u", "small": 7.0, "price": 1.50, "wall": "2026-03-01T05:06:07", "key": "QUJD"}'),
    ],
)
def test_fields_of_every_type_and_form(form: DelimitedForm | None, line: str) -> None:
    judge = LineJudge(Declaration(WIDE, (), "UTC", {}, {}, None), form, False, TimeRange(None, 0), (0, "d", "f"))
    assert values_of(judged(judge, line), WIDE) == [VALUES]
    bad = line.replace("7", "128", 1).replace("2026-03-01", "2026-03-01x")
    ((reason,),) = (row.values() for row in values_of(judged(judge, bad), WIDE))
    assert str(reason).startswith("small: '")
    assert str(reason).endswith("is not a timestamp_ntz")


PATHS = (
    TableColumn(name="a", path="o.a", type="int"),
    TableColumn(name="q", path="o.p.q", required=True),
    TableColumn(name="os", path="params['os'].value"),
    TableColumn(name="ids", path="items[].id", type="array<string>"),
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            '{"o": {"A": 5, "p": "{\\"q\\": \\"x\\"}"}, "items": [{"id": 1}, {}], '
            '"params": [{"key": "os", "value": 1.50}]}',
            {"a": 5, "q": "x", "os": "1.50", "ids": ["1", None]},
        ),
        ('{"o": {"p": {"q": NaN}}}', {"a": None, "q": "NaN", "os": None, "ids": None}),
        ('{"o": "{\\"p\\": {\\"q\\": {\\"z\\": 1.50}}}"}', {"a": None, "q": '{"z":1.5}', "os": None, "ids": None}),
        ('{"o": {"a": 1}}', {"reason": "q: required, but null"}),
        ('{"o": 5}', {"reason": "a: '5' is not an int; q: '5' is not a string"}),
        ('{"o": {"p": {"q": 1, "Q": 2}, "a": 1}}', {"a": 1, "q": "1", "os": None, "ids": None}),
        ('{"o": {"p": {"Q": 1, "qq": 2}, "a": 1, "A": 2}, "items": 7}', {"reason": "ids: '7' is not an array<string>"}),
    ],
)
def test_values_that_paths_lead_to(line: str, expected: dict[str, object]) -> None:
    judge = LineJudge(Declaration(PATHS, (), "UTC", {}, {}, None), None, False, TimeRange(None, 0), (0, "d", "f"))
    assert values_of(judged(judge, line), PATHS) == [expected]


def test_a_record_over_several_lines_stands_on_its_first(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'id,n\n"two\r\nlines",5\r\nplain,6\n"x\n",8\n"never closed,7\n')
    declaration = Declaration(COLUMNS[:2], (), "UTC", {}, {}, None)
    form = DelimitedForm(("id", "n"), ",", header=True, multiline=True)
    judge = LineJudge(declaration, form, False, TimeRange(None, 0), (0, "d", "f"))
    numbered = []
    for block in record_blocks(Part(0, local(tmp_path / "a.csv")), form.fields):
        read = read_block(reader_of_lines(form, declaration, False), block, declaration, TimeRange(None, 0))
        numbered += zip(read.lines.tolist(), read.columns[0].to_pylist(), strict=True)
        rows = judge.judge(block, read.unsure).rows.to_pylist()
        numbered += [(row["_line"], row["_reason"] or row["id"]) for row in rows]
    assert sorted(numbered) == [(2, "two\r\nlines"), (4, "plain"), (5, "x\n"), (7, UNCLOSED)]
