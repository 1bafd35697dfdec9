"""Plain JSON lines by the C++ parser, against Python's `json`, and the reader of blocks with and without it."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import Table
from headrace.lake.landing import convert
from headrace.lake.landing.arrow_rows import declaration_of
from headrace.lake.landing.blocks import LineBlock, TimeRange, read_block
from headrace.lake.landing.json_lines import JsonReader, parse_plain
from tests.ingest_lines import COLUMNS, TABLE, json_lines, source

KINDS = {"s": pa.string(), "é": pa.string(), "i": pa.int64(), "d": pa.float64(), "b": pa.bool_()}
SCALARS = [c for c in COLUMNS if not str(c["type"]).startswith("array")]

pytestmark = pytest.mark.skipif(convert.lines_library() is None, reason="make native")

PLAIN = {
    "s": st.text(),
    "é": st.text('a\\"/\n\t\x01é€😀', max_size=9),
    "i": st.integers(-(2**63), 2**63 - 1),
    "d": st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(10**20), 10**20)),
    "b": st.booleans(),
}
_NOT_PLAIN = r"""
{ | } | [] | {}{} | {} x | {"s"} | {"s":} | {"s": "a" | {"s": "a} | {"s": "a",} | {,"s": "a"} | {"s": 1} | {"s": true}
{"s": ["a"]} | {"s": "a" "b"} | {"s": "\x"} | {"s": "\u12g4"} | {"s": "\ud83d"} | {"s": "\ude00"}
{"s": "\ud83d\u0041"}
{"s": "a", "s": "b"} | {"\u0073": "a"} | {"i": 1.0} | {"i": 1e3} | {"i": "1"} | {"i": 01} | {"i": +1} | {"i": -}
{"i": -0}
{"i": 1x} | {"i": 9223372036854775808} | {"i": nul} | {"d": .5} | {"d": 5.} | {"d": 1e} | {"d": NaN} | {"d": 1e999}
{"b": 1}
{"b": True} | {"x": [1, 2} | {"x": [1 2]} | {"x": {"a" 1}} | {"x": {1: 2}} | {"x": tru}
"""
NOT_PLAIN = [line for text in _NOT_PLAIN.strip().splitlines() for line in text.split(" | ")]
ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=4), st.floats(allow_nan=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def objects(draw: st.DrawFn) -> dict[str, Any]:
    """Some of the keys in some order, a null now and then, and keys that nobody asked for."""
    fields = {k: draw(st.one_of(st.none(), v)) for k, v in PLAIN.items() if draw(st.integers(0, 3))}
    fields |= draw(st.dictionaries(st.text("xyz", min_size=1, max_size=3), ANY, max_size=2))
    return {k: fields[k] for k in draw(st.permutations(sorted(fields)))}


def parsed(lines: list[bytes], pass_others: bool = True) -> tuple[list[bool], list[dict[str, Any]], set[str]]:
    offsets = np.cumsum([0, *map(len, lines)])
    result = parse_plain(np.frombuffer(b"".join(lines), np.uint8), offsets, KINDS, pass_others)
    assert result is not None
    columns = result.columns
    for column in columns.values():
        column.validate(full=True)
    return result.taken.tolist(), pa.table(columns).to_pylist(), result.undeclared


@given(st.lists(objects(), min_size=1, max_size=12), st.booleans(), st.sampled_from([(", ", ": "), (",", ":")]))
def test_objects_are_those_of_json(rows: list[dict[str, Any]], ascii_: bool, signs: tuple[str, str]) -> None:
    """Numbers to the last bit."""
    finite = [json.dumps(r, ensure_ascii=ascii_, separators=signs) for r in rows]
    texts = [t.encode("utf-8", "surrogatepass") for t in finite]
    lines = [t + (b"\r\n" if i % 2 else b"\n") for i, t in enumerate(texts)]
    taken, parsed_rows, undeclared = parsed(lines)
    plain = [json.loads(t) for t, good in zip(finite, taken, strict=True) if good]
    for row, expected in zip(parsed_rows, plain, strict=True):
        number = expected.get("d")
        assert row == {k: expected.get(k) for k in KINDS} | {"d": None if number is None else float(number)}
        if number is not None:
            assert math.copysign(1, row["d"]) == math.copysign(1, number)
    assert undeclared == {k for r in plain for k in r} - KINDS.keys()
    # Left are those alone that are not written plainly, or not finite.
    for text, row, good in zip(finite, rows, taken, strict=True):
        odd = "Infinity" in text or "\\u00e9" in text or any("\\" in json.dumps(k) for k in row)
        assert good or odd, text


@pytest.mark.parametrize("line", ["", *NOT_PLAIN, '{"s": "a\tb"}', '{"x": ' + "[" * 80 + "]" * 80 + "}"])
def test_what_is_not_plain_is_left_and_harms_no_neighbour(line: str) -> None:
    good_line = json.dumps({"s": "a", "é": "b", "i": 1, "d": 0.5, "b": True}, ensure_ascii=False)
    taken, rows, undeclared = parsed([f"{text}\n".encode() for text in (good_line, line, good_line, line)])
    assert taken == [True, False, True, False]
    assert rows == [json.loads(good_line)] * 2
    assert undeclared == set()


def test_other_keys_may_be_refused() -> None:
    assert parsed([b'{"s": "a", "x": 1}\n', b'{"s": "b"}\n'], pass_others=False)[:1] == ([False, True],)
    assert parse_plain(np.zeros(0, np.uint8), np.zeros(1, np.int64), {"l": pa.list_(pa.int64())}, True) is None


def remove_library(patch: pytest.MonkeyPatch) -> None:
    """Have lines read as they are where `make native` has built nothing."""
    for module in ("blocks", "convert", "json_lines"):
        patch.setattr(f"headrace.lake.landing.{module}.lines_library", lambda: None)


@given(st.lists(json_lines(), min_size=1, max_size=40), st.booleans())
def test_a_block_is_read_as_without_the_library(lines: list[str], accept: bool) -> None:
    """The same rows, but for lines at which Arrow's parser stops or gives up."""
    table = Table.model_validate(TABLE | {"columns": SCALARS, "expectations": {"ranges": {"i": [-1000, 2000]}}})
    declaration = declaration_of(source(format="jsonl"), table, ())
    block = LineBlock(("\n".join(lines) + "\n").encode(), 1)
    results = []
    for has_library in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not has_library:
                remove_library(patch)
            reader = JsonReader(declaration, accept)
            read = read_block(reader, block, declaration, TimeRange(None, 2**62))
            rows = pa.table([pa.array(read.lines), *read.columns], names=["line", *declaration.names]).to_pylist()
            results.append({row["line"]: repr(row) for row in rows})
            assert (len(read.lines) + read.skipped + read.unsure.sum()) == len(block)
    assert results[1].items() <= results[0].items()


@given(
    st.lists(
        st.one_of(
            st.none(),
            st.text("0123456789-T:Z+. ", max_size=32),
            st.datetimes().map(str),
            st.from_regex(
                r"\A(19|20|98|00)[0-9][0-9]-[01][0-9]-[0-3][0-9]"
                r"([T ][0-2][0-9]:[0-6][0-9](:[0-6][0-9]([.][0-9]{1,7})?)?)?"
                r"(Z|[+-][01][0-9]:[0-6][0-9])?\Z"
            ),
        ),
        max_size=20,
    )
)
def test_times_are_as_without_the_library(texts: list[str | None]) -> None:
    column = pa.array(["x", *texts], pa.string())[1:]  # an array with an offset
    with_library = convert.timestamps(column, "Europe/Berlin")
    with pytest.MonkeyPatch.context() as patch:
        remove_library(patch)
        assert with_library.equals(convert.timestamps(column, "Europe/Berlin"))


@pytest.mark.parametrize("accept", [False, True])
@pytest.mark.parametrize("has_library", [True, False])
@given(
    rows=st.lists(
        st.dictionaries(st.sampled_from(["n", "N", "s", "S", "x"]), st.integers(0, 9), max_size=4), min_size=1
    )
)
def test_keys_match_without_case(rows: list[dict[str, int]], accept: bool, has_library: bool) -> None:
    """The parser reads what the rule says, and leaves a row where the block does not tell which key it has."""
    table = Table.model_validate({"columns": [{"name": "n", "type": "bigint"}, {"name": "S", "type": "bigint"}]})
    declaration = declaration_of(source(format="jsonl"), table, ())
    block = LineBlock("".join(f"{json.dumps(row)}\n" for row in rows).encode(), 1)
    with pytest.MonkeyPatch.context() as patch:
        if not has_library:
            remove_library(patch)
        reader = JsonReader(declaration, accept)
        read = read_block(reader, block, declaration, TimeRange(None, 2**62))
    for line, *values in zip(read.lines.tolist(), *(c.to_pylist() for c in read.columns[:2]), strict=True):
        row = rows[line - 1]
        assert values == [row.get("n", row.get("N")), row.get("S", row.get("s"))]
    keys = {key for row in rows for key in row}
    if not ({"n", "N"} <= keys or {"s", "S"} <= keys or (accept and "x" in keys)):
        assert not read.unsure.any()
        assert reader.seen.present == {name for name in ("n", "S") if {name.lower(), name.upper()} & keys}
        assert reader.seen.extra == keys & {"x"}
