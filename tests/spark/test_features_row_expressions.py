"""Expressions that Arrow evaluates, against Spark's: values to the bit, and what is an error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.errors import ArithmeticException
from pyspark.sql import SparkSession

from headrace.features.table_ops.base import SparkTableContext
from headrace.features.table_ops.row_expression import parse
from headrace.features.types import ValueType
from tests.spark.test_features_tables import as_frame
from tests.tables_support import ROW_OF_CLICKS, START, Row, as_table, assert_rows, external, number, prepare

# Spark's own bodies are what is compared.
pytestmark = pytest.mark.usefixtures("generated_code")

# Expressions that Arrow evaluates, by type of the result; none overflows with the rows below, and none divides by zero.
_INTEGERS = st.recursive(
    st.sampled_from(["n", "big", "click", "1", "-3", "0", "5000000000"]),
    lambda x: st.one_of(
        st.tuples(x, st.sampled_from([" + ", " - "]), x).map("".join),
        x.map("({}) * 2".format),
        x.map("-({})".format),
        st.tuples(st.sampled_from(["coalesce(click, {})", "if(flag, n, {})", "case when flag then {} else big end"]), x)
        .map(lambda t: t[0].format(t[1]))
        .filter(lambda text: not set("+*") & set(text) and " - " not in text and "-(" not in text),
    ),
    max_leaves=4,
)
_DOUBLES = st.recursive(
    st.sampled_from(["price", "price", "price / 3", "n / 7", "big / 3", "cast(`odd.na``me` as double)", "n / big"]),
    lambda x: st.one_of(
        st.tuples(x, st.sampled_from([" + ", " - ", " * "]), x).map("({0[0]}){0[1]}({0[2]})".format),
        x.map("({}) - 0.1".format),
        x.map("({}) / 10".format),
        x.map("({}) + click".format),
    ),
    max_leaves=4,
)
_LOGIC = st.recursive(
    st.one_of(
        st.tuples(
            st.sampled_from(["price", "n", "big", "price * 3", "price - price"]),
            st.sampled_from([" = ", " == ", " <> ", " != ", " < ", " <= ", " > ", " >= "]),
            st.sampled_from(["price", "n", "click", "big", "price / 2"]),
        ).map("".join),
        st.sampled_from(["item = 'a'", "item < 'é'", "item in ('a', 'é')", "flag", "flag = false", "n is null"]),
        st.sampled_from(
            ["n not in (1, 2, big)", "price between 0.5 and 2", "item is not null", "ts >= ts", "day < day"]
        ),
    ),
    lambda x: st.one_of(
        st.tuples(x, st.sampled_from([" and ", " OR "]), x).map("({0[0]}){0[1]}({0[2]})".format),
        x.map("not ({})".format),
        x.map("if({}, flag, n > 1)".format),
    ),
    max_leaves=4,
)
_TEXTS = st.recursive(
    st.sampled_from(["item", "item", "'|'", "cast(n as string)", "if(flag, item, 'é')", "cast(flag as string)"]),
    lambda x: st.one_of(
        st.lists(x, min_size=1, max_size=3).map(", ".join).map("concat({})".format),
        st.lists(x, min_size=2, max_size=4).map(", ".join).map("concat_ws({})".format),
    ),
    max_leaves=6,
)
_EXPRESSIONS = st.one_of(
    st.tuples(_TEXTS, st.just("string")),
    st.tuples(_INTEGERS, st.sampled_from(["bigint", "double", "float", "string"])),
    st.tuples(_DOUBLES, st.sampled_from(["double", "float"])),
    st.tuples(_LOGIC, st.sampled_from(["boolean", "int", "double", "string"])),
).filter(lambda expressions: re.search("[a-z]", expressions[0]) is not None)


@settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.lists(ROW_OF_CLICKS, min_size=60, max_size=60), expressions=st.lists(_EXPRESSIONS, min_size=80, max_size=80)
)
def test_expressions_of_arrow_are_sparks(
    spark: SparkSession, rows: list[Row], expressions: list[tuple[str, str]]
) -> None:
    special = [float("nan"), float("inf"), -0.0, 1e308, None]
    rows = number([r | {"price": special[i]} if i < len(special) else r for i, r in enumerate(rows)])
    rows = [r | {"big": None if r.get("big") is None else r["big"] % 2**40 + 1} for r in rows]
    add = {f"x{i}": {"expression": e, "type": t} for i, (e, t) in enumerate(expressions)}
    (step,) = prepare({"lambda": {"add": add}}, label="nothing").steps
    by_arrow = step.op.arrow_rows(step.schema)
    assert by_arrow is not None, [e for e, t in expressions if parse(e, step.schema.types, ValueType(t)) is None]  # type: ignore[arg-type]
    table = as_table(rows)
    frame = as_frame(spark, table)
    by_spark = step.op.spark(frame, SparkTableContext(step.schema, lambda read: frame, lambda read: frame)).toArrow()
    assert_rows(by_spark, by_arrow(table))


@pytest.mark.parametrize("expression", ["big * 9223372036854775807", "1 / (n - 3)"])
def test_what_is_an_error_of_arrows_is_one_of_sparks(spark: SparkSession, tmp_path: Path, expression: str) -> None:
    p = prepare({"lambda": {"add": {"x": {"expression": expression, "type": "double"}}}})
    rows = number([{"n": 3, "big": 2, "ts": START}])
    with pytest.raises(ArithmeticException):
        p.spark(as_frame(spark, as_table(rows)), external(tmp_path)).toArrow()
