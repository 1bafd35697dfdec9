"""Expressions of Spark's SQL over one row that Arrow evaluates to the same bits; all others are left to Spark.

What is taken: columns in backticks or as plain names, whole numbers, decimals beside doubles, 'texts', true and false;
`+ - * /` of int, bigint and double; `= == != <> < <= > >=` of two numbers, texts, booleans, dates or timestamps; `in`,
`between`, `is [not] null`, `and`, `or`, `not`, `if`, `case when`, `coalesce`, `concat` and `concat_ws` of texts, and
`cast` between numbers and to text.

As in Spark's ANSI mode: int and bigint are bigint, either of them with double is double; a quotient is a double; an
overflow of integers and a division by zero are errors. NaN equals itself and is above all numbers. What may be an error
is not taken below `and`, `or`, `case` and the like, which Spark evaluates only as far as a row needs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from headrace.compute import pc
from headrace.features.table_ops.sql import (
    Arithmetic,
    Between,
    BooleanLiteral,
    Call,
    Case,
    Cast,
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
from headrace.features.types import ValueType

#: A row's columns by name, as they are in the table: NaN is NaN.
Rows = Callable[[str], pa.Array]

_TYPES = {
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "boolean": pa.bool_(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
_SPELLINGS = {"integer": "int", "long": "bigint"}
_RANK = {"int": 0, "bigint": 1, "double": 2}
#: Of the type of a value, the types that it is cast to exactly as Spark does; those that may be an error besides.
_CASTS = {
    "int": {"bigint", "float", "double", "string"},
    "bigint": {"float", "double", "string"},
    "float": {"double"},
    "double": {"float"},
    "boolean": {"int", "bigint", "double", "string"},
}
_NARROWED = {("bigint", "int")}

#: A number without an exponent, and the beginning of a plain name, as Spark's own parser reads them.
_PLAIN_NUMBER, _PLAIN_NAME = re.compile(r"-?(?:\d+\.\d+|\.\d+|\d+)"), re.compile(r"[A-Za-z_]")
#: Words of Spark's SQL that are no columns.
_WORDS = frozenset(
    {
        "case",
        "when",
        "then",
        "else",
        "end",
        "cast",
        "as",
        "like",
        "rlike",
        "ilike",
        "div",
        "mod",
        "interval",
        "distinct",
    }
    | {"over", "escape", "collate", "exists"}
)


class _OnlySpark(Exception):
    """Raised for an expression that only Spark evaluates."""


@dataclass(frozen=True)
class _Node:
    type: str
    value: Callable[[Rows], Any]
    #: Whether a value may be an error.
    fails: bool = False
    #: Of a whole number, a decimal or a text that is written there.
    literal: str | None = None


class RowExpression:
    """An expression that was parsed, with the type that its result is cast to."""

    def __init__(self, root: _Node, columns: Sequence[str]) -> None:
        self._root, self.columns = root, tuple(columns)

    def arrow(self, rows: Rows) -> pa.Array:
        """Return the result for each row. Raises pa.ArrowInvalid for an overflow or a division by zero."""
        return self._root.value(rows)


def parse(text: str, types: Mapping[str, ValueType], result: ValueType) -> RowExpression | None:
    """Return an expression over columns of these types, cast to `result`; None where only Spark evaluates it as Spark
    does.
    """
    if "--" in text or "/*" in text:
        return None  # a comment
    typing = _Typing(types)
    try:
        root = _cast(typing.node(parse_sql(text)), str(result))
    except (_OnlySpark, SqlSyntaxError):
        return None
    return RowExpression(root, list(typing.columns)) if typing.columns else None


class _Typing:
    """Give each part of a tree its type and its Arrow kernel, in the order in which the text has them."""

    def __init__(self, types: Mapping[str, ValueType]) -> None:
        self._types = types
        self._names = {name.lower(): name for name in types}
        #: Columns that the expression names.
        self.columns: dict[str, None] = {}

    def node(self, tree: Expression) -> _Node:
        match tree:
            case Logic(word, left, right):
                return _logic(pc.or_kleene if word == "or" else pc.and_kleene, self.node(left), self.node(right))
            case Not(inner):
                return _negated(self.node(inner))
            case IsNull(inner):
                x = self.node(inner)
                return _Node("boolean", lambda rows: pc.is_null(x.value(rows)), x.fails)
            case Between(inner, low, high):
                x, low_, high_ = (self.node(e) for e in (inner, low, high))
                return _logic(pc.and_kleene, _compared(">=", x, low_), _compared("<=", x, high_))
            case In(inner, options):
                return self._in(inner, options)
            case Comparison(sign, left, right):
                return _compared(sign, self.node(left), self.node(right))
            case Arithmetic("/", left, right):
                return _quotient(self.node(left), self.node(right))
            case Arithmetic(operator, left, right):
                return _arithmetic(operator, self.node(left), self.node(right))
            case Signed(operator, inner):
                return self._signed(operator, inner)
            case Parentheses(inner):
                x = self.node(inner)
                return replace(x, literal=None) if x.type != "decimal" else x
            case Case(conditions, values):
                return self._case(conditions, values)
            case Cast(inner, type_):
                return _cast(self.node(inner), _SPELLINGS.get(type_.lower(), type_.lower()))
            case Call(function, arguments):
                return self._call(function.lower(), [self.node(argument) for argument in arguments])
            case ColumnName(name, is_quoted):
                if not is_quoted and (name.lower() in _WORDS or not _PLAIN_NAME.match(name)):
                    raise _OnlySpark
                return self._column(name)
            case NumberLiteral(text, is_ambiguous):
                if is_ambiguous or not _PLAIN_NUMBER.fullmatch(text):
                    raise _OnlySpark
                return _number(text)
            case TextLiteral(value):
                if "'" in value or "\\" in value:
                    raise _OnlySpark  # Spark reads escapes, and texts that touch as one
                return _Node("string", lambda rows: pa.scalar(value), literal=value)
            case BooleanLiteral(truth):
                return _Node("boolean", lambda rows: pa.scalar(truth))
        raise _OnlySpark

    def _in(self, operand: Expression, options: Sequence[Expression]) -> _Node:
        x, *options_ = _alike([self.node(operand), *(self.node(option) for option in options)])
        out = _compared("=", x, options_[0])
        for option_ in options_[1:]:
            out = _logic(pc.or_kleene, out, _compared("=", x, option_))
        return out

    def _signed(self, sign: str, operand: Expression) -> _Node:
        if sign == "+":
            raise _OnlySpark
        x = self.node(operand)
        if x.literal is not None and x.type in ("int", "bigint", "decimal"):
            return _number(x.literal[1:] if x.literal.startswith("-") else f"-{x.literal}")
        if x.type not in _RANK:
            raise _OnlySpark
        return replace(
            x, value=lambda rows: pc.negate_checked(x.value(rows)), fails=x.fails or x.type != "double", literal=None
        )

    def _column(self, text: str) -> _Node:
        name = self._names.get(text.lower())  # Spark's names have no case
        if name is None or self._types[name].is_list or self._types[name].element not in _TYPES:
            raise _OnlySpark
        self.columns[name] = None
        element = self._types[name].element
        return _Node(element, lambda rows: pc.cast(rows(name), _TYPES[element]))

    def _case(self, conditions: Sequence[Expression], values: Sequence[Expression]) -> _Node:
        pairs = [(self.node(condition), self.node(value)) for condition, value in zip(conditions, values, strict=False)]
        otherwise = [self.node(value) for value in values[len(conditions) :]]
        return _chosen([condition for condition, _ in pairs], [*(value for _, value in pairs), *otherwise])

    def _call(self, function: str, arguments: Sequence[_Node]) -> _Node:
        if function == "if" and len(arguments) == 3:
            return _chosen(arguments[:1], arguments[1:])
        if function == "coalesce":
            same = _alike(arguments)
            _no_error(same)
            return _Node(same[0].type, lambda rows: pc.coalesce(*(x.value(rows) for x in same)))
        if function == "concat":
            return _joined(arguments, None)
        if function == "concat_ws" and len(arguments) > 1:
            separator = arguments[0]
            if separator.type == "string" and separator.literal is not None:
                return _joined(arguments[1:], separator.literal)
        raise _OnlySpark


def _number(text: str) -> _Node:
    if "." in text:
        return _Node("decimal", lambda rows: None, literal=text)
    value = int(text)
    if abs(value) >= 2**63 or abs(value) == 2**31:
        raise _OnlySpark
    type_ = "int" if abs(value) < 2**31 else "bigint"
    return _Node(type_, lambda rows: pa.scalar(value, _TYPES[type_]), literal=text)


def _logic(function: Callable[[Any, Any], Any], a: _Node, b: _Node) -> _Node:
    _no_error([a, b])
    if a.type != "boolean" or b.type != "boolean":
        raise _OnlySpark
    return _Node("boolean", lambda rows: function(a.value(rows), b.value(rows)))


def _negated(x: _Node) -> _Node:
    if x.type != "boolean":
        raise _OnlySpark
    return _Node("boolean", lambda rows: pc.invert(x.value(rows)), x.fails)


def _no_error(nodes: Sequence[_Node]) -> None:
    if any(x.fails for x in nodes):
        raise _OnlySpark


def _alike(nodes: Sequence[_Node]) -> list[_Node]:
    """Return the same values in one type, as Spark would widen them."""
    types = {x.type for x in nodes} - {"decimal"}
    if len(types) == 1 and not any(x.type == "decimal" for x in nodes):
        if types & {"float"}:
            raise _OnlySpark
        return list(nodes)
    if not types or not types <= _RANK.keys() or (len(types) < len({x.type for x in nodes}) and types != {"double"}):
        raise _OnlySpark
    wide = max(types, key=_RANK.__getitem__)
    return [_widened(x, wide) for x in nodes]


def _widened(x: _Node, wide: str) -> _Node:
    if x.type == "decimal":  # beside doubles alone
        number = float(str(x.literal))
        return _Node("double", lambda rows: pa.scalar(number))
    if x.type == wide:
        return x
    return _Node(wide, lambda rows: pc.cast(x.value(rows), _TYPES[wide], safe=False), x.fails, x.literal)


def _arithmetic(sign: str, a: _Node, b: _Node) -> _Node:
    a, b = _alike([a, b])
    if a.type not in _RANK:
        raise _OnlySpark
    function = {"+": pc.add_checked, "-": pc.subtract_checked, "*": pc.multiply_checked}[sign]
    fails = a.fails or b.fails or a.type != "double"
    return _Node(a.type, lambda rows: function(a.value(rows), b.value(rows)), fails)


def _quotient(a: _Node, b: _Node) -> _Node:
    if {a.type, b.type} - {"decimal"} <= {"int", "bigint"} and "decimal" in (a.type, b.type):
        raise _OnlySpark
    numerator, divisor = (_alike([x, _Node("double", lambda rows: pa.scalar(0.0))])[0] for x in (a, b))
    is_safe = b.literal is not None and float(b.literal) != 0

    def divide(rows: Rows) -> Any:
        over, under = numerator.value(rows), divisor.value(rows)
        by_zero = pc.and_(pc.is_valid(over), pc.equal(under, 0.0))
        if not is_safe and (by_zero if isinstance(by_zero, pa.Scalar) else pc.any(by_zero)).as_py():
            raise pa.ArrowInvalid("divide by zero")
        return pc.divide(over, under)

    return _Node("double", divide, a.fails or b.fails or not is_safe)


def _compared(sign: ComparisonSign, a: _Node, b: _Node) -> _Node:
    a, b = _alike([a, b])
    if a.type == "boolean" and sign not in ("=", "!="):
        raise _OnlySpark

    def both(function: Callable[[Any, Any], Any]) -> _Node:
        return _Node("boolean", lambda rows: function(a.value(rows), b.value(rows)), a.fails or b.fails)

    is_double = a.type == "double"
    equal = both(_equal_doubles if is_double else pc.equal)
    less = both(_less_doubles if is_double else pc.less)
    greater = both((lambda x, y: _less_doubles(y, x)) if is_double else pc.greater)
    by_sign: Mapping[str, Callable[[], _Node]] = {
        "=": lambda: equal,
        "!=": lambda: _negated(equal),
        "<": lambda: less,
        ">": lambda: greater,
        "<=": lambda: _negated(greater),
        ">=": lambda: _negated(less),
    }
    return by_sign[sign]()


def _equal_doubles(x: Any, y: Any) -> Any:
    return pc.or_(pc.equal(x, y), pc.and_(pc.is_nan(x), pc.is_nan(y)))


def _less_doubles(x: Any, y: Any) -> Any:
    return pc.or_(pc.less(x, y), pc.and_(pc.invert(pc.is_nan(x)), pc.is_nan(y)))


def _chosen(conditions: Sequence[_Node], values: Sequence[_Node]) -> _Node:
    """Return the value of the first condition that is true; behind the last one's, if there is one more, the value
    else.
    """
    same = _alike(values)
    _no_error([*conditions, *same])
    if any(c.type != "boolean" for c in conditions):
        raise _OnlySpark
    type_ = same[0].type

    def choose(rows: Rows) -> Any:
        out = same[-1].value(rows) if len(same) > len(conditions) else pa.scalar(None, _TYPES[type_])
        for condition, value in reversed(list(zip(conditions, same, strict=False))):
            out = pc.if_else(pc.fill_null(condition.value(rows), False), value.value(rows), out)
        return out

    return _Node(type_, choose)


def _joined(parts: Sequence[_Node], separator: str | None) -> _Node:
    """Texts behind each other, with a separator without those that are null (Arrow's own way to do so loses rows)."""
    if any(x.type != "string" for x in parts):
        raise _OnlySpark

    def join(rows: Rows) -> Any:
        values = [x.value(rows) for x in parts]
        if separator is None:
            return pc.binary_join_element_wise(*values, "", null_handling="emit_null")
        prefixed = [pc.if_else(pc.is_valid(v), pc.binary_join_element_wise(separator, v, ""), "") for v in values]
        return pc.utf8_slice_codeunits(pc.binary_join_element_wise(*prefixed, ""), len(separator))

    return _Node("string", join, any(x.fails for x in parts))


def _cast(x: _Node, type_: str) -> _Node:
    if x.type == type_:
        return x
    narrowed = (x.type, type_) in _NARROWED
    if not narrowed and type_ not in _CASTS.get(x.type, ()):
        raise _OnlySpark
    return _Node(type_, lambda rows: pc.cast(x.value(rows), _TYPES[type_], safe=narrowed), x.fails or narrowed)
