"""Times in ONNX: their positions on circles by whole numbers, and the operators cyclic and age."""

from __future__ import annotations

import numpy as np

from headrace.export.features.graph import DOUBLE, GraphWriter, Value, real
from headrace.export.features.operators import Step, Values, all_columns, float64, int64, nan_where
from headrace.features.functions.timestamps import DAY_MICROS, HOUR_MICROS
from headrace.features.ops.times import PERIODS, UNITS, circle

#: Days from 0000-03-01 to 1970-01-01, and of 400, 100 and 4 years (Gregorian); 1970-01-01 was a Thursday.
_TO_1970, _ERA, _CENTURY, _FOUR = 719_468, 146_097, 36_524, 1_460
_THURSDAY = 3


def position(graph: GraphWriter, x: str, part: str, is_date: bool) -> str:
    """Return the hour, the weekday (Monday 0), the day of the year from 0 or the month from 0, int64 of the same shape.

    Input: int64 microseconds, or days of dates, since 1970 (UTC).
    """
    days = x if is_date else _quotient(graph, x, DAY_MICROS)
    if part == "hour":
        return graph.add("Div", _rest(graph, x, DAY_MICROS), _int64(graph, HOUR_MICROS))
    if part == "weekday":
        return _rest(graph, graph.add("Add", days, _int64(graph, _THURSDAY)), 7)
    year, month = _year_and_month(graph, days)
    if part == "month":
        return graph.add("Sub", month, _int64(graph, 1))
    return graph.add("Sub", days, _first_day(graph, year))


def _year_and_month(graph: GraphWriter, days: str) -> tuple[str, str]:
    """Count years from March, so that the leap day is their last; all divisions but the first are of numbers that
    are not negative.
    """
    shifted = graph.add("Add", days, _int64(graph, _TO_1970))
    era, day = _quotient(graph, shifted, _ERA), _rest(graph, shifted, _ERA)
    leaps = graph.add(
        "Sub", _div(graph, day, _CENTURY), graph.add("Add", _div(graph, day, _FOUR), _div(graph, day, _ERA - 1))
    )
    year = _div(graph, graph.add("Add", day, leaps), 365)
    days_before_year = graph.add(
        "Sub", graph.add("Add", _times(graph, year, 365), _div(graph, year, 4)), _div(graph, year, 100)
    )
    of_year = graph.add("Sub", day, days_before_year)
    # Months of 153 days in five, from March on.
    month = _div(graph, graph.add("Add", _times(graph, of_year, 5), _int64(graph, 2)), 153)
    march_year = graph.add("Add", year, _times(graph, era, 400))
    late = graph.add("GreaterOrEqual", month, _int64(graph, 10))
    real_month = graph.select(
        late, graph.add("Sub", month, _int64(graph, 9)), graph.add("Add", month, _int64(graph, 3))
    )
    real_year = graph.select(late, graph.add("Add", march_year, _int64(graph, 1)), march_year)
    return real_year, real_month


def _first_day(graph: GraphWriter, year: str) -> str:
    """Return the days from 1970-01-01 to the first of January of a year: 365 a year and the leap days before it."""
    previous_year = graph.add("Sub", year, _int64(graph, 1))
    leaps = graph.add("Sub", _quotient(graph, previous_year, 4), _quotient(graph, previous_year, 100))
    leaps = graph.add("Add", leaps, _quotient(graph, previous_year, 400))
    passed = graph.add("Add", _times(graph, previous_year, 365), leaps)
    # 719,162 days from 0001-01-01 to 1970-01-01.
    return graph.add("Sub", passed, _int64(graph, 719_162))


def _int64(graph: GraphWriter, number: int) -> str:
    return graph.constant(number, np.int64)


def _times(graph: GraphWriter, x: str, number: int) -> str:
    return graph.add("Mul", x, _int64(graph, number))


def _div(graph: GraphWriter, x: str, number: int) -> str:
    return graph.add("Div", x, _int64(graph, number))


def _rest(graph: GraphWriter, x: str, number: int) -> str:
    """Return the remainder, never negative."""
    return graph.add("Mod", x, _int64(graph, number))


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
