"""Conditions on a row, over Arrow tables."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.table_ops.predicate import Predicate, _Name, _Node, _Value
from tests.arrow_table_ops.windows import nan_to_null, one


def _arrow(node: _Node, column: Callable[[str], pa.Array]) -> pa.Array:
    if node.does in ("and", "or"):
        a, b = (_arrow(x, column) for x in node.of)
        return pc.and_kleene(a, b) if node.does == "and" else pc.or_kleene(a, b)
    if node.does == "not":
        return pc.invert(_arrow(node.of[0], column))
    if node.does in ("null", "true"):
        x = column(node.of[0].column)
        return pc.is_null(x) if node.does == "null" else x
    left, right, kind = node.of
    types = {
        "bigint": pa.int64(),
        "double": pa.float64(),
        "string": pa.string(),
        "boolean": pa.bool_(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "date": pa.date32(),
    }

    def value(x: _Name | _Value) -> Any:
        if isinstance(x, _Name):
            return column(x.column).cast(types[kind], safe=False)
        if kind == "timestamp":
            return pa.scalar(datetime.fromisoformat(str(x.value)), types[kind])
        if kind == "date":
            return pa.scalar(date.fromisoformat(str(x.value)), types[kind])
        return pa.scalar(float(x.value) if kind == "double" else x.value, types[kind])

    return getattr(pc, node.does)(value(left), value(right))


def predicate(condition: Predicate, table: pa.Table) -> pa.Array:
    """bool [n], never null."""
    return pc.fill_null(_arrow(condition._root, lambda name: nan_to_null(one(table, name))), False)
