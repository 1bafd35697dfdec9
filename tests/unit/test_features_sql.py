"""Conditions and expressions of SQL: their tree, rows of Arrow, and texts, against plain Python."""

from __future__ import annotations

import math
import sqlite3
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.features.table_ops.base import TableSchema
from headrace.features.table_ops.predicate import Predicate
from headrace.features.table_ops.row_expression import parse
from headrace.features.table_ops.rows import Filter, Lambda
from headrace.features.table_ops.sql import (
    Arithmetic,
    Between,
    BooleanLiteral,
    Call,
    Case,
    Cast,
    ColumnName,
    Comparison,
    Expression,
    In,
    IsNull,
    Logic,
    Not,
    NumberLiteral,
    Parentheses,
    Signed,
    SqlSyntaxError,
    TextLiteral,
    parse_sql,
)
from headrace.features.types import ValueType, declared
from tests.arrow_table_ops import by_arrow
from tests.tables_support import COLUMNS, DAY, NOWHERE, ROWS, START, TYPES, Row, as_table, by_identity, number, prepare

A, B, C = (ColumnName(name, False) for name in "abc")


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a or b and not c", Logic("or", A, Logic("and", B, Not(C)))),
        ("a + b * c", Arithmetic("+", A, Arithmetic("*", B, C))),
        ("(a + b) / -c", Arithmetic("/", Parentheses(Arithmetic("+", A, B)), Signed("-", C))),
        ("a - b - c", Arithmetic("-", Arithmetic("-", A, B), C)),
        ("a -1", Arithmetic("-", A, NumberLiteral("1"))),
        ("a = -1.5e3", Comparison("=", A, NumberLiteral("-1.5e3"))),
        ("a <> - 1", Comparison("!=", A, Signed("-", NumberLiteral("1")))),
        ("a not between 1 and 2 or b", Logic("or", Not(Between(A, NumberLiteral("1"), NumberLiteral("2"))), B)),
        ("a in ('it''s', 'x')", In(A, (TextLiteral("it's"), TextLiteral("x")))),
        ("A IS NOT NULL", Not(IsNull(ColumnName("A", False)))),
        ("`a``b` == true", Comparison("=", ColumnName("a`b", True), BooleanLiteral(True))),
        ("case when a then b else c end", Case((A,), (B, C))),
        ("case = 1", Comparison("=", ColumnName("case", False), NumberLiteral("1"))),
        ("cast(a as bigint)", Cast(A, "bigint")),
        ("if(a, b, c)", Call("if", (A, B, C))),
        ("1and a", Logic("and", NumberLiteral("1", is_ambiguous=True), A)),
    ],
)
def test_tree(text: str, tree: Expression) -> None:
    assert parse_sql(text) == tree


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a ? b", "'\\? b' is not understood"),
        ("a b", "'b' is not expected here"),
        ("a =", "ends too early"),
        ("", "it is empty"),
        ("(a", "a '\\)' is missing"),
        ("a is 1", "is null"),
        ("a between 1", "between LOW and HIGH"),
        ("a in 1", "in \\(VALUE"),
        ("a not 1", "must be followed by"),
        ("a <=> b", "'=' is not expected here"),
        ("case when a then b", "`end`"),
        ("cast(a bigint)", "cast\\(VALUE as TYPE"),
    ],
)
def test_text_that_is_no_expression(text: str, message: str) -> None:
    with pytest.raises(SqlSyntaxError, match=message):
        parse_sql(text)


@settings(max_examples=40, deadline=None)
@given(ROWS, st.sampled_from(["any", "all"]))
def test_dropna_and_rename(rows: list[Row], how: str) -> None:
    rows = number(rows)
    p = prepare({"dropna": {"subset": ["price", "tags"], "how": how}}, {"rename": {"to": {"n": "big", "big": "n"}}})
    actual = by_identity(by_arrow(p, as_table(rows), NOWHERE))
    join = any if how == "any" else all
    remaining = [r for r in rows if not join([r["price"] is None or math.isnan(r["price"]), not r["tags"]])]
    assert {k: (r["n"], r["big"]) for k, r in actual.items()} == {
        (r["_source_file"], r["_source_line"]): (r["big"], r["n"]) for r in remaining
    }


# Conditions, against SQLite: another implementation of SQL's logic.

_NUMBERS = st.sampled_from(["n", "big", "price", "click", "0", "1", "-2", "0.5", "4611686018427387904"])
_TEXTS = st.sampled_from(["item", "'a'", "'é'", "'it''s'", "''"])
_SIGNS = st.sampled_from(["=", "==", "!=", "<>", "<", "<=", ">", ">="])


def _has_column(parts: tuple[str, ...]) -> bool:
    return any(p in TYPES for p in parts)


_LEAVES = st.one_of(
    st.tuples(_NUMBERS, _SIGNS, _NUMBERS).filter(_has_column).map(" ".join),
    st.tuples(_TEXTS, _SIGNS, _TEXTS).filter(_has_column).map(" ".join),
    st.tuples(st.sampled_from(["n", "item", "price", "tags"]), st.sampled_from(["is null", "is not null"])).map(
        " ".join
    ),
    st.sampled_from(
        [
            "n in (1, 2, -3)",
            "item not in ('a', '')",
            "n between -1 and 2",
            "price not between 0.0 and 1",
            "flag",
            "flag = true",
            "NOT flag",
        ]
    ),
)
_CONDITIONS = st.recursive(
    _LEAVES,
    lambda c: st.one_of(
        st.tuples(c, st.sampled_from([" and ", " OR "]), c).map("".join), c.map("not ({})".format), c.map("({})".format)
    ),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(ROWS, _CONDITIONS)
def test_conditions_are_sql(rows: list[Row], condition: str) -> None:
    rows = number(rows)
    with sqlite3.connect(":memory:") as db:
        db.execute("create table t (place text, n, big, price real, click, item text, flag, tags)")
        for r in rows:
            place = f"{r['_source_file']}:{r['_source_line']}"
            price = None if r["price"] is None or math.isnan(r["price"]) else r["price"]
            tags = None if r["tags"] is None else str(r["tags"])
            values = (place, r["n"], r["big"], price, r["click"], r["item"], r["flag"], tags)
            db.execute("insert into t values (?, ?, ?, ?, ?, ?, ?, ?)", values)
        expected = {place for (place,) in db.execute(f"select place from t where {condition}")}
    db.close()
    actual = by_arrow(prepare({"filter": {"where": condition}}), as_table(rows), NOWHERE)
    assert {f"{f}:{n}" for f, n in by_identity(actual)} == expected


def test_conditions_on_times_and_odd_names() -> None:
    rows = number([{"ts": START, "day": START.date(), "odd.na`me": 1.5}, {"ts": START + DAY, "day": None, "n": 2}])
    columns = {c.name: as_table(rows).column(c.name).combine_chunks() for c in COLUMNS}
    for condition, expected in (
        ("ts >= '2026-01-02'", [1]),
        ("ts < '2026-01-02 00:00:00.000001' and ts > '2026-01-01T00:00:00+00:00'", [1]),
        ("day = '2026-01-01'", [0]),
        ("`odd.na``me` > 1", [0]),
        ("day <> '2025-12-31' or n=2", [0, 1]),
    ):
        keep = Predicate(condition, {c.name: declared(c) for c in COLUMNS}).arrow(columns.__getitem__).to_pylist()
        assert [i for i, k in enumerate(keep) if k] == expected, condition


TEXT_TYPES = {"a": ValueType("string"), "b": ValueType("string")}
LEFT = ["b", None, "a", "é", "", "ab", "b", None, "a"]
RIGHT = ["a", "b", "a", "z", None, "ab", "é", None, ""]


@pytest.mark.parametrize("sign", ["=", "!=", "<", "<=", ">", ">="])
def test_dictionaries_compare_as_their_texts(sign: str) -> None:
    plain = {"a": pa.array(LEFT), "b": pa.array(RIGHT)}
    # With a null among the texts, too, and texts that no row has.
    texts = pa.array(["unused", None, *sorted({t for t in RIGHT if t is not None}, reverse=True)])
    places = pa.array(
        [None if t is None and i else texts.to_pylist().index(t) for i, t in enumerate(RIGHT)], pa.int32()
    )
    encoded = {"a": plain["a"].dictionary_encode(), "b": pa.DictionaryArray.from_arrays(places, texts)}
    assert encoded["b"].to_pylist() == RIGHT
    for text in (f"a {sign} b", f"a {sign} 'ab'", f"'ab' {sign} b", f"not b {sign} 'ab'", f"b {sign} a"):
        condition = Predicate(text, TEXT_TYPES)
        expected = condition.arrow(plain.__getitem__)
        assert condition.arrow(encoded.__getitem__).equals(expected), text
        assert condition.arrow({**plain, "b": encoded["b"]}.__getitem__).equals(expected), text


def test_more_text_than_an_array_holds() -> None:
    size, rows = 32 << 20, 66  # of which an array of texts has 2 GiB at most
    texts = pa.array(["x" * size, "short"])
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows + [1, None], pa.int32()), texts)
    for text, count in (("a = 'short'", 1), ("a in ('short', 'x')", 1), ("a > 'x'", rows), ("a = a", rows + 1)):
        assert pc.sum(Predicate(text, TEXT_TYPES).arrow(lambda name: column)).as_py() == count


SCHEMA = {n: ValueType(t.removeprefix("array<").removesuffix(">"), t.startswith("array<")) for n, t in TYPES.items()}  # type: ignore[arg-type]
EXPRESSION_ROWS = number(
    [
        {"n": 3, "big": 2**40, "price": 0.1, "item": "é", "flag": True, "click": 1},
        {"n": -4, "big": None, "price": float("nan"), "item": "a", "flag": False, "click": 0},
        {"n": None, "big": 7, "price": None, "item": None, "flag": None, "click": None},
    ]
)


def value(expression: str, type_: str) -> list[Any]:
    parsed = parse(expression, SCHEMA, ValueType(type_))  # type: ignore[arg-type]
    assert parsed is not None, expression
    table = as_table(EXPRESSION_ROWS)
    values: list[Any] = parsed.arrow(lambda name: table.column(name).combine_chunks()).to_pylist()
    return values


@pytest.mark.parametrize(
    ("expression", "type_", "expected"),
    [
        ("n + big", "bigint", [2**40 + 3, None, None]),
        ("N * 2 - -1", "int", [7, -7, None]),
        ("n / 2", "double", [1.5, -2.0, None]),
        ("0.3 = price + 0.2", "boolean", [0.3 == 0.1 + 0.2, False, None]),
        ("price > 1000.5", "boolean", [False, True, None]),  # NaN is above all numbers
        ("price = price", "boolean", [True, True, None]),
        ("item = 'é' or flag", "int", [1, 0, None]),
        ("not flag and n is null", "boolean", [False, False, None]),
        ("n in (1, 3, big)", "boolean", [True, None, None]),
        ("n not between -4 and 0", "boolean", [True, False, None]),
        ("if(flag, 'x', item)", "string", ["x", "a", None]),
        ("case when n > 0 then big when flag then 1 end", "double", [2.0**40, None, None]),
        ("coalesce(n, 0) * 1", "int", [3, -4, 0]),
        ("cast(n as string)", "string", ["3", "-4", None]),
        ("`odd.na``me` is null", "boolean", [True, True, True]),
        ("concat_ws('|', item, 'x', cast(n as string))", "string", ["é|x|3", "a|x|-4", "x"]),
        ("concat_ws('', item)", "string", ["é", "a", ""]),
        ("concat_ws(', ', item, item)", "string", ["é, é", "a, a", ""]),
        ("concat(item)", "string", ["é", "a", None]),
        ("concat(item, '-', item)", "string", ["é-é", "a-a", None]),
    ],
)
def test_values(expression: str, type_: str, expected: list[Any]) -> None:
    assert value(expression, type_) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "upper(item)",
        "n + price --1",
        "n /* 1 */ + 1",
        "n > 0.5",  # compared as decimals
        "n + 0.5",
        "item = 1",
        "item || 'x'",
        "'it\\'s' = item",
        "'it''s' = item",
        '"a" = item',
        "ts > '2026-01-01'",
        "cast(price as int)",
        "cast(item as int)",
        "n % 2",
        "flag < true",
        "n = 1 = true",
        "size(tags)",
        "concat_ws('|', tags)",
        "concat_ws('|', item, n)",
        "concat_ws('|')",
        "concat_ws(item, 'x')",
        "tags[0]",
        "`odd.na``me` + 1",  # of float
        "n = 2147483648",
        "1e3 + price",
        "n > 1 and n / n > 0",  # Spark divides only where it must
        "case when n <> 0 then 1 / n end",
        "n is true",
        "1 + 1",
        "nope + 1",
        "date '2026-01-01' = day",
        "",
    ],
)
def test_what_is_sparks(expression: str) -> None:
    assert parse(expression, SCHEMA, ValueType("double")) is None


def test_conditions_on_decimals_are_sparks() -> None:
    schema = TableSchema({"y": ValueType("int"), "d": ValueType("decimal", precision=9, scale=2)}, "y")
    assert Filter(where="d > 1").arrow_rows(schema) is None
    assert Filter(where="y > 0").arrow_rows(schema) is not None
    assert parse("d + 1", schema.types, ValueType("double")) is None


def test_columns_that_are_left_out_leave_all_to_spark() -> None:
    columns = {"a": {"expression": "n + 1", "type": "int"}, "b": {"expression": "upper(item)", "type": "string"}}
    (step,) = prepare({"lambda": {"add": columns}}).steps
    assert step.op.arrow_rows(step.schema) is None


@pytest.mark.parametrize(
    ("expression", "fault"),
    [("big * 9223372036854775807", "overflow"), ("1 / (n - 3)", "divide by zero"), ("n / 0", "divide by zero")],
)
def test_errors_of_spark_are_errors(expression: str, fault: str) -> None:
    (step,) = prepare({"lambda": {"add": {"x": {"expression": expression, "type": "double"}}}}).steps
    assert isinstance(step.op, Lambda)
    rows = step.op.arrow_rows(step.schema)
    assert rows is not None
    with pytest.raises(UserError, match=rf"features\.prepare \(lambda\): 'x': .*{fault}"):
        rows(as_table(EXPRESSION_ROWS))


def test_only_wanted_columns_are_computed() -> None:
    columns = {"a": {"expression": "n + 1", "type": "int"}, "b": {"expression": "price * 2.0", "type": "double"}}
    (step,) = prepare({"lambda": {"add": columns}}).steps
    assert step.op.reads({"a", "item"}, step.schema) == {"n", "item"}
    rows = step.op.arrow_rows(step.schema)
    assert rows is not None
    assert rows(pa.table({"n": pa.array([1, None], pa.int32())})).to_pydict() == {"n": [1, None], "a": [2, None]}
