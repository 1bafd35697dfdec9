"""Conditions over metrics, such as `auc >= champion.auc - 0.001 and log_loss < 0.5`.

Read by Python's parser and walked node by node: comparisons, `and`, `or`, `not`, numbers, + - * /, unary minus, `min`,
`max`, `abs`, names of metrics, and `champion.NAME`. Nothing else is accepted, and nothing is ever executed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: The other model, in front of a metric's name.
CHAMPION = "champion"
_MOST_LETTERS = 1_000

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARE: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {"min": min, "max": max, "abs": abs}


class UndefinedMetric(Exception):
    """A metric that an expression names has no value; `args[0]` is its name as it is written."""


@dataclass(frozen=True)
class MetricExpression:
    """A condition that was checked. `names`: the metrics of the model, `champion_names`: of the champion."""

    text: str
    tree: ast.expr
    names: tuple[str, ...]
    champion_names: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> MetricExpression:
        """Check a condition.

        Raises:
            ValueError: it is none; says what it has that is not taken.
        """
        if len(text) > _MOST_LETTERS:
            raise ValueError(f"the expression has {len(text):,} letters, more than {_MOST_LETTERS:,}")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ValueError(f"'{text}' is no expression: write such as `auc >= champion.auc - 0.001`") from None
        names: dict[str, None] = {}
        of_champion: dict[str, None] = {}
        if not _is_condition(tree):
            raise ValueError(f"'{text}' is no condition: compare something, such as `auc >= 0.7`")
        _check(tree, text, names, of_champion)
        return MetricExpression(text, tree, tuple(names), tuple(of_champion))

    def holds(self, metrics: Mapping[str, float | None], champion: Mapping[str, float | None]) -> bool:
        """Whether it holds.

        Args:
            metrics: of the model, by name.
            champion: of the champion.

        Raises:
            UndefinedMetric: one that it names is not there, or None. A comparison that decides without it does not ask.
            ZeroDivisionError: it divides by 0.
        """
        return bool(_value(self.tree, metrics, champion))


def _is_condition(node: ast.expr) -> bool:
    if isinstance(node, ast.BoolOp):
        return all(_is_condition(v) for v in node.values)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not) and _is_condition(node.operand)
    return isinstance(node, ast.Compare)


def _check(node: ast.expr, text: str, names: dict[str, None], of_champion: dict[str, None]) -> None:
    match node:
        case ast.BoolOp(values=inner):
            pass
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = [operand]
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(o) in _COMPARE for o in ops):
            inner = [left, *others]
            if any(_is_condition(n) for n in inner):
                raise ValueError(f"'{text}' compares a condition: compare numbers")
        case _:
            _check_number(node, text, names, of_champion)
            return
    for n in inner:
        _check(n, text, names, of_champion)


def _check_number(node: ast.expr, text: str, names: dict[str, None], of_champion: dict[str, None]) -> None:
    inner: list[ast.expr] = []
    match node:
        case ast.Constant(value=bool()):
            raise ValueError(f"'{text}': {ast.unparse(node)} is no number")
        case ast.Constant(value=int() | float()):
            pass
        case ast.Name(id=name):
            names[name] = None
        case ast.Attribute(value=ast.Name(id=model), attr=name) if model == CHAMPION:
            of_champion[name] = None
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            inner = [operand]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            inner = [left, right]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS and _fits(name, args):
            inner = args
        case _:
            raise ValueError(
                f"'{text}': `{ast.unparse(node)}` is not taken here; there are numbers, names of metrics, "
                f"champion.NAME, + - * /, comparisons, and, or, not, min, max, abs"
            )
    for n in inner:
        _check_number(n, text, names, of_champion)


def _fits(name: str, args: list[ast.expr]) -> bool:
    return len(args) == 1 if name == "abs" else len(args) >= 2


def _value(node: ast.expr, metrics: Mapping[str, float | None], champion: Mapping[str, float | None]) -> float:
    def of(inner: ast.expr) -> float:
        return _value(inner, metrics, champion)

    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            return all(of(v) for v in values)
        case ast.BoolOp(values=values):
            return any(of(v) for v in values)
        case ast.Compare(left=left, ops=ops, comparators=others):
            numbers = [of(n) for n in (left, *others)]
            return all(_COMPARE[type(o)](a, b) for o, a, b in zip(ops, numbers, numbers[1:], strict=False))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not of(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -of(operand)
        case ast.UnaryOp(operand=operand):
            return of(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](of(left), of(right))
        case ast.Call(func=ast.Name(id=name), args=args):
            return _FUNCTIONS[name](*(of(a) for a in args))
        case ast.Constant(value=value):
            assert isinstance(value, (int, float))
            return value
        case ast.Name(id=name):
            found = metrics.get(name)
        case ast.Attribute(attr=name):
            found, name = champion.get(name), f"{CHAMPION}.{name}"
        case _:
            raise AssertionError("parse has refused it")
    if found is None:
        raise UndefinedMetric(name)
    return found
