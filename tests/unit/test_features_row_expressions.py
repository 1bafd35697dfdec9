"""Expressions of `lambda` that Arrow evaluates, their values, and those that Spark must evaluate."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from headrace.errors import UserError
from headrace.features.table_ops.base import TableSchema
from headrace.features.table_ops.row_expression import parse
from headrace.features.table_ops.rows import Filter, Lambda
from headrace.features.types import ValueType
from tests.tables_support import TYPES, as_table, number, prepare

SCHEMA = {n: ValueType(t.removeprefix("array<").removesuffix(">"), t.startswith("array<")) for n, t in TYPES.items()}  # type: ignore[arg-type]
ROWS = number(
    [
        {"n": 3, "big": 2**40, "price": 0.1, "item": "é", "flag": True, "click": 1},
        {"n": -4, "big": None, "price": float("nan"), "item": "a", "flag": False, "click": 0},
        {"n": None, "big": 7, "price": None, "item": None, "flag": None, "click": None},
    ]
)


def value(expression: str, type_: str) -> list[Any]:
    parsed = parse(expression, SCHEMA, ValueType(type_))  # type: ignore[arg-type]
    assert parsed is not None, expression
    table = as_table(ROWS)
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
        rows(as_table(ROWS))


def test_only_wanted_columns_are_computed() -> None:
    columns = {"a": {"expression": "n + 1", "type": "int"}, "b": {"expression": "price * 2.0", "type": "double"}}
    (step,) = prepare({"lambda": {"add": columns}}).steps
    assert step.op.reads({"a", "item"}, step.schema) == {"n", "item"}
    rows = step.op.arrow_rows(step.schema)
    assert rows is not None
    assert rows(pa.table({"n": pa.array([1, None], pa.int32())})).to_pydict() == {"n": [1, None], "a": [2, None]}
