"""Operators in ONNX: their registry, and bodies over numbers, missing values, bins, lists and times.

An operator's class names its body by `onnx`, as `module:function`. An operator without one is computed by its Arrow
body, in the Python step of an export (`columns.FeaturesStep`). Positions in time cycles are computed in integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.config.schema import NULL_CODE
from headrace.export.features.graph import (
    DOUBLE,
    FLOAT,
    GraphWriter,
    Value,
    behind_the_end,
    doubles,
    integers,
    missing_of,
    part,
    real,
)
from headrace.features.functions.timestamps import DAY_MICROS, HOUR_MICROS
from headrace.features.ops.base import Op, State
from headrace.features.ops.numbers import WithIndicator
from headrace.features.ops.times import PERIODS, UNITS, circle
from headrace.features.types import ValueType, element_of
from headrace.features.vocabulary.keyed_tables import KeyedTable
from headrace.features.vocabulary.lookup import Lookup
from headrace.features.workflow.workflow import BoundOp
from headrace.plugins import resolve

Values = dict[str, Value]


@dataclass(frozen=True)
class Step:
    """A fitted operator in its place in a chain."""

    graph: GraphWriter
    #: The operator; each function knows its class.
    op: Any
    types: Mapping[str, ValueType]
    state: Mapping[str, State]
    lookup: Callable[[str], Lookup]
    table: Callable[[str], KeyedTable]
    most_integers: int


#: Function that returns the part of an operator, in its place, that ONNX has no operator for, or None.
Lacks = Callable[[BoundOp, Callable[[str], Lookup]], str | None]


def _lacks_nothing(bound: BoundOp, lookup: Callable[[str], Lookup]) -> str | None:
    return None


@dataclass(frozen=True)
class OnnxWriter:
    """The ONNX body of an operator, which names it by `Op.onnx`."""

    #: Adds nodes that compute the operator's columns.
    write: Callable[[Step, Values], Values]
    lacks: Lacks = _lacks_nothing


def all_columns(lacks: Lacks = _lacks_nothing) -> Callable[[Callable[[Step, Values], Values]], OnnxWriter]:
    """Make the ONNX body of a function of all columns."""
    return lambda write: OnnxWriter(write, lacks)


def each_column(lacks: Lacks = _lacks_nothing) -> Callable[[Callable[[Step, str, Value], Value]], OnnxWriter]:
    """Make the ONNX body of a function of one column, by its name."""
    return lambda write: OnnxWriter(_each(write), lacks)


def _each(write: Callable[[Step, str, Value], Value]) -> Callable[[Step, Values], Values]:
    def write_each(step: Step, columns: Values) -> Values:
        out = {name: write(step, name, x) for name, x in columns.items()}
        if isinstance(step.op, WithIndicator) and step.op.indicator:
            for name, x in columns.items():
                missing = missing_of(step.graph, x) or step.graph.false_like(x.name)
                out[f"{name}_missing"] = Value(missing, "bool")
        return out

    return write_each


def _writer(op: Op) -> OnnxWriter | None:
    """Return the ONNX body that an operator's own class names; a base class's may not fit its subclass."""
    reference = vars(type(op)).get("onnx")
    if not reference:
        return None
    writer: OnnxWriter = resolve(reference, f"operator {op.reference()}", "ONNX body")
    return writer


def lacks(bound: BoundOp, lookup: Callable[[str], Lookup]) -> str | None:
    """Return the part of an operator in its place that ONNX has no operator for, or None."""
    writer = _writer(bound.op)
    return "no operator of ONNX does that" if writer is None else writer.lacks(bound, lookup)


def written(graph: GraphWriter, bound: BoundOp, columns: Values, **learned: Any) -> Values:
    """Add nodes for an operator and return the chain's columns after it.

    Args:
        graph: to which nodes are added.
        bound: the operator in its place.
        columns: the chain's columns before it.
        learned: state, lookup, table and most_integers of `Step`.
    """
    writer = _writer(bound.op)
    assert writer is not None
    out = writer.write(Step(graph, bound.op, bound.inputs, **learned), {name: columns[name] for name in bound.inputs})
    return out | {name: columns[name] for name in bound.passthrough}


def float64(step: Step, value: float) -> str:
    """Return a constant of float64."""
    return step.graph.constant(value, np.float64)


def int64(step: Step, value: int) -> str:
    """Return a constant of int64."""
    return step.graph.constant(value, np.int64)


@each_column()
def fill_missing(step: Step, name: str, x: Value) -> Value:
    """Fill missing values with the operator's constant."""
    graph, out = step.graph, step.op.type_of(element_of(step.types[name]))
    if out.element == "double":
        return _filled(graph, x, float(step.op.value))
    if x.missing is None:
        return x
    value = graph.constant(step.op.value, object if x.kind == "text" else np.int64)
    return Value(graph.select(x.missing, value, x.name), x.kind, None, x.length)


def _filled(graph: GraphWriter, x: Value, value: float) -> Value:
    number = doubles(graph, x)
    return real(x, graph.select(graph.add("IsNaN", number), graph.constant(value, np.float64), number))


@each_column()
def fill_median(step: Step, name: str, x: Value) -> Value:
    """Fill missing values with the learned median."""
    return _filled(step.graph, x, float(step.state[name]["median"]))


@each_column()
def clip(step: Step, name: str, x: Value) -> Value:
    """Limit numbers to the operator's bounds."""
    graph, is_integer = step.graph, step.op.type_of(element_of(step.types[name])).element == "bigint"
    out = x.name if is_integer else doubles(graph, x)
    for bound, compare in ((step.op.min, "Less"), (step.op.max, "Greater")):
        if bound is not None:
            limit = int64(step, int(bound)) if is_integer else float64(step, float(bound))
            out = graph.select(graph.add(compare, out, limit), limit, out)
    return x.with_name(out) if is_integer else real(x, out)


@each_column()
def log(step: Step, name: str, x: Value) -> Value:
    """Return log(1 + x) as log(u) x / (u - 1) with u = 1 + x rounded, or x where u is 1.

    The error is a few units of a double's last place (Goldberg, "What Every Computer Scientist Should Know About
    Floating-Point Arithmetic", 1991).
    """
    graph, number = step.graph, doubles(step.graph, x)
    unit = float64(step, 1.0)
    u = graph.add("Add", number, unit)
    near = graph.add("Equal", u, unit)
    less = graph.select(near, unit, graph.add("Sub", u, unit))
    logarithm = graph.select(near, number, graph.add("Mul", graph.add("Log", u), graph.add("Div", number, less)))
    infinite = graph.add("IsInf", number, detect_negative=0)
    logarithm = graph.select(infinite, number, logarithm)
    return real(x, graph.select(graph.add("Greater", number, float64(step, -1.0)), logarithm, float64(step, np.nan)))


def _scaled(low: str, width: Callable[[State], float]) -> Callable[[Step, str, Value], Value]:
    def scale(step: Step, name: str, x: Value) -> Value:
        state, graph = step.state[name], step.graph
        out = graph.add("Sub", doubles(graph, x), float64(step, float(state[low])))
        by = width(state)
        return real(x, graph.add("Div", out, float64(step, by)) if by > 0 else out)

    return scale


def _intervals(step: Step, x: Value, edges: list[float], compare: str) -> Value:
    """Return the code of each value's interval: 1 plus the number of edges below it, or not above it."""
    graph, number = step.graph, doubles(step.graph, x)
    over = graph.add(compare, graph.unsqueeze(number, -1), graph.constant(edges, np.float64))
    count = graph.add("ReduceSum", _int64(graph, over), graph.constant([-1], np.int64), keepdims=0)
    code = graph.add("Add", count, int64(step, 1))
    codes = graph.select(graph.add("IsNaN", number), int64(step, NULL_CODE), code)
    return Value(codes, "int", None, x.length)


def _int64(graph: GraphWriter, x: str) -> str:
    return integers(graph, Value(x, "bool"))


@each_column()
def bucketize(step: Step, name: str, x: Value) -> Value:
    """Return the number of the interval between given boundaries."""
    return _intervals(step, x, [float(b) for b in step.op.boundaries], "GreaterOrEqual")


@each_column()
def quantile_bin(step: Step, name: str, x: Value) -> Value:
    """Return the number of the interval between learned edges."""
    return _intervals(step, x, [float(e) for e in step.state[name]["edges"]], "Greater")


@each_column()
def reduce_dtype(step: Step, name: str, x: Value) -> Value:
    """Convert numbers to the smaller type; numbers that it cannot hold become missing."""
    graph, is_integer = step.graph, step.types[name].is_integer
    number = x.name if is_integer else doubles(graph, x)
    low, high = (int64(step, int(b)) if is_integer else float64(step, float(b)) for b in (step.op.min, step.op.max))
    held = graph.add("And", graph.add("GreaterOrEqual", number, low), graph.add("LessOrEqual", number, high))
    if is_integer:
        return Value(number, "int", graph.either(x.missing, graph.add("Not", held)), x.length)
    reduced = graph.select(held, number, float64(step, np.nan))
    if step.op.type_of(element_of(step.types[name])).element == "float":
        reduced = graph.cast(graph.cast(reduced, FLOAT), DOUBLE)
    return real(x, reduced)


def nan_where(graph: GraphWriter, missing: str | None, number: str) -> str:
    """Return numbers with NaN where values are missing; None: none is."""
    return number if missing is None else graph.select(missing, graph.constant(np.nan, np.float64), number)


@each_column()
def list_slice(step: Step, name: str, x: Value) -> Value:
    """Take the first or the last elements of each list."""
    graph, op = step.graph, step.op
    assert x.length is not None
    zero = int64(step, 0)
    if op.keep == "first":
        begin = graph.constant([[op.start]], np.int64)
        left = graph.add("Sub", x.length, int64(step, op.start))
        length = graph.add("Max", graph.add("Min", left, int64(step, op.length)), zero)
    else:
        end = graph.add("Max", graph.add("Sub", x.length, int64(step, op.start)), zero)
        first = graph.add("Max", graph.add("Sub", end, int64(step, op.length)), zero)
        begin, length = graph.unsqueeze(first, 1), graph.add("Sub", end, first)
    columns = graph.add("Min", graph.size(x.name, 1), int64(step, op.length))
    return part(graph, x, begin, columns, length)


@each_column()
def pad(step: Step, name: str, x: Value) -> Value:
    """Return the chain's final lists [rows, length], with 0 for missing values and beyond each list's end."""
    graph, width, lengths = step.graph, int64(step, step.op.length), x.length
    assert lengths is not None
    if not step.types[name].is_categorical:
        number = doubles(graph, x)
        x = real(x, graph.select(graph.add("IsNaN", number), float64(step, 0.0), number))
    begin = graph.constant([[0]], np.int64)
    if step.op.keep == "last":
        skipped = graph.add("Max", graph.add("Sub", lengths, width), int64(step, 0))
        begin = graph.unsqueeze(skipped, 1)
    elements = part(graph, x, begin, width, graph.add("Min", lengths, width))
    zero = float64(step, 0.0) if elements.kind == "real" else int64(step, 0)
    return elements.with_name(graph.select(behind_the_end(graph, elements), zero, elements.name))


@all_columns()
def rename(step: Step, columns: Values) -> Values:
    """Give the columns their new names."""
    return dict(zip(step.op.types(step.types), columns.values(), strict=True))


@all_columns()
def drop_low_cardinality(step: Step, columns: Values) -> Values:
    """Return the columns unchanged: the fit has already dropped small features."""
    return columns


normalize = OnnxWriter(_each(_scaled("mean", lambda state: float(state["std"]))))
normalize_minmax = OnnxWriter(_each(_scaled("min", lambda state: float(state["max"]) - float(state["min"]))))


#: Days from 0000-03-01 to 1970-01-01, and of 400, 100 and 4 years (Gregorian); 1970-01-01 was a Thursday.
_TO_1970, _ERA, _CENTURY, _FOUR = 719_468, 146_097, 36_524, 1_460
_THURSDAY = 3


def position(graph: GraphWriter, x: str, part: str, is_date: bool) -> str:
    """Return the hour, the weekday (Monday 0), the day of the year from 0 or the month from 0, int64 of the same shape.

    Input: int64 microseconds, or days of dates, since 1970 (UTC).
    """
    days = x if is_date else _quotient(graph, x, DAY_MICROS)
    if part == "hour":
        return graph.add("Div", _rest(graph, x, DAY_MICROS), _constant(graph, HOUR_MICROS))
    if part == "weekday":
        return _rest(graph, graph.add("Add", days, _constant(graph, _THURSDAY)), 7)
    year, month = _year_and_month(graph, days)
    if part == "month":
        return graph.add("Sub", month, _constant(graph, 1))
    return graph.add("Sub", days, _first_day(graph, year))


def _year_and_month(graph: GraphWriter, days: str) -> tuple[str, str]:
    """Return year and month, counted from March, so that the leap day is the last of its year.

    All divisions but the first have non-negative numerators.
    """
    shifted = graph.add("Add", days, _constant(graph, _TO_1970))
    era, day = _quotient(graph, shifted, _ERA), _rest(graph, shifted, _ERA)
    leaps = graph.add(
        "Sub", _div(graph, day, _CENTURY), graph.add("Add", _div(graph, day, _FOUR), _div(graph, day, _ERA - 1))
    )
    year = _div(graph, graph.add("Add", day, leaps), 365)
    days_before_year = graph.add(
        "Sub", graph.add("Add", _times(graph, year, 365), _div(graph, year, 4)), _div(graph, year, 100)
    )
    of_year = graph.add("Sub", day, days_before_year)
    # From March on, five months have 153 days.
    month = _div(graph, graph.add("Add", _times(graph, of_year, 5), _constant(graph, 2)), 153)
    march_year = graph.add("Add", year, _times(graph, era, 400))
    late = graph.add("GreaterOrEqual", month, _constant(graph, 10))
    real_month = graph.select(
        late, graph.add("Sub", month, _constant(graph, 9)), graph.add("Add", month, _constant(graph, 3))
    )
    real_year = graph.select(late, graph.add("Add", march_year, _constant(graph, 1)), march_year)
    return real_year, real_month


def _first_day(graph: GraphWriter, year: str) -> str:
    """Return the days from 1970-01-01 to the first of January of a year: 365 a year and the leap days before it."""
    previous_year = graph.add("Sub", year, _constant(graph, 1))
    leaps = graph.add("Sub", _quotient(graph, previous_year, 4), _quotient(graph, previous_year, 100))
    leaps = graph.add("Add", leaps, _quotient(graph, previous_year, 400))
    passed = graph.add("Add", _times(graph, previous_year, 365), leaps)
    # 719,162 days from 0001-01-01 to 1970-01-01.
    return graph.add("Sub", passed, _constant(graph, 719_162))


def _constant(graph: GraphWriter, number: int) -> str:
    return graph.constant(number, np.int64)


def _times(graph: GraphWriter, x: str, number: int) -> str:
    return graph.add("Mul", x, _constant(graph, number))


def _div(graph: GraphWriter, x: str, number: int) -> str:
    return graph.add("Div", x, _constant(graph, number))


def _rest(graph: GraphWriter, x: str, number: int) -> str:
    """Return the remainder, never negative."""
    return graph.add("Mod", x, _constant(graph, number))


def _quotient(graph: GraphWriter, x: str, number: int) -> str:
    """Return the quotient, rounded down."""
    return _div(graph, graph.add("Sub", x, _rest(graph, x, number)), number)


@all_columns()
def cyclic(step: Step, columns: Values) -> Values:
    """Look up the sine and cosine of each position."""
    graph, out = step.graph, {}
    for name, x in columns.items():
        for output, time_part in step.op.outputs_of(name):
            if time_part is None:
                place, period = graph.add("Mod", x.name, int64(step, step.op.period)), step.op.period
            else:
                place, period = (
                    position(graph, x.name, time_part, step.types[name].element == "date"),
                    PERIODS[time_part],
                )
            table = graph.constant(circle(period)[0 if output.endswith("_sin") else 1])
            coordinates = graph.add("Gather", table, place, axis=0)
            out[output] = real(x, nan_where(graph, x.missing, coordinates))
    return out


@all_columns()
def age(step: Step, columns: Values) -> Values:
    """Subtract each time from the event's."""
    graph, event = step.graph, step.op.event

    def micros(name: str) -> str:
        x = columns[name].name
        return graph.add("Mul", x, int64(step, DAY_MICROS)) if step.types[name].element == "date" else x

    out = {}
    for name, x in columns.items():
        if name != event:
            gap = graph.cast(graph.add("Sub", micros(event), micros(name)), DOUBLE)
            age = graph.add("Div", gap, float64(step, float(UNITS[step.op.unit])))
            missing = graph.either(columns[event].missing, x.missing)
            out[f"{name}_age"] = Value(nan_where(graph, missing, age), "real")
    return out
