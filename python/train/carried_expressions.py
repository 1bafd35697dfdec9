"""Expressions over a dataset's carried columns, in the words of the table operator `lambda`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from headrace.errors import UserError
from headrace.features.table_ops.row_expression import RowExpression, parse
from headrace.features.types import ValueType
from headrace.schema import DatasetSchema

_ELEMENTS: dict[str, Any] = {
    "int32": "int",
    "int64": "bigint",
    "float32": "float",
    "float64": "double",
    "string": "string",
    "bool": "boolean",
}
_ARROW = {
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bool": pa.bool_(),
}


def parse_carried(text: str, schema: DatasetSchema, result: str) -> RowExpression | None:
    """An expression over carried columns, its values of type `result` (`string`, `boolean`); None where it is none."""
    return parse(text, carried_types(schema), ValueType(result))  # type: ignore[arg-type]


def parse_condition(text: str, schema: DatasetSchema, where: str) -> RowExpression:
    """A condition over carried columns.

    Args:
        where: the key of the spec that it stands at.

    Raises:
        UserError: a column that is not carried, or an expression that is not known here, or is no condition.
    """
    found = parse_carried(text, schema, "boolean")
    if found is None:
        known = ", ".join(carried_types(schema)) or "there are none"
        raise UserError(
            f"{where}: '{text}' is no condition over the carried columns ({known}); "
            f"write one over columns of features.carried such as `age < 30` (headrace reference: lambda)"
        )
    return found


def carried_types(schema: DatasetSchema) -> dict[str, ValueType]:
    """The columns that an expression may look at, by their names in the lake's table."""
    carried = schema.carried_columns.items()
    return {name: ValueType(_ELEMENTS[f.dtype]) for name, f in carried if f.dtype in _ELEMENTS}


def columns_of(expressions: Collection[RowExpression]) -> tuple[str, ...]:
    """The columns of the lake's table that expressions look at."""
    return tuple(dict.fromkeys(c for e in expressions for c in e.columns))


def evaluate(
    expression: RowExpression, carried: Mapping[str, npt.NDArray[Any]], schema: DatasetSchema, where: str
) -> pa.Array | pa.ChunkedArray:
    """An expression's value of each row, [n].

    Args:
        carried: the columns by their names in the dataset, [n].
        where: the key of the spec that it stands at.

    Raises:
        UserError: an overflow or a division by zero.
    """
    features = schema.carried_columns

    def column(name: str) -> pa.Array:
        # NumPy has integers with nulls as floats, whose NaN is null here.
        return pa.array(carried[features[name].name], from_pandas=True).cast(_ARROW[features[name].dtype])

    try:
        found = expression.arrow(column)
    except pa.ArrowInvalid as e:
        raise UserError(f"{where}: {e}") from None
    if isinstance(found, pa.Scalar):
        return pa.array([found.as_py()] * len(next(iter(carried.values()))), found.type)
    return found
