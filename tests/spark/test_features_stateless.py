"""Row operators without a fit: both engines to the bit, and each against a computation in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from headrace.config import Chain
from headrace.config.schema import TableColumn
from headrace.features.spark.transform import transform
from headrace.features.vocabulary.lookup import Lookup
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from tests.spark.test_features_bodies import BIGS, BITS, INTS, REALS, TEXTS, as_batch, as_frame, assert_same_bits

# Spark's own bodies are what is compared.
pytestmark = pytest.mark.usefixtures("generated_code")

TYPES = {
    "x": "double",
    "f": "float",
    "i": "int",
    "b": "bigint",
    "flag": "boolean",
    "s": "string",
    "t": "string",
    "at": "timestamp",
    "born": "timestamp",
    "day": "date",
    "ss": "array<string>",
    "tt": "array<string>",
    "ids": "array<bigint>",
    "is": "array<int>",
    "ds": "array<double>",
    "label": "int",
}
EDGES = [-2, 0.0, 0.5, 3]

Row = dict[str, Any]
#: A feature's value (None: missing) for a row, or the values of a list.
Expected = Callable[[Row], Any]


def given_value(row: Row, name: str) -> Any:
    """Return a value as operators see it: NaN is missing, a missing list is empty."""
    x = row[name]
    if TYPES[name].startswith("array"):
        return [None if isinstance(v, float) and math.isnan(v) else v for v in x or []]
    return None if isinstance(x, float) and math.isnan(x) else x


def each(name: str, f: Callable[[Any], Any]) -> Expected:
    """A function of a value that is there."""

    def apply(row: Row) -> Any:
        x = given_value(row, name)
        return None if x is None else f(x)

    return apply


def bucket(x: float | None) -> int:
    return 0 if x is None else 1 + sum(float(edge) <= float(x) for edge in EDGES)


def log1p_of_filled(x: Any) -> float | None:
    filled = 1.0 if x is None else float(x)
    return math.log1p(filled) if filled > -1 else None


def xxh64(data: bytes, seed: int) -> int:
    """XXH64 after its specification, one value at a time."""
    p1, p2, p3, p4, p5 = (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
    mask = 2**64 - 1

    def rot(v: int, n: int) -> int:
        return ((v << n) | (v >> (64 - n))) & mask

    def round_(acc: int, lane: int) -> int:
        return rot((acc + lane * p2) & mask, 31) * p1 & mask

    h, rest = (seed + p5) & mask, data
    if len(data) >= 32:
        v = [(seed + p1 + p2) & mask, (seed + p2) & mask, seed, (seed - p1) & mask]
        while len(rest) >= 32:
            v = [round_(acc, int.from_bytes(rest[8 * k : 8 * k + 8], "little")) for k, acc in enumerate(v)]
            rest = rest[32:]
        h = sum(rot(acc, n) for acc, n in zip(v, (1, 7, 12, 18), strict=True)) & mask
        for acc in v:
            h = ((h ^ round_(0, acc)) * p1 + p4) & mask
    h = (h + len(data)) & mask
    while len(rest) >= 8:
        h = (rot(h ^ round_(0, int.from_bytes(rest[:8], "little")), 27) * p1 + p4) & mask
        rest = rest[8:]
    if len(rest) >= 4:
        h = (rot(h ^ (int.from_bytes(rest[:4], "little") * p1 & mask), 23) * p2 + p3) & mask
        rest = rest[4:]
    for byte in rest:
        h = rot(h ^ (byte * p5 & mask), 11) * p1 & mask
    h = (h ^ (h >> 33)) * p2 & mask
    h = (h ^ (h >> 29)) * p3 & mask
    return h ^ (h >> 32)


def hashed(data: bytes) -> int:
    h = xxh64(data, 42)
    return h - 2**64 if h >> 63 else h


def crossed(names: list[str], buckets: int) -> Expected:
    def cross(row: Row) -> int:
        h = 42
        for name in names:
            x = row[name]
            if x is None:
                return 0
            h = xxh64(x.encode() if isinstance(x, str) else int(x).to_bytes(8, "little", signed=True), h)
        return (h - 2**64 if h >> 63 else h) % buckets + 1

    return cross


def alike(a: str, b: str, metric: str) -> Expected:
    def similarity(row: Row) -> float | None:
        left, right = ({v for v in row[n] or [] if v is not None} for n in (a, b))
        if not left or not right:
            return None
        common = len(left & right)
        under = {
            "jaccard": len(left | right),
            "cosine": math.sqrt(len(left) * len(right)),
            "overlap": min(len(left), len(right)),
        }[metric]
        return common / under

    return similarity


def on_circle(f: Callable[[float], float], period: int, position: Callable[[Any], int]) -> Callable[[Any], float]:
    return lambda x: f(2 * math.pi * position(x) / period)


def ago(name: str, seconds: int) -> Expected:
    def age(row: Row) -> float | None:
        earlier_time, row_time = row[name], row["at"]
        if earlier_time is None or row_time is None:
            return None
        if not isinstance(earlier_time, datetime):
            earlier_time = datetime(earlier_time.year, earlier_time.month, earlier_time.day, tzinfo=UTC)
        gap = row_time - earlier_time
        return float((gap.days * 86_400 + gap.seconds) * 10**6 + gap.microseconds) / float(seconds * 10**6)

    return age


def padded(values: list[Any], length: int, keep: str = "first") -> list[Any]:
    elements = values[:length] if keep == "first" else values[max(len(values) - length, 0) :]
    return elements + [0] * (length - len(elements))


def last(values: list[Any], start: int, length: int) -> list[Any]:
    end = max(len(values) - start, 0)
    return values[max(end - length, 0) : end]


def clipped(low: float, high: float, as_: Callable[[Any], Any] = lambda v: v) -> Callable[[Any], Any]:
    return lambda x: as_(x) if low <= x <= high else None


PARTS: dict[str, tuple[int, Callable[[Any], int]]] = {
    "hour": (24, lambda t: t.hour),
    "weekday": (7, lambda t: t.weekday()),
    "day": (366, lambda t: t.timetuple().tm_yday - 1),
    "month": (12, lambda t: t.month - 1),
}
CODES = {"a": 2, "é": 3, "": 4}


def cyclic_of(name: str, parts: list[str]) -> dict[str, Expected]:
    return {
        f"{name}_{p}_{n}": each(name, on_circle(f, *PARTS[p]))
        for p in parts
        for n, f in (("sin", math.sin), ("cos", math.cos))
    }


#: Columns, operators, and what comes out.
CASES: list[tuple[str, list[Any], dict[str, Expected]]] = [
    (
        "x i flag",
        [{"fill_missing": {"value": 1, "indicator": True}}, "log", {"clip": {"max": 8}}],
        {
            **{
                n: lambda r, n=n: (lambda v: None if v is None else min(v, 8.0))(log1p_of_filled(given_value(r, n)))
                for n in ("x", "i", "flag")
            },
            **{f"{n}_missing": lambda r, n=n: float(given_value(r, n) is None) for n in ("x", "i", "flag")},
        },
    ),
    (
        "s",
        [{"fill_missing": {"value": "é", "indicator": True}}, {"hash_bucket": {"buckets": 50}}],
        {
            "s": lambda r: crossed(["s"], 50)({"s": "é" if r["s"] is None else r["s"]}),
            "s_missing": lambda r: float(r["s"] is None),
        },
    ),
    (
        "x f b flag",
        [{"bucketize": {"boundaries": EDGES}}, {"rename": {"suffix": "_bin"}}],
        {f"{n}_bin": lambda r, n=n: bucket(given_value(r, n)) for n in ("x", "f", "b", "flag")},
    ),
    (
        "ds",
        [{"bucketize": {"boundaries": EDGES}}, {"pad": {"length": 3, "keep": "last"}}],
        {"ds": lambda r: padded([bucket(v) for v in given_value(r, "ds")], 3, "last")},
    ),
    ("s t", [{"hashed_cross": {"buckets": 1000}}], {"s_X_t": crossed(["s", "t"], 1000)}),
    (
        "b t",
        ["raw_id", {"rename": {"suffix": "_id"}}],
        {"b_id": lambda r: r["b"] or 0, "t_id": lambda r: 0 if r["t"] is None else hashed(r["t"].encode())},
    ),
    (
        "i",
        [{"raw_id": {"hash": True}}, {"rename": {"to": "i_id"}}],
        {"i_id": lambda r: 0 if r["i"] is None else hashed(r["i"].to_bytes(8, "little", signed=True))},
    ),
    (
        "ids",
        ["raw_id", {"pad": {"length": 2}}, {"rename": {"to": "ids_raw"}}],
        {"ids_raw": lambda r: padded([v or 0 for v in r["ids"] or []], 2)},
    ),
    ("b flag i t", [{"hashed_cross": {"buckets": 7, "to": "wide"}}], {"wide": crossed(["b", "flag", "i", "t"], 7)}),
    (
        "at",
        [{"cyclic": {"of": ["hour", "weekday", "day", "month"]}}],
        cyclic_of("at", ["hour", "weekday", "day", "month"]),
    ),
    (
        "day",
        [{"cyclic": {"of": "weekday"}}, {"rename": {"to": {"day_weekday_sin": "wday"}}}],
        {("wday" if n == "day_weekday_sin" else n): e for n, e in cyclic_of("day", ["weekday"]).items()},
    ),
    (
        "b i",
        [{"cyclic": {"period": 7}}],
        {
            f"{n}_{name}": each(n, on_circle(f, 7, lambda v: v % 7))
            for n in ("b", "i")
            for name, f in (("sin", math.sin), ("cos", math.cos))
        },
    ),
    (
        "at born day",
        [{"age": {"event": "at"}}, {"reduce_dtype": {"min": -1e6, "max": 1e6}}],
        {"born_age": ago("born", 86_400), "day_age": ago("day", 86_400)},
    ),
    ("born at", [{"age": {"event": "at", "unit": "hours"}}, {"rename": {"to": "hours"}}], {"hours": ago("born", 3600)}),
    (
        "b",
        [
            {"reduce_dtype": {"min": -100, "max": 2**53 + 1}},
            {"clip": {"min": 2**53}},
            {"rename": {"to": "b2"}},
            {"hash_bucket": {"buckets": 99}},
        ],
        {"b2": lambda r: crossed(["v"], 99)({"v": each("b", clipped(-100, 2**53 + 1, lambda v: max(v, 2**53)))(r)})},
    ),
    (
        "x",
        [{"reduce_dtype": {"min": -1, "max": 1000}}, {"rename": {"prefix": "small_"}}],
        {"small_x": each("x", clipped(-1, 1000, np.float32))},
    ),
    ("i", [{"reduce_dtype": {"min": -3, "max": 3}}, {"rename": {"to": "i3"}}], {"i3": each("i", clipped(-3, 3))}),
    ("ss tt", [{"column_similarity": {}}], {"ss_tt_similarity": alike("ss", "tt", "jaccard")}),
    ("tt ss", [{"column_similarity": {"metric": "cosine", "to": "cosine"}}], {"cosine": alike("ss", "tt", "cosine")}),
    (
        "ids is",
        [{"column_similarity": {"metric": "overlap", "to": "common"}}],
        {"common": alike("ids", "is", "overlap")},
    ),
    (
        "ids",
        [
            {"list_slice": {"start": 1, "length": 3, "keep": "last"}},
            {"hash_bucket": {"buckets": 9}},
            {"pad": {"length": 2, "keep": "last"}},
        ],
        {"ids": lambda r: padded([crossed(["v"], 9)({"v": v}) for v in last(r["ids"] or [], 1, 3)], 2, "last")},
    ),
    (
        "ss",
        [
            {"list_slice": {"length": 3, "keep": "last"}},
            {"categorify": {"vocabulary": "v"}},
            {"pad": {"length": 2, "keep": "last"}},
        ],
        {"ss": lambda r: padded([0 if v is None else CODES.get(v, 1) for v in last(r["ss"] or [], 0, 3)], 2, "last")},
    ),
    (
        "is",
        [{"list_slice": {"start": 1, "length": 2}}, {"pad": {"length": 3}}],
        {"is": lambda r: padded((r["is"] or [])[1:3], 3)},
    ),
]

TIMES = st.none() | st.datetimes(datetime(1890, 1, 1), datetime(2120, 1, 1), timezones=st.just(UTC))
DAYS = (
    st.none() | st.dates(date(1890, 1, 1), date(2120, 1, 1)) | st.sampled_from([date(2024, 12, 31), date(1970, 1, 1)])
)
LONG = TEXTS | st.sampled_from(["x" * 31, "ü" * 40])
FEW = st.none() | st.lists(st.none() | st.sampled_from(["a", "é", "", "1", "日本"]), max_size=6)
SMALL = st.integers(-1, 1)


def lists_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | st.lists(values, max_size=5)


ROW = st.fixed_dictionaries(
    {
        "x": REALS,
        "f": st.none() | st.floats(width=32),
        "i": INTS,
        "b": BIGS,
        "flag": BITS,
        "s": LONG,
        "t": LONG,
        "at": TIMES,
        "born": TIMES,
        "day": DAYS,
        "ss": FEW,
        "tt": FEW,
        "ids": lists_of(SMALL | BIGS),
        "is": lists_of(SMALL | INTS),
        "ds": lists_of(REALS),
    }
)


def build() -> FittedWorkflow:
    chains = [Chain(columns=tuple(names.split()), ops=tuple(ops)) for names, ops, _ in CASES]
    w = Workflow(chains, [TableColumn(name=n, type=t) for n, t in TYPES.items()], label="label")  # type: ignore[arg-type]
    states = [[{} for _ in chain.steps] for chain in w.chains]
    table = pa.table({"value": list(CODES), "code": pa.array(list(CODES.values()), pa.int64())})
    return FittedWorkflow(w, states, {"v": Lookup(table)})


def stored(value: Any, dtype: Any) -> Any:
    """A value as the dataset has it: 0 for what is missing or not finite."""
    with np.errstate(over="ignore"):
        x = dtype(0 if value is None else value)
    return x if np.isfinite(x) else dtype(0)


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ROW, min_size=1, max_size=60))
@example([])
def test_against_plain_python(spark: SparkSession, rows: list[Row]) -> None:
    fitted = build()
    batch = as_batch(fitted.workflow, rows)
    by_arrow = pa.Table.from_batches([fitted.transform_batch(batch)])
    by_spark = transform(fitted, as_frame(spark, fitted.workflow, batch).coalesce(1)).toArrow()
    assert_same_bits(by_spark, by_arrow)

    expected: dict[str, Expected] = {name: e for _, _, out in CASES for name, e in out.items()}
    assert sorted(expected) == sorted(f.name for f in fitted.features)
    for feature in fitted.features:
        dtype = np.dtype(feature.dtype).type
        values = [expected[feature.name](row) for row in rows]
        for i, column in enumerate(feature.physical):
            rounded = [stored(v[i] if feature.is_list else v, dtype) for v in values]
            actual = by_arrow.column(column).to_numpy()
            if feature.name in ("x", "i", "flag", "wday") or feature.name.endswith(("_sin", "_cos")):
                # Python's log1p, sin and cos are another library's.
                np.testing.assert_allclose(actual, np.array(rounded, dtype), rtol=1e-6, atol=1e-7, err_msg=column)
            else:
                np.testing.assert_array_equal(actual, np.array(rounded, dtype), err_msg=column)


def test_the_plan_is_expressions_alone(spark: SparkSession) -> None:
    fitted = build()
    frame = as_frame(spark, fitted.workflow, as_batch(fitted.workflow, []))
    plan = transform(fitted, frame)._jdf.queryExecution().optimizedPlan().toString()
    assert "Python" not in plan
