"""Types of a chain: facts of a column before any data is seen, and operators by name.

An operator of a spec is built by name and parameters, with faults in words. Three kinds of names: those of headrace's
own operators; `module:Class`, a class of the user's; and the name of an entry point, by which an installed package
offers one (group `headrace.operators`, or `headrace.table_operators`):

    [project.entry-points."headrace.operators"]
    halve = "my_package.operators:Halve"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import pyarrow as pa
from pydantic import BaseModel, ValidationError

from headrace.config.schema import TableColumn, decimal_digits
from headrace.errors import UserError
from headrace.plugins import Seam, faults_of

#: `code` is the output of an operator that makes embedding rows of values: int32, 0 for null. `id` is a raw id, which
#: finds its row while the model is trained: int64, 0 for null. A `decimal` is one only up to the beginning of a chain:
#: there it becomes a double or text (headrace.features.workflow.workflow).
Element = Literal["string", "int", "bigint", "float", "double", "decimal", "boolean", "timestamp", "date", "code", "id"]

_ARROW: dict[str, pa.DataType] = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "date": pa.date32(),
    "code": pa.int32(),
    "id": pa.int64(),
}

#: Declared types that features see as another one, which has room for all their values: a local time as if it were of
#: UTC, binary as the text of its hash.
_SEEN_AS: dict[str, Element] = {"tinyint": "int", "smallint": "int", "timestamp_ntz": "timestamp", "binary": "string"}


class OpError(ValueError):
    """A column that an operator cannot take; the workflow adds where, and makes it a UserError."""


@dataclass(frozen=True)
class ValueType:
    """The type of a column between two operators.

    In either engine a value is null or not: NaN becomes null where a column enters the workflow, and a null list an
    empty one; null elements of lists stay.
    """

    element: Element
    is_list: bool = False
    #: The fixed number of elements that `pad` gave a list.
    length: int | None = None
    #: `code` only: the vocabulary that the codes are from, or how many there are.
    vocabulary: str | None = None
    cardinality: int | None = None
    #: `code` only: the feature is left out of the dataset when its vocabulary has fewer values.
    min_cardinality: int = 0
    #: At most this many elements, where an operator has seen to it; None: not known.
    most: int | None = None
    #: It is done: the chain's later operators do not take it, it passes by them (an indicator, not to be normalized).
    final: bool = False
    #: `decimal` only: its digits, and how many of them are behind the point.
    precision: int = 0
    scale: int = 0

    @property
    def is_number(self) -> bool:
        """Counts and measures, booleans (0 and 1) among them; neither codes nor raw ids."""
        return self.element in ("int", "bigint", "float", "double", "boolean")

    @property
    def is_categorical(self) -> bool:
        """Codes or raw ids: a model looks them up."""
        return self.element in ("code", "id")

    @property
    def is_integer(self) -> bool:
        return self.element in ("int", "bigint")

    @property
    def arrow(self) -> pa.DataType:
        if self.element == "decimal":
            return pa.decimal128(self.precision, self.scale)
        return pa.list_(_ARROW[self.element]) if self.is_list else _ARROW[self.element]

    def __str__(self) -> str:
        if self.element == "decimal":
            return f"decimal({self.precision},{self.scale})"
        return f"array<{self.element}>" if self.is_list else self.element


def least(a: int | None, b: int | None) -> int | None:
    """Return the smaller of two bounds, None standing for none."""
    return b if a is None else a if b is None else min(a, b)


def declared(column: TableColumn) -> ValueType:
    """Return the type of a declared column, as features see it."""
    if digits := decimal_digits(column.type):
        return ValueType("decimal", precision=digits[0], scale=digits[1])
    if column.type in _SEEN_AS:
        return ValueType(_SEEN_AS[column.type])
    is_list = column.type.startswith("array<")
    element = column.type.removeprefix("array<").removesuffix(">")
    return ValueType(element, is_list)  # type: ignore[arg-type]  # ColumnType's names are Element's


def element_of(input_type: ValueType) -> ValueType:
    """Return the type of a list's element; of a scalar, itself."""
    return replace(input_type, is_list=False, length=None, most=None)


T = TypeVar("T", bound=BaseModel)


def build(operators: Seam[T], name: str, params: Mapping[str, Any], place: str) -> T:
    """Return the operator of a name or a `module:Class`, with its parameters.

    Args:
        operators: the kind of operators.
        name: as the spec has it.
        params: its parameters.
        place: its place in the spec, for messages.

    Raises:
        UserError: no such operator, a class that cannot be imported or is no operator, no such parameter, a wrong
            value; with the place and the nearest valid name.
    """
    operator_class = operators.find(name, place)
    if not isinstance(params, Mapping):
        raise UserError(
            f"{place} ({name}): write its parameters as a mapping, for example {name}: {{PARAMETER: VALUE}}"
        )
    try:
        return operator_class.model_validate(dict(params))
    except ValidationError as e:
        raise UserError(f"{place} ({name}): {faults_of(operator_class, e)}") from None
