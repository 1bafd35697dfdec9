"""Codes of values in ONNX: vocabularies and tables by key, hashes, and the operators over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.config.schema import FIRST_CODE, OOV_CODE
from headrace.export.features.graph import INT64, UINT64, GraphWriter, Value, integers, zero_missing
from headrace.export.features.operators import Step, Values, all_columns, each_column, nan_where
from headrace.features.functions.arrays import one_chunk
from headrace.features.vocabulary.keyed_tables import KeyedTable
from headrace.features.vocabulary.lookup import Lookup
from headrace.features.workflow.workflow import BoundOp

#: Most integer keys within the graph (about 75 bytes each in the runtime's memory); more are in a mapped file.
MOST_INTEGERS = 1 << 20
#: Most texts, which are always within the graph: about 420 bytes each in the runtime's memory.
MOST_TEXTS = 4_000_000


def codes(graph: GraphWriter, x: Value, lookup: Lookup, most_integers: int = MOST_INTEGERS) -> str:
    """Add the nodes of `Lookup.codes`: int64 of the values' shape, OOV_CODE for values that the vocabulary lacks."""
    if x.kind == "bool":
        both_codes = lookup.codes(pa.array([True, False]))
        yes, no = (graph.constant(int(c), np.int64) for c in both_codes)
        return graph.select(x.name, yes, no)
    if x.kind == "text":
        values, codes_ = one_chunk(lookup.table.column("value")), lookup.table.column("code").to_numpy()
        return _encoded(graph, x.name, values.to_numpy(zero_copy_only=False), codes_, OOV_CODE)
    keys, numbers = integer_keys(lookup)
    if len(keys) <= most_integers:
        return _encoded(graph, x.name, keys, numbers, OOV_CODE)
    return _searched(graph, x.name, keys, numbers, OOV_CODE)


def rows(graph: GraphWriter, x: Value, table: KeyedTable) -> str:
    """Return the row of each key, int64 of the same shape; the number of rows for unknown and missing keys."""
    row_numbers = graph.add("Sub", codes(graph, x, table.lookup), graph.constant(FIRST_CODE, np.int64))
    is_unknown = graph.add("Less", row_numbers, graph.constant(0, np.int64))
    unknown = graph.either(is_unknown, x.missing)
    assert unknown is not None
    return graph.select(unknown, graph.constant(len(table), np.int64), row_numbers)


def taken(graph: GraphWriter, table: KeyedTable, column: str, rows: str, missing: float) -> str:
    """Return a column at `rows`, `missing` beyond the last row: float64 (NaN for null), or int64 of integers."""
    values = one_chunk(table.table.column(column)).to_numpy(zero_copy_only=False)
    padded = np.append(values, values.dtype.type(missing))
    return graph.add(
        "Gather", graph.file(padded) if len(padded) > MOST_INTEGERS else graph.constant(padded), rows, axis=0
    )


def integer_keys(lookup: Lookup) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the values that are spelled as integers, ascending, and their codes."""
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
    """Search ascending keys by bisection; the runtime maps their files. A million keys take 20 steps of five nodes."""
    table, base = graph.file(keys), graph.constant(0, np.int64)
    left = len(keys)
    while left > 1:
        half = left // 2
        middle = graph.add("Add", base, graph.constant(half, np.int64))
        middle_keys = graph.add("Gather", table, middle, axis=0)
        base = graph.select(graph.add("LessOrEqual", middle_keys, x), middle, base)
        left -= half
    is_known = graph.add("Equal", graph.add("Gather", table, base, axis=0), x)
    number = graph.add("Gather", graph.file(values), base, axis=0)
    return graph.select(is_known, number, graph.constant(default, np.int64))


#: Primes of XXH64 (Collet), and the seed of Spark.
_PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_SEED, _BYTES, _BITS = 42, 8, 64


def xxhash64_integers(graph: GraphWriter, x: str, seed: str | None = None) -> str:
    """Hash int64 [..] to int64 [..]. `seed`: the hash of the columns before this one."""
    p1, p2, p3, p4, p5 = (_signed(p) for p in _PRIMES)
    started = _add(graph, seed if seed is not None else graph.constant(_SEED, np.int64), p5 + _BYTES)
    word = _times(graph, _rotated(graph, _times(graph, x, p2), 31), p1)
    hashes = graph.add("BitwiseXor", started, word)
    hashes = _add(graph, _times(graph, _rotated(graph, hashes, 27), p1), p4)
    for bits, prime in ((33, p2), (29, p3), (32, None)):
        hashes = graph.add("BitwiseXor", hashes, _shifted(graph, hashes, bits, "RIGHT"))
        hashes = hashes if prime is None else _times(graph, hashes, prime)
    return hashes


def bucket(graph: GraphWriter, hashes: str, buckets: int) -> str:
    """Return hashes as buckets 1 to `buckets`."""
    left = graph.add("Mod", hashes, graph.constant(buckets, np.int64))
    return graph.add("Add", left, graph.constant(1, np.int64))


def _signed(number: int) -> int:
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


def _times(graph: GraphWriter, x: str, number: int) -> str:
    return graph.add("Mul", x, graph.constant(number, np.int64))


def _add(graph: GraphWriter, x: str, number: int) -> str:
    return graph.add("Add", x, graph.constant(number, np.int64))


def _shifted(graph: GraphWriter, x: str, bits: int, direction: str) -> str:
    moved = graph.add("BitShift", graph.cast(x, UINT64), graph.constant(bits, np.uint64), direction=direction)
    return graph.cast(moved, INT64)


def _rotated(graph: GraphWriter, x: str, bits: int) -> str:
    return graph.add("BitwiseOr", _shifted(graph, x, bits, "LEFT"), _shifted(graph, x, _BITS - bits, "RIGHT"))


def _texts_of(bound: BoundOp) -> list[str]:
    return [name for name, type_ in bound.inputs.items() if type_.element == "string"]


def _lacks_text_hash(bound: BoundOp, lookup: Callable[[str], Lookup]) -> str | None:
    texts = _texts_of(bound)
    return f"text is hashed ({', '.join(texts)}), and ONNX has no hash of texts" if texts else None


def _lacks_vocabulary(bound: BoundOp, lookup: Callable[[str], Lookup]) -> str | None:
    op: Any = bound.op
    if op.oov_buckets > 1:
        return "oov_buckets hash texts, and ONNX has no hash of texts"
    for name in _texts_of(bound):
        if (n := len(lookup(op.vocabulary_of(name)))) > MOST_TEXTS:
            return f"'{op.vocabulary_of(name)}' has {n:,} texts; more than {MOST_TEXTS:,} take gigabytes of memory"
    return None


def _lacks_joint_key(columns: tuple[str, ...]) -> str | None:
    return f"a key of several columns ({', '.join(columns)}) is joined as text" if len(columns) > 1 else None


def _lacks_group_key(bound: BoundOp, lookup: Callable[[str], Lookup]) -> str | None:
    op: Any = bound.op
    return _lacks_joint_key(op.by)


def _lacks_joint_target(bound: BoundOp, lookup: Callable[[str], Lookup]) -> str | None:
    op: Any = bound.op
    return _lacks_joint_key(tuple(bound.inputs)) if op.together else None


@each_column(_lacks_vocabulary)
def categorify(step: Step, name: str, x: Value) -> Value:
    """Look values up in the vocabulary of the column."""
    column_codes = codes(step.graph, x, step.lookup(step.op.vocabulary_of(name)), step.most_integers)
    return Value(zero_missing(step.graph, x, column_codes), "int", None, x.length)


@each_column(_lacks_text_hash)
def hash_bucket(step: Step, name: str, x: Value) -> Value:
    """Hash each value into a bucket."""
    hashes = xxhash64_integers(step.graph, integers(step.graph, x))
    return Value(zero_missing(step.graph, x, bucket(step.graph, hashes, step.op.buckets)), "int", None, x.length)


@each_column(_lacks_text_hash)
def raw_id(step: Step, name: str, x: Value) -> Value:
    """Return integers as they are, or their hashes."""
    number = integers(step.graph, x)
    ids = xxhash64_integers(step.graph, number) if step.op.hash else number
    return Value(zero_missing(step.graph, x, ids), "int", None, x.length)


@all_columns(_lacks_text_hash)
def hashed_cross(step: Step, columns: Values) -> Values:
    """Hash all columns together into one bucket."""
    graph = step.graph
    hashes, missing = None, None
    for x in columns.values():
        # A missing value's number is hashed like any other; its code becomes 0 in the end.
        hashes = xxhash64_integers(graph, integers(graph, x), hashes)
        missing = graph.either(missing, x.missing)
    assert hashes is not None
    (name,) = step.op.types(step.types)
    buckets = bucket(graph, hashes, step.op.buckets)
    return {name: Value(zero_missing(graph, Value(buckets, "int", missing), buckets), "int")}


@all_columns()
def value_count(step: Step, columns: Values) -> Values:
    """Look up the number of occurrences of each value in the training range."""
    out = {}
    for name, x in columns.items():
        table = step.table(name)
        count = taken(step.graph, table, "count", rows(step.graph, x, table), 0)
        if step.op.log:
            out[f"{name}_count"] = Value(nan_where(step.graph, x.missing, count), "real")
        else:
            out[f"{name}_count"] = Value(count, "int", x.missing)
    return out


@all_columns(_lacks_group_key)
def join_groupby(step: Step, columns: Values) -> Values:
    """Look up the statistics of each key."""
    (table,) = (step.table(name) for name in step.op.statistics(step.types))
    (by,) = step.op.by
    row_numbers = rows(step.graph, columns[by], table)
    out = {}
    for name, type_ in step.op.types(step.types).items():
        is_integer = type_.element == "bigint"
        out[name] = Value(
            taken(step.graph, table, name, row_numbers, 0 if is_integer else np.nan), "int" if is_integer else "real"
        )
    return out


@all_columns(_lacks_joint_target)
def target_encoding(step: Step, columns: Values) -> Values:
    """Look up the mean target of each key."""
    out = {}
    for name, key in step.op.sources(step.types).items():
        table = step.table(name)
        row_numbers = rows(step.graph, columns[key[0]], table)
        out[name] = Value(taken(step.graph, table, "all", row_numbers, float(step.state[name]["priors"][0])), "real")
    return out
