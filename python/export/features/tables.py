"""What was learned of values, as tables of the graph: vocabularies, and numbers by key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.export.features.graph import GraphWriter
from headrace.export.features.values import Value
from headrace.features.functions.arrays import one_chunk
from headrace.features.vocabulary.keyed_tables import KeyedTable
from headrace.features.vocabulary.lookup import Lookup
from headrace.schema import FIRST_CODE, OOV_CODE

#: Integer keys in the graph itself (about 75 bytes each in the runtime's memory); more are in a mapped file.
MOST_INTEGERS = 1 << 20
#: Texts are in the graph in any case, about 420 bytes each in the runtime's memory.
MOST_TEXTS = 4_000_000


def codes(graph: GraphWriter, x: Value, lookup: Lookup, most_integers: int = MOST_INTEGERS) -> str:
    """`Lookup.codes` of values that are there: int64 of the same shape, OOV_CODE of what the vocabulary lacks."""
    if x.kind == "bool":
        found = lookup.codes(pa.array([True, False]))
        yes, no = (graph.constant(int(c), np.int64) for c in found)
        return graph.where(x.name, yes, no)
    if x.kind == "text":
        values, codes_ = one_chunk(lookup.table.column("value")), lookup.table.column("code").to_numpy()
        return _encoded(graph, x.name, values.to_numpy(zero_copy_only=False), codes_, OOV_CODE)
    keys, numbers = integer_keys(lookup)
    if len(keys) <= most_integers:
        return _encoded(graph, x.name, keys, numbers, OOV_CODE)
    return _searched(graph, x.name, keys, numbers, OOV_CODE)


def rows(graph: GraphWriter, x: Value, table: KeyedTable) -> str:
    """The row of each key, that behind the last one where there is none or it is missing: int64 of the same shape."""
    found = graph.add("Sub", codes(graph, x, table.lookup), graph.constant(FIRST_CODE, np.int64))
    none = graph.add("Less", found, graph.constant(0, np.int64))
    unknown = graph.either(none, x.missing)
    assert unknown is not None
    return graph.where(unknown, graph.constant(len(table), np.int64), found)


def taken(graph: GraphWriter, table: KeyedTable, column: str, rows: str, missing: float) -> str:
    """Values of a column, `missing` behind the last row: float64 (NaN of nulls), or int64 of one of whole numbers."""
    values = one_chunk(table.table.column(column)).to_numpy(zero_copy_only=False)
    kept = np.append(values, values.dtype.type(missing))
    return graph.add("Gather", graph.file(kept) if len(kept) > MOST_INTEGERS else graph.constant(kept), rows, axis=0)


def integer_keys(lookup: Lookup) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The values that are spelled as integers, ascending, and their codes."""
    index, numbers = lookup.integers
    keys = np.asarray(index, np.int64)
    order = np.argsort(keys, kind="stable")
    return keys[order], np.asarray(numbers, np.int64)[order]


def _encoded(graph: GraphWriter, x: str, keys: NDArray[Any], values: NDArray[np.int64], default: int) -> str:
    if len(keys):
        return graph.label_encoder(x, keys, values, default)
    same = graph.add("Shape", x)
    return graph.add("Expand", graph.constant(default, np.int64), same)


def _searched(graph: GraphWriter, x: str, keys: NDArray[np.int64], values: NDArray[np.int64], default: int) -> str:
    """By halving ascending keys, whose files the runtime maps: a step has five nodes, 20 steps are for a million."""
    table, base = graph.file(keys), graph.constant(0, np.int64)
    left = len(keys)
    while left > 1:
        half = left // 2
        middle = graph.add("Add", base, graph.constant(half, np.int64))
        at = graph.add("Gather", table, middle, axis=0)
        base = graph.where(graph.add("LessOrEqual", at, x), middle, base)
        left -= half
    found = graph.add("Equal", graph.add("Gather", table, base, axis=0), x)
    number = graph.add("Gather", graph.file(values), base, axis=0)
    return graph.where(found, number, graph.constant(default, np.int64))
