"""Conditions on a row, written as in SQL's WHERE, as Spark expressions and over Arrow arrays.

    clicked = 1 and (device in ('phone', 'web') or item_price is not null) and not user_age between 0 and 17

Columns (in backticks where they are no plain names), numbers, 'texts', true and false; = == != <> < <= > >=,
`in (...)`, `between`, `is [not] null`, `and`, `or`, `not`, parentheses. Timestamps and dates compare with texts
('2026-01-31', '2026-01-31 12:00:00', UTC). Logic is SQL's: a comparison with null is unknown, and unknown is not true.
NaN is null. Integers compare as 64-bit integers, with a real number on either side as doubles; decimals as doubles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import pyarrow as pa

from headrace.compute import pc
from headrace.features.functions.arrays import nan_to_null, one_chunk
from headrace.features.table_ops.sql import (
    Arithmetic,
    Between,
    BooleanLiteral,
    Call,
    ColumnName,
    Comparison,
    ComparisonSign,
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
from headrace.features.types import OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column

Kind = Literal["bigint", "double", "string", "boolean", "timestamp", "date"]


#: Functions of pyarrow.compute.
_COMPARE = {"=": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal"}


@dataclass(frozen=True)
class _Column:
    name: str


@dataclass(frozen=True)
class _Literal:
    value: int | float | str | bool


_Operand: TypeAlias = _Column | _Literal


@dataclass(frozen=True)
class _Node:
    """`operation` is a value of _COMPARE, and, or, not, null, or true (a boolean column)."""

    operation: str
    operands: tuple[Any, ...]


class Predicate:
    """A parsed condition, checked against the columns' types."""

    def __init__(self, text: str, types: Mapping[str, ValueType]) -> None:
        """Parse and check a condition.

        Raises:
            OpError: the text is no condition, names an unknown column, or compares types that do not compare.
        """
        self.text, self._types = text, types
        self._columns: dict[str, None] = {}
        if not text.strip():
            raise OpError("the condition is empty")
        try:
            tree = parse_sql(text)
        except SqlSyntaxError as e:
            raise self._fault(str(e)) from None
        self._root = self._condition(tree)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the condition names."""
        return tuple(self._columns)

    def spark(self) -> Column:
        """Return the condition as a boolean expression that is never null."""
        from pyspark.sql import functions as F

        return F.coalesce(self._spark(self._root), F.lit(False))

    def arrow(self, column: Callable[[str], pa.Array]) -> pa.Array:
        """Return the condition of each row: bool [rows], never null.

        Args:
            column: gives the values of a column in its declared type.
        """

        def values(name: str) -> pa.Array:
            x = column(name)
            return nan_to_null(x) if pa.types.is_floating(x.type) else x

        return pc.fill_null(_arrow(self._root, values), False)

    def _condition(self, tree: Expression) -> _Node:
        """Turn a tree into a condition, from the left to the right."""
        match tree:
            case Logic(word, left, right):
                return _Node(word, (self._condition(left), self._condition(right)))
            case Not(inner):
                return _Node("not", (self._condition(inner),))
            case Parentheses(inner):
                return self._condition(inner)
            case IsNull(inner):
                return _Node("null", (self._only_column(self._operand(inner)),))
            case Between(inner, low, high):
                x, low_, high_ = (self._operand(e) for e in (inner, low, high))
                return _Node("and", (self._compare(">=", x, low_), self._compare("<=", x, high_)))
            case In(inner, options):
                x = self._operand(inner)
                first, *further = (self._compare("=", x, self._operand(option)) for option in options)
                for alternative in further:
                    first = _Node("or", (first, alternative))
                return first
            case Comparison(sign, left, right):
                return self._compare(sign, self._operand(left), self._operand(right))
        column = self._only_column(self._operand(tree))
        if (type_ := self._types[column.name]) != ValueType("boolean"):
            raise self._fault(f"column '{column.name}' is {type_}; compare it with something")
        return _Node("true", (column,))

    def _operand(self, tree: Expression) -> _Operand:
        match tree:
            case NumberLiteral(text):
                return _Literal(int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text))
            case TextLiteral(value) | BooleanLiteral(value):
                return _Literal(value)
            case ColumnName(name) | Call(name):
                if name not in self._types:
                    raise OpError(f"'{self.text}': column '{name}' is not there (there are: {', '.join(self._types)})")
                if isinstance(tree, Call):
                    raise self._fault("'(' is not expected here")
                if self._types[name].is_list and self._types[name].element not in ("string", "int", "bigint"):
                    raise self._fault(f"column '{name}' is {self._types[name]}, which compares with nothing")
                self._columns[name] = None
                return _Column(name)
            case Arithmetic(sign) | Signed(sign):
                raise self._fault(f"'{sign}' is not expected here")
            case Parentheses():
                raise self._fault("parentheses go around conditions, not around values")
        raise self._fault("a comparison takes columns and values")

    def _only_column(self, operand: _Operand) -> _Column:
        if isinstance(operand, _Literal):
            raise self._fault(f"{operand.value!r} alone is no condition")
        return operand

    def _fault(self, message: str) -> OpError:
        return OpError(f"'{self.text}': {message}")

    def _compare(self, sign: ComparisonSign, left: _Operand, right: _Operand) -> _Node:
        """Return the comparison of two operands in the type that they have in common."""
        if isinstance(left, _Literal) and isinstance(right, _Literal):
            raise self._fault(f"compares {left.value!r} with {right.value!r}; one of them must be a column")
        kinds = [self._kind(left), self._kind(right)]
        if set(kinds) <= {"bigint", "double"}:
            kind = "double" if "double" in kinds else "bigint"
        elif kinds[0] == kinds[1]:
            kind = kinds[0]
        elif "string" in kinds and set(kinds) & {"timestamp", "date"}:
            text = left if isinstance(left, _Literal) else right
            kind = next(k for k in kinds if k != "string")
            if not isinstance(text, _Literal):
                raise self._fault(f"compares {kinds[0]} with {kinds[1]}")
            moment = _Literal(_moment(str(text.value), kind, self))
            left, right = (moment, right) if isinstance(left, _Literal) else (left, moment)
        else:
            raise self._fault(f"compares {kinds[0]} with {kinds[1]}")
        for operand in (left, right):
            if kind == "bigint" and isinstance(operand, _Literal) and not -(2**63) <= int(operand.value) < 2**63:
                raise self._fault(f"{operand.value} does not fit 64 bits")
        return _Node(_COMPARE[sign], (left, right, kind))

    def _kind(self, operand: _Operand) -> Kind:
        if isinstance(operand, _Literal):
            by_type: Mapping[type, Kind] = {bool: "boolean", int: "bigint", float: "double", str: "string"}
            return by_type[type(operand.value)]
        type_ = self._types[operand.name]
        if type_.is_list:
            raise self._fault(f"column '{operand.name}' is {type_}; only `is null` can be asked of it")
        kinds: Mapping[str, Kind] = {
            **{k: k for k in get_args(Kind)},
            "int": "bigint",
            "float": "double",
            "decimal": "double",
        }
        return kinds[type_.element]

    def _spark(self, node: _Node) -> Column:
        from pyspark.sql import functions as F

        if node.operation in ("and", "or"):
            a, b = (self._spark(x) for x in node.operands)
            return a & b if node.operation == "and" else a | b
        if node.operation == "not":
            return ~self._spark(node.operands[0])
        if node.operation in ("null", "true"):
            x = self._column(node.operands[0])
            return x.isNull() if node.operation == "null" else x
        left, right, kind = node.operands

        def value(x: _Operand) -> Column:
            if isinstance(x, _Literal):
                return F.lit(float(x.value) if kind == "double" else x.value).cast(kind)
            return self._column(x).cast(kind)

        a, b = value(left), value(right)
        compare: Mapping[str, Callable[[], Column]] = {
            "equal": lambda: a == b,
            "not_equal": lambda: a != b,
            "less": lambda: a < b,
            "less_equal": lambda: a <= b,
            "greater": lambda: a > b,
            "greater_equal": lambda: a >= b,
        }
        return compare[node.operation]()

    def _column(self, column: _Column) -> Column:
        from headrace.features.functions.spark_expressions import col, nan_to_null

        x = col(column.name)
        return nan_to_null(x) if self._types[column.name] in (ValueType("float"), ValueType("double")) else x


_ARROW = {
    "bigint": pa.int64(),
    "double": pa.float64(),
    "string": pa.string(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "date": pa.date32(),
}


def _arrow(node: _Node, column: Callable[[str], pa.Array]) -> pa.Array:
    if node.operation in ("and", "or"):
        a, b = (_arrow(x, column) for x in node.operands)
        return pc.and_kleene(a, b) if node.operation == "and" else pc.or_kleene(a, b)
    if node.operation == "not":
        return pc.invert(_arrow(node.operands[0], column))
    if node.operation in ("null", "true"):
        x = column(node.operands[0].name)
        return pc.is_null(x) if node.operation == "null" else x
    left, right, kind = node.operands
    compare: Callable[[Any, Any], pa.Array] = getattr(pc, node.operation)

    def value(x: _Operand) -> Any:
        if isinstance(x, _Column):
            values = column(x.name)
            if kind == "string" and pa.types.is_dictionary(values.type):
                return values
            return values.cast(_ARROW[kind], safe=False)
        if kind == "timestamp":
            return pa.scalar(datetime.fromisoformat(str(x.value)), _ARROW[kind])
        if kind == "date":
            return pa.scalar(date.fromisoformat(str(x.value)), _ARROW[kind])
        return pa.scalar(float(x.value) if kind == "double" else x.value, _ARROW[kind])

    a, b = value(left), value(right)
    if any(isinstance(x, pa.DictionaryArray) for x in (a, b)):
        return _compared_texts(compare, a, b)
    return compare(a, b)


def _compared_texts(compare: Callable[[Any, Any], pa.Array], a: pa.Array | pa.Scalar, b: pa.Array | pa.Scalar) -> Any:
    """`compare` of texts, each of a dictionary looked at once: those of all rows may be more than an array holds."""
    if isinstance(a, pa.Scalar):
        return compare(a, b.dictionary).take(b.indices)
    if isinstance(b, pa.Scalar):
        return compare(a.dictionary, b).take(a.indices)
    a, b = a.dictionary_encode(), b.dictionary_encode()
    # Numbers that stand to each other as the texts do.
    values = pa.chunked_array([a.dictionary, b.dictionary])
    ranks = pc.if_else(one_chunk(values.is_valid()), pc.rank(values, tiebreaker="min"), None)
    first = len(a.dictionary)
    return compare(ranks[:first].take(a.indices), ranks[first:].take(b.indices))


def _moment(text: str, kind: str, predicate: Predicate) -> str:
    """Return a timestamp (UTC) or date in the one spelling that both engines read."""
    try:
        if kind == "date":
            return date.fromisoformat(text).isoformat()
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise OpError(
            f"'{predicate.text}': '{text}' is no {kind}; write '2026-01-31'"
            + (" or '2026-01-31 12:00:00'" if kind == "timestamp" else "")
        ) from None
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return moment.isoformat(sep=" ", timespec="microseconds")
