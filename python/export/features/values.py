"""A column on its way through the graph."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from headrace.export.features.graph import DOUBLE, INT64, GraphWriter


@dataclass(frozen=True)
class Value:
    """A column between two operators.

    Attributes:
        name: of its tensor [rows], of a list [rows, length]: reals are float64, integers, times, codes and raw ids
            int64, others string and bool.
        kind: real, int, bool or text.
        missing: of those that are no reals, a bool tensor of the same shape; None: none is. A real is missing where it
            is NaN.
        length: of a list: int64 [rows].
    """

    name: str
    kind: str
    missing: str | None = None
    length: str | None = None

    def with_name(self, name: str, kind: str | None = None) -> Value:
        """The same lists and missing values with other numbers."""
        return replace(self, name=name, kind=kind or self.kind)


def real(x: Value, name: str) -> Value:
    """Numbers float64 in the lists of x, NaN where they are missing."""
    return Value(name, "real", None, x.length)


def doubles(graph: GraphWriter, x: Value) -> str:
    """Any numbers as float64, NaN where they are missing."""
    if x.kind == "real":
        return x.name
    out = graph.cast(x.name, DOUBLE)
    return out if x.missing is None else graph.where(x.missing, graph.constant(np.nan, np.float64), out)


def integers(graph: GraphWriter, x: Value) -> str:
    """Integers and booleans as int64."""
    return graph.cast(x.name, INT64) if x.kind == "bool" else x.name


def missing_of(graph: GraphWriter, x: Value) -> str | None:
    """bool of the same shape, None where none is."""
    return graph.add("IsNaN", x.name) if x.kind == "real" else x.missing


def zero_missing(graph: GraphWriter, x: Value, name: str) -> str:
    """int64 numbers with 0 where x is missing."""
    missing = missing_of(graph, x)
    return name if missing is None else graph.where(missing, graph.constant(0, np.int64), name)


def part(graph: GraphWriter, x: Value, start: str, columns: str, length: str) -> Value:
    """Elements of each list from `start` int64 [rows, 1] on, as many as `columns` (int64, a scalar) says; of these
    `length` int64 [rows] are the list's.
    """
    last = graph.add("Sub", graph.size(x.name, 1), graph.constant(1, np.int64))
    step = graph.constant(1, np.int64)
    places = graph.add("Add", start, graph.add("Range", graph.constant(0, np.int64), columns, step))
    places = graph.add("Min", graph.add("Max", places, graph.constant(0, np.int64)), last)
    rows = graph.add("Concat", graph.add("Shape", x.name, start=0, end=1), graph.unsqueeze(columns, 0), axis=0)
    places = graph.add("Expand", places, rows)
    name = graph.add("GatherElements", x.name, places, axis=1)
    missing = None if x.missing is None else graph.add("GatherElements", x.missing, places, axis=1)
    return Value(name, x.kind, missing, length)


def behind_the_end(graph: GraphWriter, x: Value) -> str:
    """bool [rows, length]: which elements are not the list's."""
    assert x.length is not None
    zero, one = graph.constant(0, np.int64), graph.constant(1, np.int64)
    places = graph.unsqueeze(graph.add("Range", zero, graph.size(x.name, 1), one), 0)
    return graph.add("GreaterOrEqual", places, graph.unsqueeze(x.length, 1))
