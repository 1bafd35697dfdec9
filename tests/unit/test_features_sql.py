"""Trees of the parser of SQL expressions, and the places of its refusals."""

from __future__ import annotations

import pytest

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
