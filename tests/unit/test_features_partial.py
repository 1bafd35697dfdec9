"""Statistics of parts merge into those of the whole, exactly, and are what NumPy and Python say."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import Chain
from headrace.config.schema import TableColumn
from headrace.errors import UserError
from headrace.features.arrow.aggregate import aggregate_batch
from headrace.features.functions.keys import joint_key
from headrace.features.learn import exact_sums
from headrace.features.learn.exact_sums import rounded
from headrace.features.learn.statistics import (
    LABEL,
    BatchRows,
    Number,
    Statistic,
    canonical,
    cumulated,
    folds_of,
    median,
    merge,
    merge_all,
    numbers,
    quantile_edges,
)
from headrace.features.ops.base import EstimatorOp
from headrace.features.types import ValueType
from headrace.features.vocabulary.keyed_tables import KeyedTable
from headrace.features.workflow.workflow import Workflow

REALS = st.none() | st.floats(allow_nan=False) | st.sampled_from([0.0, -0.0, 1e-310, 3.4e38, -1e300, 2.0**-126, 0.1])
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "k": st.none() | st.sampled_from(["", "a", "é", "日本", "a\0b"]),
            "i": st.none() | st.sampled_from([0, -1, 2**53, 2**53 + 1]),
            "x": REALS,
            "w": st.none() | st.floats(-1e3, 1e3),
            "ks": st.lists(st.none() | st.sampled_from(["a", "b", ""]), max_size=3),
            "y": st.integers(0, 1),
            "id": st.integers(-(2**63), 2**63 - 1),
            "day": st.integers(-5, 5),
        }
    ),
    max_size=25,
)
TYPES = {
    "k": ValueType("string"),
    "i": ValueType("bigint"),
    "x": ValueType("double"),
    "w": ValueType("double"),
    "ks": ValueType("string", is_list=True),
}
EVERYTHING = Number("x", sum=True, squares=True, minmax=True)
STATISTICS = {
    "moments": Statistic(numbers=(EVERYTHING, Number("w", sum=True))),
    "text": Statistic(key=("k",), day=True),
    "integer": Statistic(key=("i",), numbers=(EVERYTHING,)),
    "list": Statistic(key=("ks",), day=True),
    "value": Statistic(key=("x",), kind="number", bits=5),
    "joint": Statistic(key=("k", "i"), numbers=(Number("w", sum=True, squares=True),)),
    "folds": Statistic(key=("k",), folds=3, numbers=(Number(LABEL, sum=True),)),
    "prior": Statistic(folds=3, numbers=(Number(LABEL, sum=True),)),
}


def partials_of(op: EstimatorOp, columns: dict[str, Any], types: Any, rows: BatchRows) -> dict[str, Any]:
    """Return all statistics of an operator over a batch."""
    return {n: aggregate_batch(s, columns, types, rows) for n, s in op.statistics(types).items()}


def part(rows: list[dict[str, Any]], statistic: Statistic) -> pa.Table:
    columns = {name: pa.array([r[name] for r in rows], type_.arrow) for name, type_ in TYPES.items()}
    facts = BatchRows(
        day=np.array([r["day"] for r in rows], np.int64),
        label=pa.array([r["y"] for r in rows], pa.int32()),
        identity=np.array([r["id"] for r in rows], np.int64),
    )
    return aggregate_batch(statistic, columns, TYPES, facts)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.lists(st.integers(0, 25), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_parts_merge_into_the_whole(rows: list[dict[str, Any]], cuts: list[int], random: Any) -> None:
    edges = sorted(min(c, len(rows)) for c in cuts)
    pieces = [rows[a:b] for a, b in zip([0, *edges], [*edges, len(rows)], strict=True)]
    for name, statistic in STATISTICS.items():
        parts = [part(piece, statistic) for piece in pieces]
        all_rows = canonical(part(rows, statistic))
        assert canonical(merge(parts)).equals(all_rows), name
        # In pairs, from the other end, in another order.
        right_first = merge([parts[0], merge(parts[1:])])
        left_first = merge([merge(parts[:-1]), parts[-1]])
        random.shuffle(parts)
        assert canonical(right_first).equals(canonical(left_first)), name
        assert canonical(merge(parts)).equals(all_rows), name


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_statistics_are_what_python_counts(rows: list[dict[str, Any]]) -> None:
    for name in ("integer", "moments"):
        actual = part(rows, STATISTICS[name])
        groups: dict[Any, list[float]] = {} if name == "integer" else {None: []}
        for r in rows:
            if name == "moments" or r["i"] is not None:
                key = str(r["i"]) if name == "integer" else None
                groups.setdefault(key, [])
                if r["x"] is not None and abs(r["x"]) <= exact_sums.LARGEST:
                    groups[key].append(0.0 if abs(r["x"]) < exact_sums.SMALLEST else r["x"])
        keys = actual.column("key").to_pylist() if name == "integer" else [None]
        assert set(keys) == set(groups)
        assert len(keys) == len(groups)
        sums, squares = numbers_of(actual, "sum"), numbers_of(actual, "squares")
        n = actual.column("0.count").to_numpy()
        means, deviations = exact_sums.means(sums, n), exact_sums.deviations(sums, squares, n)
        floats = exact_sums.floats(sums, len(n))
        for g, key in enumerate(keys):
            values = [Fraction(v) for v in groups[key]]
            assert n[g] == len(values)
            assert exact_at(sums, g) == sum(values)
            assert exact_at(squares, g) == sum(v * v for v in values)
            assert floats[g] == float(sum(values))
            assert actual.column("0.min")[g].as_py() == min(groups[key], default=None)
            assert actual.column("0.max")[g].as_py() == max(groups[key], default=None)
            if not values:
                assert math.isnan(means[g])
                assert math.isnan(deviations[g])
                continue
            assert means[g] == float(sum(values) / len(values))
            mean = sum(values) / len(values)
            variance = sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1)
            assert deviations[g] == math.sqrt(variance)


def numbers_of(partial: pa.Table, measure: str) -> dict[int, Any]:
    return numbers(partial, 0, measure)  # type: ignore[arg-type]


def exact_at(sums: dict[int, Any], group: int) -> Fraction:
    return exact_sums.fraction({place: digit[group : group + 1] for place, digit in sums.items()})


def test_keys_folds_days_and_lists() -> None:
    rows: list[dict[str, Any]] = [
        {"k": "a", "i": 1, "x": 1.0, "w": 1.5, "ks": ["a", None, "a"], "y": 1, "id": 5 << 20, "day": 3},
        {"k": "a", "i": None, "x": 1.01, "w": None, "ks": [], "y": 1, "id": 4 << 20, "day": 2},
        {"k": None, "i": 1, "x": -0.0, "w": 2.0, "ks": ["b"], "y": 1, "id": -1, "day": 1},
    ]
    assert canonical(part(rows, STATISTICS["text"])).to_pydict() == {"day": [2], "key": ["a"], "rows": [2]}
    assert canonical(part(rows, STATISTICS["list"])).to_pydict() == {"day": [3, 1], "key": ["a", "b"], "rows": [2, 1]}
    # -1 >> 20 is -1, in fold 2 of 3 as Spark's pmod has it.
    assert folds_of(np.array([5 << 20, 4 << 20, -1]), 3).tolist() == [2, 1, 2]
    assert canonical(part(rows, STATISTICS["prior"])).to_pydict() == {
        "0.count": [1, 2],
        "0.sum.0": [1, 2],
        "fold": [1, 2],
        "rows": [1, 2],
    }
    assert canonical(part(rows, STATISTICS["folds"])).to_pydict() == {
        "0.count": [1, 1],
        "0.sum.0": [1, 1],
        "fold": [1, 2],
        "key": ["a", "a"],
        "rows": [1, 1],
    }
    assert canonical(part(rows, STATISTICS["value"])).to_pydict() == {"key": [0.0, 1.0], "rows": [1, 2]}
    assert part(rows, STATISTICS["joint"]).column("key").to_pylist() == ["1:a1"]


def test_a_variance_beside_a_large_mean() -> None:
    x = 1e9 + np.arange(5000) % 2
    partial = aggregate_batch(Statistic(numbers=(Number("x", squares=True),)), {"x": pa.array(x)}, TYPES, BatchRows())
    n = partial.column("0.count").to_numpy()
    assert exact_sums.deviations(numbers_of(partial, "sum"), numbers_of(partial, "squares"), n)[0] == math.sqrt(
        1250 / 4999
    )


@given(st.lists(st.floats(-1e30, 1e30), min_size=1), st.integers(1, 52))
def test_rounding_keeps_so_many_bits(values: list[float], bits: int) -> None:
    x = exact_sums.usable(np.array(values))
    out = rounded(x, bits)
    mantissa = np.abs(np.frexp(out)[0]) * 2.0**bits
    assert (mantissa == np.rint(mantissa)).all()
    assert (np.abs(out - x) <= np.abs(x) * 2.0**-bits).all()


@given(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), min_size=2, max_size=20, unique=True))
def test_joint_keys_differ(pairs: list[tuple[str, str]]) -> None:
    keys = joint_key([pa.array([p[0] for p in pairs], pa.string()), pa.array([p[1] for p in pairs], pa.string())])
    assert len(set(keys.to_pylist())) == len(pairs)


def test_missing_facts_are_named() -> None:
    with pytest.raises(ValueError, match="identity"):
        aggregate_batch(STATISTICS["folds"], {"k": pa.array(["a"])}, TYPES, BatchRows())
    with pytest.raises(ValueError, match="label"):
        aggregate_batch(Statistic(key=("k",), numbers=(Number(LABEL),)), {"k": pa.array(["a"])}, TYPES, BatchRows())


COLUMNS = [
    TableColumn(name="s", type="string"),
    TableColumn(name="x", type="double"),
    TableColumn(name="xs", type="array<double>"),
    TableColumn(name="when", type="timestamp"),
    TableColumn(name="label", type="int"),
]


@pytest.mark.parametrize(
    ("columns", "ops", "words"),
    [
        (["x"], ["target_encoding"], ["'x'", "key", "double"]),
        (["xs"], ["value_count"], ["'xs'", "key"]),
        (["s", "label"], ["target_encoding"], ["label", "leak"]),
        (["s"], [{"target_encoding": {"folds": 1}}], ["folds", "2"]),
        (["s"], [{"target_encoding": {"smoothing": float("inf")}}], ["smoothing", "finite"]),
        (["s"], [{"join_groupby": {"by": "t"}}], ["'t'", "no column here"]),
        (["s"], [{"join_groupby": {"by": "s", "stats": ["mean"]}}], ["mean of which column"]),
        (["s", "x"], [{"join_groupby": {"by": "s"}}], ["'x'", "count"]),
        (["s", "when"], [{"join_groupby": {"by": "s", "stats": ["min"]}}], ["'when'", "numbers"]),
        (["xs"], ["fill_median"], ["'xs'", "scalars"]),
        (["s"], ["normalize_minmax"], ["'s'", "numbers"]),
        (["s"], [{"quantile_bin": {"bins": 4}}], ["'s'", "numbers"]),
        (["x"], [{"quantile_bin": {"bins": 1}}], ["bins", "2"]),
        (["x"], ["drop_low_cardinality"], ["'x'", "categorify"]),
        (["s"], [{"hash_bucket": {"buckets": 9}}, "drop_low_cardinality"], ["'s'", "vocabulary"]),
        (["s"], [{"categorify": {"oov_buckets": 0}}], ["oov_buckets"]),
    ],
)
def test_what_operators_refuse(columns: list[str], ops: list[Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        Workflow([Chain.model_validate({"columns": columns, "ops": ops})], COLUMNS, label="label")
    for word in ["features.workflow[0]", *words]:
        assert word in str(caught.value)


def test_a_vocabulary_has_one_number_of_buckets() -> None:
    chains = [
        Chain.model_validate({"columns": [c], "ops": [{"categorify": {"vocabulary": "v", "oov_buckets": n}}]})
        for c, n in (("s", 2), ("t", 3))
    ]
    with pytest.raises(UserError, match=r"'v'.*oov_buckets"):
        Workflow(chains, [*COLUMNS, TableColumn(name="t")], label="label")


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=40), st.integers(2, 6))
def test_quantiles_of_counts_are_numpys(values: list[int], bins: int) -> None:
    x = np.array(values, float)
    partial = aggregate_batch(Statistic(key=("x",), kind="number"), {"x": pa.array(x)}, TYPES, BatchRows())
    distinct_values, upto = cumulated(partial)
    assert median(distinct_values, upto) == np.median(x)
    expected = {np.sort(x)[math.ceil(Fraction(i * len(x), bins)) - 1] for i in range(1, bins)}
    assert quantile_edges(distinct_values, upto, bins) == sorted(expected)


def test_days_merge_into_what_a_fit_of_all_days_learns() -> None:
    """The statistics of days 1..n, merged with those of day n + 1, equal those of days 1..n + 1, for every operator."""
    rng = np.random.default_rng(7)
    chains: list[dict[str, Any]] = [
        {
            "columns": ["x"],
            "ops": [{name: {"bins": 5} if name == "quantile_bin" else {}}, {"rename": {"suffix": f"_{i}"}}],
        }
        for i, name in enumerate(["normalize", "normalize_minmax", "fill_median", "quantile_bin"])
    ]
    chains += [
        {"columns": ["s"], "ops": ["target_encoding"]},
        {"columns": ["s"], "ops": ["value_count"]},
        {"columns": ["s", "x"], "ops": [{"join_groupby": {"by": "s", "stats": ["mean", "std", "min"]}}]},
    ]
    w = Workflow([Chain.model_validate(c) for c in chains], COLUMNS, label="label")

    def day(n: int) -> tuple[dict[str, pa.Array], BatchRows]:
        columns = {"s": pa.array(rng.integers(0, 9, n).astype(str)), "x": pa.array(rng.lognormal(0, 3, n))}
        return columns, BatchRows(label=pa.array(rng.integers(0, 2, n)), identity=rng.integers(-(2**63), 2**63 - 1, n))

    days = [day(n) for n in (50, 1, 0, 80)]
    columns = {name: pa.concat_arrays([c[name] for c, _ in days]) for name in ("s", "x")}
    facts = BatchRows(
        label=pa.concat_arrays([r.label for _, r in days]),
        identity=np.concatenate([r.identity for _, r in days if r.identity is not None]),
    )
    for chain in w.chains:
        step = chain.steps[0]
        assert isinstance(step.op, EstimatorOp)

        def learn(parts: list[Any], step: Any = step) -> tuple[Any, dict[str, Any]]:
            partials = [partials_of(step.op, c, step.inputs, r) for c, r in parts]
            old = partials[0]
            for new in partials[1:]:
                old = merge_all([old, new])
            learned = step.op.finish(old, step.inputs)
            return learned.states, {n: KeyedTable(t).table.to_pydict() for n, t in learned.tables.items()}

        assert learn(days) == learn([(columns, facts)])


def test_parts_have_more_texts_than_one_column_holds() -> None:
    keys = pa.array([f"{i}" * (1 << 19) for i in range(100, 132)])
    part = pa.table({"key": keys, "rows": pa.array([1] * len(keys), pa.int64())})
    # 2 GiB and more, of which the parts share the memory.
    parts = [part] * 45
    assert sum(p.column("key").nbytes for p in parts) > 1 << 31
    merged = canonical(merge(parts))
    assert merged.column("rows").to_pylist() == [len(parts)] * len(keys)
    assert merged.column("key").combine_chunks().equals(keys)
