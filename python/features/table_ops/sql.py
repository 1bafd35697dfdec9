"""Expressions of SQL over the columns of a row: one tokenizer and one parser, from text to a tree.

The tree says nothing of types or meaning. Two evaluators read it: conditions (`predicate`) and expressions that Arrow
evaluates as Spark does (`row_expression`). Each refuses the parts of the language that it does not take. Checks of a
spec ask `fault_without_spark` which names of an expression for Spark are no columns.

    or > and > not > comparison > sum > product > sign > number, text, column, parentheses, case, function
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Literal, TypeAlias, cast

from headrace.errors import nearest

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<text>'(?:[^']|'')*')|(?P<quoted>`(?:[^`]|``)+`)
    |(?P<sign><=(?!>)|>=|<>|!=|==|=|<|>|\(|\)|,|\+|-|\*|/)|(?P<word>[^\W\d]\w*))""",
    re.VERBOSE,
)
#: Words that are no columns, unless they are in backticks.
_RESERVED = frozenset({"and", "or", "not", "in", "is", "null", "between", "true", "false"})

ComparisonSign = Literal["=", "!=", "<", "<=", ">", ">="]
_COMPARISONS: dict[str, ComparisonSign] = {
    "=": "=",
    "==": "=",
    "!=": "!=",
    "<>": "!=",
    "<": "<",
    "<=": "<=",
    ">": ">",
    ">=": ">=",
}


class SqlSyntaxError(ValueError):
    """A text that is no expression; the message says where it fails."""


class UnfinishedSql(SqlSyntaxError):
    """A text that ends where more is needed: no dialect of SQL has it as an expression."""


@dataclass(frozen=True)
class NumberLiteral:
    """A number, with its sign where one stands directly before it."""

    text: str
    #: Whether a letter, a digit or a dot follows it directly: Spark may read another token.
    is_ambiguous: bool = False


@dataclass(frozen=True)
class TextLiteral:
    """A text in quotes, without them; two quotes within it are one."""

    value: str


@dataclass(frozen=True)
class BooleanLiteral:
    """`true` or `false`."""

    value: bool


@dataclass(frozen=True)
class ColumnName:
    """A column, as a plain name or in backticks."""

    name: str
    is_quoted: bool


@dataclass(frozen=True)
class Parentheses:
    """An expression in parentheses."""

    inner: Expression


@dataclass(frozen=True)
class Signed:
    """A plus or minus before anything else."""

    sign: str
    operand: Expression


@dataclass(frozen=True)
class Arithmetic:
    """A sum, difference, product or quotient."""

    sign: str
    left: Expression
    right: Expression


@dataclass(frozen=True)
class Comparison:
    """A comparison of two values."""

    sign: ComparisonSign
    left: Expression
    right: Expression


@dataclass(frozen=True)
class Logic:
    """`left and right`, or `left or right`."""

    word: Literal["and", "or"]
    left: Expression
    right: Expression


@dataclass(frozen=True)
class Not:
    """The negation of a condition."""

    operand: Expression


@dataclass(frozen=True)
class IsNull:
    """`operand is null`."""

    operand: Expression


@dataclass(frozen=True)
class Between:
    """`operand between low and high`."""

    operand: Expression
    low: Expression
    high: Expression


@dataclass(frozen=True)
class In:
    """`operand in (options)`."""

    operand: Expression
    options: tuple[Expression, ...]


@dataclass(frozen=True)
class Case:
    """`case when condition then value ... else value end`: one value more than conditions where there is an `else`."""

    conditions: tuple[Expression, ...]
    values: tuple[Expression, ...]


@dataclass(frozen=True)
class Cast:
    """`cast(operand as type)`."""

    operand: Expression
    type: str


@dataclass(frozen=True)
class Call:
    """A function of arguments."""

    function: str
    arguments: tuple[Expression, ...]


Expression: TypeAlias = (
    NumberLiteral
    | TextLiteral
    | BooleanLiteral
    | ColumnName
    | Parentheses
    | Signed
    | Arithmetic
    | Comparison
    | Logic
    | Not
    | IsNull
    | Between
    | In
    | Case
    | Cast
    | Call
)


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int


def parse_sql(text: str) -> Expression:
    """Parse a text into the tree of one expression.

    Raises:
        SqlSyntaxError: the text is no expression.
    """
    return _Parser(text).parse()


#: Functions of Spark whose first of three arguments is a unit of time, not a column: `datediff(DAY, first, last)`.
_OF_UNITS = frozenset({"dateadd", "date_add", "datediff", "date_diff", "timestampadd", "timestampdiff"})
#: Names without parentheses that Spark takes for constants where no column has them.
_CONSTANTS = frozenset(
    [
        "current_catalog",
        "current_database",
        "current_date",
        "current_schema",
        "current_time",
        "current_timestamp",
        "current_user",
        "grouping__id",
        "localtimestamp",
        "session_user",
        "user",
    ]
)


def column_names(expression: Expression) -> Iterator[str]:
    """Yield the names of columns in an expression as Spark reads it, from left to right, as often as they are there."""
    match expression:
        case ColumnName(name=name, is_quoted=is_quoted):
            if is_quoted or name.lower() not in _CONSTANTS:
                yield name
        case Call(function=function, arguments=arguments):
            has_unit = function.lower() in _OF_UNITS and len(arguments) == 3
            for argument in arguments[1:] if has_unit else arguments:
                yield from column_names(argument)
        case _:
            for part in fields(expression):
                value = getattr(expression, part.name)
                for inner in value if isinstance(value, tuple) else (value,):
                    if is_dataclass(inner):
                        yield from column_names(cast(Expression, inner))


def fault_without_spark(expression: str, columns: Collection[str]) -> str | None:
    """Return why Spark must refuse an expression over some columns, or None where only Spark can tell.

    Spark's SQL has more words than this module: what `parse_sql` does not take is no fault, unless it ends too early.

    Args:
        expression: of Spark's SQL.
        columns: the columns that it may name, in any case; besides them there may be columns of headrace's own (`ds`,
            names that begin with `_`).
    """
    if "\\" in expression:  # Spark's texts may have escaped quotes, which end a text here.
        return None
    try:
        names = [*column_names(parse_sql(expression))]
    except UnfinishedSql as e:
        return f"'{expression}' is no expression of Spark's SQL: {e}"
    except SqlSyntaxError:
        return None
    known = {"ds", *(column.casefold() for column in columns)}
    if (unknown := next((n for n in names if n.casefold() not in known and not n.startswith("_")), None)) is None:
        return None
    return f"there is no column '{unknown}'{nearest(unknown, columns)} (there are: {', '.join(columns)})"


class _Parser:
    """Take tokens from the left, one method for each level of the grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[_Token] = []
        self._next = 0
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                raise SqlSyntaxError(f"'{text[position:].strip()[:20]}' is not understood")
            kind = str(match.lastgroup)
            self._tokens.append(_Token(kind, match[kind], match.start(kind), match.end()))
            position = match.end()

    def parse(self) -> Expression:
        root = self._or()
        if (token := self._peek()) is not None:
            raise SqlSyntaxError(f"'{token.text}' is not expected here")
        return root

    def _or(self) -> Expression:
        left = self._and()
        while self._take("word", "or"):
            left = Logic("or", left, self._and())
        return left

    def _and(self) -> Expression:
        left = self._not()
        while self._take("word", "and"):
            left = Logic("and", left, self._not())
        return left

    def _not(self) -> Expression:
        return Not(self._not()) if self._take("word", "not") else self._comparison()

    def _comparison(self) -> Expression:
        left = self._sum()
        if self._take("word", "is"):
            is_negated = self._take("word", "not")
            self._need("word", "null", "write `is null` or `is not null`")
            return Not(IsNull(left)) if is_negated else IsNull(left)
        is_negated = self._take("word", "not")
        if self._take("word", "between"):
            low = self._sum()
            self._need("word", "and", "write `between LOW and HIGH`")
            between = Between(left, low, self._sum())
            return Not(between) if is_negated else between
        if self._take("word", "in"):
            self._need("sign", "(", "write `in (VALUE, ...)`")
            membership = In(left, self._list(self._sum))
            return Not(membership) if is_negated else membership
        if is_negated:
            raise SqlSyntaxError("`not` here must be followed by `in` or `between`")
        token = self._peek()
        if token is not None and token.kind == "sign" and token.text in _COMPARISONS:
            self._next += 1
            return Comparison(_COMPARISONS[token.text], left, self._sum())
        return left

    def _sum(self) -> Expression:
        left = self._product()
        while (sign := self._sign("+-")) is not None:
            left = Arithmetic(sign, left, self._product())
        return left

    def _product(self) -> Expression:
        left = self._signed()
        while (sign := self._sign("*/")) is not None:
            left = Arithmetic(sign, left, self._signed())
        return left

    def _signed(self) -> Expression:
        start = self._peek()
        sign = self._sign("+-")
        if start is None or sign is None:
            return self._primary()
        number = self._peek()
        if number is not None and number.kind == "number" and number.start == start.end:
            literal = self._primary()
            assert isinstance(literal, NumberLiteral)
            return NumberLiteral(f"{sign}{literal.text}", literal.is_ambiguous)
        return Signed(sign, self._signed())

    def _primary(self) -> Expression:
        token = self._peek()
        if token is None:
            raise UnfinishedSql("it ends too early" if self._tokens else "it is empty")
        self._next += 1
        if token.kind == "number":
            return NumberLiteral(token.text, re.match(r"[\w.]", self._text[token.end :]) is not None)
        if token.kind == "text":
            return TextLiteral(token.text[1:-1].replace("''", "'"))
        if token.kind == "quoted":
            return ColumnName(token.text[1:-1].replace("``", "`"), True)
        if token.text == "(":
            inner = self._or()
            self._need("sign", ")", "a ')' is missing")
            return Parentheses(inner)
        word = token.text.lower() if token.kind == "word" else ""
        if word in ("true", "false"):
            return BooleanLiteral(word == "true")
        if token.kind != "word" or word in _RESERVED:
            raise SqlSyntaxError(f"'{token.text}' is not expected here")
        following = self._peek()
        if word == "case" and following is not None and following.text.lower() == "when":
            return self._case()
        return self._call(token.text) if self._take("sign", "(") else ColumnName(token.text, False)

    def _case(self) -> Case:
        conditions: list[Expression] = []
        values: list[Expression] = []
        while self._take("word", "when"):
            conditions.append(self._or())
            self._need("word", "then", "write `when CONDITION then VALUE`")
            values.append(self._or())
        if self._take("word", "else"):
            values.append(self._or())
        self._need("word", "end", "write `end` behind the last value")
        return Case(tuple(conditions), tuple(values))

    def _call(self, function: str) -> Expression:
        if function.lower() != "cast":
            return Call(function, self._list(self._or))
        operand = self._or()
        self._need("word", "as", "write `cast(VALUE as TYPE)`")
        type_ = self._peek()
        if type_ is None or type_.kind != "word":
            raise (UnfinishedSql if type_ is None else SqlSyntaxError)("write `cast(VALUE as TYPE)`")
        self._next += 1
        self._need("sign", ")", "a ')' is missing")
        return Cast(operand, type_.text)

    def _list(self, item: Callable[[], Expression]) -> tuple[Expression, ...]:
        """Parse items up to the closing parenthesis."""
        items = [item()]
        while self._take("sign", ","):
            items.append(item())
        self._need("sign", ")", "a ')' is missing")
        return tuple(items)

    def _peek(self) -> _Token | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _take(self, kind: str, text: str) -> bool:
        token = self._peek()
        if token is None or token.kind != kind or token.text.lower() != text:
            return False
        self._next += 1
        return True

    def _sign(self, signs: str) -> str | None:
        token = self._peek()
        if token is None or token.kind != "sign" or token.text not in signs:
            return None
        self._next += 1
        return token.text

    def _need(self, kind: str, text: str, message: str) -> None:
        if not self._take(kind, text):
            raise (UnfinishedSql if self._peek() is None else SqlSyntaxError)(message)
