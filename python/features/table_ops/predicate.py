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
from typing import TYPE_CHECKING, Any, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.functions.arrays import nan_to_null, one_chunk
from headrace.features.types import OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<text>'(?:[^']|'')*')|(?P<quoted>`(?:[^`]|``)+`)
    |(?P<sign><=|>=|<>|!=|==|=|<|>|\(|\)|,)|(?P<word>[^\W\d]\w*))""",
    re.VERBOSE,
)
_WORDS = {"and", "or", "not", "in", "is", "null", "between", "true", "false"}
_COMPARE = {
    "=": "equal",
    "==": "equal",
    "!=": "not_equal",
    "<>": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}

Kind = Literal["bigint", "double", "string", "boolean", "timestamp", "date"]


@dataclass(frozen=True)
class _Name:
    column: str


@dataclass(frozen=True)
class _Value:
    value: int | float | str | bool


@dataclass(frozen=True)
class _Node:
    """`does` is a value of _COMPARE, and, or, not, null, or true (a boolean column)."""

    does: str
    of: tuple[Any, ...]


class Predicate:
    """A parsed condition, checked against the columns' types."""

    def __init__(self, text: str, types: Mapping[str, ValueType]) -> None:
        """Raises OpError for what is no condition, an unknown column, or types that do not compare."""
        self.text, self._types = text, types
        self._tokens, self._at = _tokens(text), 0
        self._columns: dict[str, None] = {}
        self._root = self._or()
        if self._at < len(self._tokens):
            raise self._fault(f"'{self._tokens[self._at][1]}' is not expected here")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it looks at."""
        return tuple(self._columns)

    def spark(self) -> Column:
        """Boolean, never null."""
        from pyspark.sql import functions as F

        return F.coalesce(self._spark(self._root), F.lit(False))

    def arrow(self, column: Callable[[str], pa.Array]) -> pa.Array:
        """bool [rows], never null; `column` gives the values of a column in its declared type."""

        def values(name: str) -> pa.Array:
            x = column(name)
            return nan_to_null(x) if pa.types.is_floating(x.type) else x

        return pc.fill_null(_arrow(self._root, values), False)

    # Parsing: or > and > not > comparison.

    def _or(self) -> _Node:
        left = self._and()
        while self._word("or"):
            left = _Node("or", (left, self._and()))
        return left

    def _and(self) -> _Node:
        left = self._not()
        while self._word("and"):
            left = _Node("and", (left, self._not()))
        return left

    def _not(self) -> _Node:
        if self._word("not"):
            return _Node("not", (self._not(),))
        if self._sign("("):
            inner = self._or()
            if not self._sign(")"):
                raise self._fault("a ')' is missing")
            return inner
        return self._comparison()

    def _comparison(self) -> _Node:
        left = self._operand()
        if self._word("is"):
            no = self._word("not")
            if not self._word("null"):
                raise self._fault("write `is null` or `is not null`")
            found = _Node("null", (self._only_column(left),))
            return _Node("not", (found,)) if no else found
        no = self._word("not")
        if self._word("between"):
            low = self._operand()
            if not self._word("and"):
                raise self._fault("write `between LOW and HIGH`")
            high = self._operand()
            found = _Node("and", (self._compare("greater_equal", left, low), self._compare("less_equal", left, high)))
        elif self._word("in"):
            if not self._sign("("):
                raise self._fault("write `in (VALUE, ...)`")
            each = [self._compare("equal", left, self._operand())]
            while self._sign(","):
                each.append(self._compare("equal", left, self._operand()))
            if not self._sign(")"):
                raise self._fault("a ')' is missing")
            found = each[0]
            for more in each[1:]:
                found = _Node("or", (found, more))
        elif no:
            raise self._fault("`not` here must be followed by `in` or `between`")
        else:
            sign = self._tokens[self._at][1] if self._at < len(self._tokens) else ""
            if sign in _COMPARE:
                self._at += 1
                return self._compare(_COMPARE[sign], left, self._operand())
            column = self._only_column(left)
            if self._types[column.column] != ValueType("boolean"):
                raise self._fault(
                    f"column '{column.column}' is {self._types[column.column]}; compare it with something"
                )
            return _Node("true", (column,))
        return _Node("not", (found,)) if no else found

    def _operand(self) -> _Name | _Value:
        if self._at >= len(self._tokens):
            raise self._fault("it ends too early")
        kind, text = self._tokens[self._at]
        self._at += 1
        if kind == "number":
            return _Value(int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text))
        if kind == "text":
            return _Value(text[1:-1].replace("''", "'"))
        if kind == "word" and text.lower() in ("true", "false"):
            return _Value(text.lower() == "true")
        if kind == "quoted" or (kind == "word" and text.lower() not in _WORDS):
            name = text[1:-1].replace("``", "`") if kind == "quoted" else text
            if name not in self._types:
                raise OpError(f"'{self.text}': column '{name}' is not there (there are: {', '.join(self._types)})")
            if self._types[name].is_list and self._types[name].element not in ("string", "int", "bigint"):
                raise self._fault(f"column '{name}' is {self._types[name]}, which compares with nothing")
            self._columns[name] = None
            return _Name(name)
        raise self._fault(f"'{text}' is not expected here")

    def _only_column(self, operand: _Name | _Value) -> _Name:
        if isinstance(operand, _Value):
            raise self._fault(f"{operand.value!r} alone is no condition")
        return operand

    def _word(self, word: str) -> bool:
        return self._take("word", word)

    def _sign(self, sign: str) -> bool:
        return self._take("sign", sign)

    def _take(self, kind: str, text: str) -> bool:
        there = self._at < len(self._tokens) and self._tokens[self._at][0] == kind
        if there and self._tokens[self._at][1].lower() == text:
            self._at += 1
            return True
        return False

    def _fault(self, what: str) -> OpError:
        return OpError(f"'{self.text}': {what}")

    def _compare(self, does: str, left: _Name | _Value, right: _Name | _Value) -> _Node:
        """A comparison of two operands of a common kind."""
        if isinstance(left, _Value) and isinstance(right, _Value):
            raise self._fault(f"compares {left.value!r} with {right.value!r}; one of them must be a column")
        kinds = [self._kind(left), self._kind(right)]
        if set(kinds) <= {"bigint", "double"}:
            kind = "double" if "double" in kinds else "bigint"
        elif kinds[0] == kinds[1]:
            kind = kinds[0]
        elif "string" in kinds and set(kinds) & {"timestamp", "date"}:
            text = left if isinstance(left, _Value) else right
            kind = next(k for k in kinds if k != "string")
            if not isinstance(text, _Value):
                raise self._fault(f"compares {kinds[0]} with {kinds[1]}")
            moment = _Value(_moment(str(text.value), kind, self))
            left, right = (moment, right) if isinstance(left, _Value) else (left, moment)
        else:
            raise self._fault(f"compares {kinds[0]} with {kinds[1]}")
        for operand in (left, right):
            if kind == "bigint" and isinstance(operand, _Value) and not -(2**63) <= int(operand.value) < 2**63:
                raise self._fault(f"{operand.value} does not fit 64 bits")
        return _Node(does, (left, right, kind))

    def _kind(self, operand: _Name | _Value) -> Kind:
        if isinstance(operand, _Value):
            by_type: Mapping[type, Kind] = {bool: "boolean", int: "bigint", float: "double", str: "string"}
            return by_type[type(operand.value)]
        type_ = self._types[operand.column]
        if type_.is_list:
            raise self._fault(f"column '{operand.column}' is {type_}; only `is null` can be asked of it")
        kinds: Mapping[str, Kind] = {
            **{k: k for k in get_args(Kind)},
            "int": "bigint",
            "float": "double",
            "decimal": "double",
        }
        return kinds[type_.element]

    # The Spark implementation.

    def _spark(self, node: _Node) -> Column:
        from pyspark.sql import functions as F

        if node.does in ("and", "or"):
            a, b = (self._spark(x) for x in node.of)
            return a & b if node.does == "and" else a | b
        if node.does == "not":
            return ~self._spark(node.of[0])
        if node.does in ("null", "true"):
            x = self._column(node.of[0])
            return x.isNull() if node.does == "null" else x
        left, right, kind = node.of

        def value(x: _Name | _Value) -> Column:
            if isinstance(x, _Value):
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
        return compare[node.does]()

    def _column(self, name: _Name) -> Column:
        from headrace.features.functions.spark_expressions import col, nan_to_null

        x = col(name.column)
        return nan_to_null(x) if self._types[name.column] in (ValueType("float"), ValueType("double")) else x


_ARROW = {
    "bigint": pa.int64(),
    "double": pa.float64(),
    "string": pa.string(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "date": pa.date32(),
}


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
    compare: Callable[[Any, Any], pa.Array] = getattr(pc, node.does)

    def value(x: _Name | _Value) -> Any:
        if isinstance(x, _Name):
            found = column(x.column)
            if kind == "string" and pa.types.is_dictionary(found.type):
                return found
            return found.cast(_ARROW[kind], safe=False)
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


def _moment(text: str, kind: str, of: Predicate) -> str:
    """A timestamp (UTC) or date in the one spelling that both engines read."""
    try:
        if kind == "date":
            return date.fromisoformat(text).isoformat()
        at = datetime.fromisoformat(text)
    except ValueError:
        raise OpError(
            f"'{of.text}': '{text}' is no {kind}; write '2026-01-31'"
            + (" or '2026-01-31 12:00:00'" if kind == "timestamp" else "")
        ) from None
    at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    return at.isoformat(sep=" ", timespec="microseconds")


def _tokens(text: str) -> list[tuple[str, str]]:
    found, at = [], 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            raise OpError(f"'{text}': '{text[at:].strip()[:20]}' is not understood")
        kind = str(match.lastgroup)
        found.append((kind, match[kind]))
        at = match.end()
    if not found:
        raise OpError("the condition is empty")
    return found
