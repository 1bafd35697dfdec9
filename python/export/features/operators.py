"""headrace's operators by those of ONNX; what there is none for is named (`lacks`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.export.features.graph import DOUBLE, FLOAT, GraphWriter
from headrace.export.features.hashing import bucket, xxhash64_integers
from headrace.export.features.tables import MOST_TEXTS, codes, rows, taken
from headrace.export.features.times import position
from headrace.export.features.values import (
    Value,
    behind_the_end,
    doubles,
    integers,
    missing_of,
    part,
    real,
    zero_missing,
)
from headrace.features.functions.timestamps import DAY_MICROS
from headrace.features.ops.base import Op, State
from headrace.features.ops.bins import Bucketize, QuantileBin
from headrace.features.ops.categories import Categorify, DropLowCardinality
from headrace.features.ops.groups import JoinGroupby, TargetEncoding, ValueCount
from headrace.features.ops.hashing import HashBucket, HashedCross, RawId
from headrace.features.ops.lists import ListSlice, Pad
from headrace.features.ops.missing import FillMedian, FillMissing, WithIndicator
from headrace.features.ops.numbers import Clip, Log, Normalize, NormalizeMinMax, ReduceDtype
from headrace.features.ops.rename import Rename
from headrace.features.ops.times import PERIODS, UNITS, Age, Cyclic, circle
from headrace.features.types import ValueType, element_of
from headrace.features.vocabulary.keyed_tables import KeyedTable
from headrace.features.vocabulary.lookup import Lookup
from headrace.features.workflow.workflow import BoundOp
from headrace.schema import NULL_CODE

Values = dict[str, Value]


@dataclass(frozen=True)
class Step:
    """An operator in its place, with what it learned."""

    graph: GraphWriter
    #: Any operator: each function knows its own.
    op: Any
    types: Mapping[str, ValueType]
    state: Mapping[str, State]
    lookup: Callable[[str], Lookup]
    table: Callable[[str], KeyedTable]
    most_integers: int


def lacks(bound: BoundOp, lookup: Callable[[str], Lookup]) -> str | None:
    """What of an operator in its place ONNX has no operator for; None: nothing."""
    op, types = bound.op, bound.inputs
    if type(op) not in _WRITERS:
        return "no operator of ONNX does that"
    texts = [name for name, t in types.items() if t.element == "string"]
    if isinstance(op, HashBucket | HashedCross | RawId) and texts:
        return f"text is hashed ({', '.join(texts)}), and ONNX has no hash of texts"
    if isinstance(op, Categorify):
        if op.oov_buckets > 1:
            return "oov_buckets hash texts, and ONNX has no hash of texts"
        for name in texts:
            if (n := len(lookup(op.vocabulary_of(name)))) > MOST_TEXTS:
                return f"'{op.vocabulary_of(name)}' has {n:,} texts; more than {MOST_TEXTS:,} take gigabytes of memory"
    joint = op.by if isinstance(op, JoinGroupby) else tuple(types) if _is_together(op) else ()
    if len(joint) > 1:
        return f"a key of several columns ({', '.join(joint)}) is joined as text"
    return None


def written(graph: GraphWriter, bound: BoundOp, columns: Values, **learned: Any) -> Values:
    """The chain's columns after an operator: nodes are added for it. `learned`: state, lookup, table, most_integers."""
    step = Step(graph, bound.op, bound.inputs, **learned)
    out = _WRITERS[type(bound.op)](step, {name: columns[name] for name in bound.inputs})
    return out | {name: columns[name] for name in bound.passthrough}


def _is_together(op: Op) -> bool:
    return isinstance(op, TargetEncoding) and op.together


def _elementwise(one: Callable[[Step, str, Value], Value]) -> Callable[[Step, Values], Values]:
    def each(step: Step, columns: Values) -> Values:
        out = {name: one(step, name, x) for name, x in columns.items()}
        if isinstance(step.op, WithIndicator) and step.op.indicator:
            for name, x in columns.items():
                missing = missing_of(step.graph, x) or step.graph.false_like(x.name)
                out[f"{name}_missing"] = Value(missing, "bool")
        return out

    return each


def _number(step: Step, value: float) -> str:
    return step.graph.constant(value, np.float64)


def _whole(step: Step, value: int) -> str:
    return step.graph.constant(value, np.int64)


def _fill_missing(step: Step, name: str, x: Value) -> Value:
    graph, out = step.graph, step.op.type_of(element_of(step.types[name]))
    if out.element == "double":
        return _filled(graph, x, float(step.op.value))
    if x.missing is None:
        return x
    value = graph.constant(step.op.value, object if x.kind == "text" else np.int64)
    return Value(graph.where(x.missing, value, x.name), x.kind, None, x.length)


def _filled(graph: GraphWriter, x: Value, value: float) -> Value:
    number = doubles(graph, x)
    return real(x, graph.where(graph.add("IsNaN", number), graph.constant(value, np.float64), number))


def _fill_median(step: Step, name: str, x: Value) -> Value:
    return _filled(step.graph, x, float(step.state[name]["median"]))


def _clip(step: Step, name: str, x: Value) -> Value:
    graph, whole = step.graph, step.op.type_of(element_of(step.types[name])).element == "bigint"
    out = x.name if whole else doubles(graph, x)
    for bound, compare in ((step.op.min, "Less"), (step.op.max, "Greater")):
        if bound is not None:
            limit = _whole(step, int(bound)) if whole else _number(step, float(bound))
            out = graph.where(graph.add(compare, out, limit), limit, out)
    return x.with_name(out) if whole else real(x, out)


def _log(step: Step, name: str, x: Value) -> Value:
    """log(1 + x) by log(u) x / (u - 1) with u = 1 + x rounded, x where that is 1: within a few units of the last place
    of a double (Goldberg, "What Every Computer Scientist Should Know About Floating-Point Arithmetic", 1991).
    """
    graph, number = step.graph, doubles(step.graph, x)
    one = _number(step, 1.0)
    u = graph.add("Add", number, one)
    near = graph.add("Equal", u, one)
    less = graph.where(near, one, graph.add("Sub", u, one))
    made = graph.where(near, number, graph.add("Mul", graph.add("Log", u), graph.add("Div", number, less)))
    infinite = graph.add("IsInf", number, detect_negative=0)
    made = graph.where(infinite, number, made)
    return real(x, graph.where(graph.add("Greater", number, _number(step, -1.0)), made, _number(step, np.nan)))


def _scaled(low: str, width: Callable[[State], float]) -> Callable[[Step, str, Value], Value]:
    def one(step: Step, name: str, x: Value) -> Value:
        state, graph = step.state[name], step.graph
        out = graph.add("Sub", doubles(graph, x), _number(step, float(state[low])))
        by = width(state)
        return real(x, graph.add("Div", out, _number(step, by)) if by > 0 else out)

    return one


def _intervals(step: Step, x: Value, edges: list[float], compare: str) -> Value:
    """One more than the edges that are below, or not above."""
    graph, number = step.graph, doubles(step.graph, x)
    over = graph.add(compare, graph.unsqueeze(number, -1), graph.constant(edges, np.float64))
    count = graph.add("ReduceSum", _int64(graph, over), graph.constant([-1], np.int64), keepdims=0)
    code = graph.add("Add", count, _whole(step, 1))
    made = graph.where(graph.add("IsNaN", number), _whole(step, NULL_CODE), code)
    return Value(made, "int", None, x.length)


def _int64(graph: GraphWriter, x: str) -> str:
    return integers(graph, Value(x, "bool"))


def _bucketize(step: Step, name: str, x: Value) -> Value:
    return _intervals(step, x, [float(b) for b in step.op.boundaries], "GreaterOrEqual")


def _quantile_bin(step: Step, name: str, x: Value) -> Value:
    return _intervals(step, x, [float(e) for e in step.state[name]["edges"]], "Greater")


def _reduce_dtype(step: Step, name: str, x: Value) -> Value:
    graph, whole = step.graph, step.types[name].is_integer
    number = x.name if whole else doubles(graph, x)
    low, high = (_whole(step, int(b)) if whole else _number(step, float(b)) for b in (step.op.min, step.op.max))
    held = graph.add("And", graph.add("GreaterOrEqual", number, low), graph.add("LessOrEqual", number, high))
    if whole:
        return Value(number, "int", graph.either(x.missing, graph.add("Not", held)), x.length)
    kept = graph.where(held, number, _number(step, np.nan))
    if step.op.type_of(element_of(step.types[name])).element == "float":
        kept = graph.cast(graph.cast(kept, FLOAT), DOUBLE)
    return real(x, kept)


def _categorify(step: Step, name: str, x: Value) -> Value:
    found = codes(step.graph, x, step.lookup(step.op.vocabulary_of(name)), step.most_integers)
    return Value(zero_missing(step.graph, x, found), "int", None, x.length)


def _hash_bucket(step: Step, name: str, x: Value) -> Value:
    hashes = xxhash64_integers(step.graph, integers(step.graph, x))
    return Value(zero_missing(step.graph, x, bucket(step.graph, hashes, step.op.buckets)), "int", None, x.length)


def _raw_id(step: Step, name: str, x: Value) -> Value:
    number = integers(step.graph, x)
    found = xxhash64_integers(step.graph, number) if step.op.hash else number
    return Value(zero_missing(step.graph, x, found), "int", None, x.length)


def _hashed_cross(step: Step, columns: Values) -> Values:
    graph = step.graph
    hashes, missing = None, None
    for x in columns.values():
        # Of a missing value any number is hashed: the code is 0 then.
        hashes = xxhash64_integers(graph, integers(graph, x), hashes)
        missing = graph.either(missing, x.missing)
    assert hashes is not None
    (name,) = step.op.types(step.types)
    made = bucket(graph, hashes, step.op.buckets)
    return {name: Value(zero_missing(graph, Value(made, "int", missing), made), "int")}


def _cyclic(step: Step, columns: Values) -> Values:
    graph, out = step.graph, {}
    for name, x in columns.items():
        for made, of in step.op.outputs_of(name):
            if of is None:
                at, period = graph.add("Mod", x.name, _whole(step, step.op.period)), step.op.period
            else:
                at, period = position(graph, x.name, of, step.types[name].element == "date"), PERIODS[of]
            table = graph.constant(circle(period)[0 if made.endswith("_sin") else 1])
            found = graph.add("Gather", table, at, axis=0)
            out[made] = real(x, _unless(graph, x.missing, found))
    return out


def _unless(graph: GraphWriter, missing: str | None, number: str) -> str:
    return number if missing is None else graph.where(missing, graph.constant(np.nan, np.float64), number)


def _age(step: Step, columns: Values) -> Values:
    graph, event = step.graph, step.op.event

    def micros(name: str) -> str:
        x = columns[name].name
        return graph.add("Mul", x, _whole(step, DAY_MICROS)) if step.types[name].element == "date" else x

    out = {}
    for name, x in columns.items():
        if name != event:
            gap = graph.cast(graph.add("Sub", micros(event), micros(name)), DOUBLE)
            age = graph.add("Div", gap, _number(step, float(UNITS[step.op.unit])))
            missing = graph.either(columns[event].missing, x.missing)
            out[f"{name}_age"] = Value(_unless(graph, missing, age), "real")
    return out


def _list_slice(step: Step, name: str, x: Value) -> Value:
    graph, op = step.graph, step.op
    assert x.length is not None
    zero = _whole(step, 0)
    if op.keep == "first":
        begin = graph.constant([[op.start]], np.int64)
        left = graph.add("Sub", x.length, _whole(step, op.start))
        length = graph.add("Max", graph.add("Min", left, _whole(step, op.length)), zero)
    else:
        end = graph.add("Max", graph.add("Sub", x.length, _whole(step, op.start)), zero)
        first = graph.add("Max", graph.add("Sub", end, _whole(step, op.length)), zero)
        begin, length = graph.unsqueeze(first, 1), graph.add("Sub", end, first)
    columns = graph.add("Min", graph.size(x.name, 1), _whole(step, op.length))
    return part(graph, x, begin, columns, length)


def _pad(step: Step, name: str, x: Value) -> Value:
    """[rows, length], 0 for what is missing and behind each list's end: the chain's end."""
    graph, wanted, lengths = step.graph, _whole(step, step.op.length), x.length
    assert lengths is not None
    if not step.types[name].is_categorical:
        number = doubles(graph, x)
        x = real(x, graph.where(graph.add("IsNaN", number), _number(step, 0.0), number))
    begin = graph.constant([[0]], np.int64)
    if step.op.keep == "last":
        skipped = graph.add("Max", graph.add("Sub", lengths, wanted), _whole(step, 0))
        begin = graph.unsqueeze(skipped, 1)
    kept = part(graph, x, begin, wanted, graph.add("Min", lengths, wanted))
    zero = _number(step, 0.0) if kept.kind == "real" else _whole(step, 0)
    return kept.with_name(graph.where(behind_the_end(graph, kept), zero, kept.name))


def _rename(step: Step, columns: Values) -> Values:
    return dict(zip(step.op.types(step.types), columns.values(), strict=True))


def _same(step: Step, columns: Values) -> Values:
    return columns


def _value_count(step: Step, columns: Values) -> Values:
    out = {}
    for name, x in columns.items():
        table = step.table(name)
        count = taken(step.graph, table, "count", rows(step.graph, x, table), 0)
        if step.op.log:
            out[f"{name}_count"] = Value(_unless(step.graph, x.missing, count), "real")
        else:
            out[f"{name}_count"] = Value(count, "int", x.missing)
    return out


def _join_groupby(step: Step, columns: Values) -> Values:
    (table,) = (step.table(name) for name in step.op.statistics(step.types))
    (by,) = step.op.by
    at = rows(step.graph, columns[by], table)
    out = {}
    for name, type_ in step.op.types(step.types).items():
        whole = type_.element == "bigint"
        out[name] = Value(taken(step.graph, table, name, at, 0 if whole else np.nan), "int" if whole else "real")
    return out


def _target_encoding(step: Step, columns: Values) -> Values:
    out = {}
    for name, key in step.op.sources(step.types).items():
        table = step.table(name)
        at = rows(step.graph, columns[key[0]], table)
        out[name] = Value(taken(step.graph, table, "all", at, float(step.state[name]["priors"][0])), "real")
    return out


#: A new operator without a line here is one of the Python step.
_WRITERS: Mapping[type[Op], Callable[[Step, Values], Values]] = {
    FillMissing: _elementwise(_fill_missing),
    FillMedian: _elementwise(_fill_median),
    Clip: _elementwise(_clip),
    Log: _elementwise(_log),
    Normalize: _elementwise(_scaled("mean", lambda state: float(state["std"]))),
    NormalizeMinMax: _elementwise(_scaled("min", lambda state: float(state["max"]) - float(state["min"]))),
    Bucketize: _elementwise(_bucketize),
    QuantileBin: _elementwise(_quantile_bin),
    ReduceDtype: _elementwise(_reduce_dtype),
    Categorify: _elementwise(_categorify),
    HashBucket: _elementwise(_hash_bucket),
    RawId: _elementwise(_raw_id),
    HashedCross: _hashed_cross,
    Cyclic: _cyclic,
    Age: _age,
    ListSlice: _elementwise(_list_slice),
    Pad: _elementwise(_pad),
    Rename: _rename,
    DropLowCardinality: _same,
    ValueCount: _value_count,
    JoinGroupby: _join_groupby,
    TargetEncoding: _target_encoding,
}
