"""Operators that learn: Spark's fit and Arrow's give the same bits, and both what pandas and fractions say."""

from __future__ import annotations

import gc
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Chain
from headrace.config.schema import TableColumn
from headrace.errors import UserError
from headrace.features import transport
from headrace.features.arrow.aggregate import aggregate_batch
from headrace.features.learn.exact_sums import LARGEST, SMALLEST
from headrace.features.learn.statistics import IDENTITY, BatchRows, folds_of, merge_all
from headrace.features.ops.base import EstimatorOp
from headrace.features.ops.groups import ValueCount
from headrace.features.spark import aggregate
from headrace.features.spark.fit import fit
from headrace.features.spark.transform import transform
from headrace.features.transport import FinishParts, KeyedStep, keyed_tables, packed
from headrace.features.types import ValueType
from headrace.features.vocabulary.codes import VocabulariesInMemory
from headrace.features.vocabulary.delta_table import VocabularyTable
from headrace.features.vocabulary.keyed_tables import FileKeyedTable, KeyedTable
from headrace.features.workflow.fitted import FittedWorkflow, table_file
from headrace.features.workflow.workflow import Workflow
from headrace.storage import local
from headrace.udfs.arrow import xxhash64_strings

COLUMNS = [
    TableColumn(name="s", type="string"),
    TableColumn(name="i", type="int"),
    TableColumn(name="b", type="boolean"),
    TableColumn(name="id", type="bigint"),
    TableColumn(name="x", type="double"),
    TableColumn(name="f", type="float"),
    TableColumn(name="n", type="int"),
    TableColumn(name="c", type="string"),
    TableColumn(name="cs", type="array<string>"),
    TableColumn(name="one", type="string"),
    TableColumn(name="label", type="int"),
]

CHAINS: list[dict[str, Any]] = [
    {"columns": ["s", "id"], "ops": [{"target_encoding": {"folds": 3, "smoothing": 1.5}}]},
    {"columns": ["s", "i"], "ops": [{"target_encoding": {"folds": 2, "smoothing": 0, "together": True}}, "normalize"]},
    {"columns": ["i"], "ops": ["value_count"]},
    {"columns": ["s"], "ops": [{"value_count": {"log": True}}, "normalize"]},
    {
        "columns": ["b", "x", "n"],
        "ops": [{"join_groupby": {"by": "b", "stats": ["count", "sum", "mean", "std", "min", "max"]}}],
    },
    {"columns": ["id", "s", "f"], "ops": [{"join_groupby": {"by": ["s", "id"], "stats": ["std", "mean"]}}]},
    {"columns": ["x"], "ops": [{"fill_median": {"significant_bits": 53, "indicator": True}}, "log"]},
    {"columns": ["n"], "ops": ["fill_median", "normalize_minmax"]},
    {"columns": ["f"], "ops": [{"quantile_bin": {"bins": 4, "significant_bits": 53}}]},
    {"columns": ["id"], "ops": ["normalize"]},
    {
        "columns": ["c"],
        "ops": [{"categorify": {"oov_buckets": 3, "min_count": 2}}, {"drop_low_cardinality": {"min_cardinality": 1}}],
    },
    {
        "columns": ["cs"],
        "ops": [{"categorify": {"oov_buckets": 3, "min_count": 2, "vocabulary": "c"}}, {"pad": {"length": 2}}],
    },
    {"columns": ["one"], "ops": ["categorify", {"drop_low_cardinality": {"min_cardinality": 2}}]},
]

REALS = st.none() | st.floats(width=32) | st.sampled_from([0.0, -0.0, math.nan, math.inf, 5e-324, 1e300, 0.1, 7.0])
TEXTS = st.none() | st.sampled_from(["a", "é", "", "1", "日本"])
BIGS = st.none() | st.sampled_from([2**53, 2**53 + 1, -1, 0])
ROW = st.fixed_dictionaries(
    {
        "s": TEXTS,
        "i": st.none() | st.integers(-1, 1),
        "b": st.none() | st.booleans(),
        "id": BIGS,
        "x": REALS,
        "f": st.none() | st.floats(width=32),
        "n": st.none() | st.integers(-(2**31), 2**31 - 1),
        "c": TEXTS,
        "cs": st.none() | st.lists(TEXTS, max_size=3),
        "one": st.none() | st.just("only"),
        "label": st.integers(0, 1),
    }
)
Row = dict[str, Any]


def partials_of(op: EstimatorOp, columns: Mapping[str, Any], types: Any, rows: BatchRows) -> dict[str, Any]:
    """All statistics of an operator over a batch."""
    return {n: aggregate_batch(s, columns, types, rows) for n, s in op.statistics(types).items()}


def build(chains: list[dict[str, Any]] = CHAINS) -> Workflow:
    return Workflow([Chain.model_validate(c) for c in chains], COLUMNS, label="label")


def identities(count: int, training: bool) -> pa.Array:
    """Hashes of made-up lines; None: rows that are not of the training range."""
    hashes = xxhash64_strings(pa.array([str(line) for line in range(count)], pa.string()))
    return pa.array(hashes, pa.int64(), mask=np.full(count, not training))


def as_batch(rows: list[Row], training: bool = True) -> pa.RecordBatch:
    types = {c.name: build_type(c) for c in COLUMNS}
    arrays = [pa.array([r[n] for r in rows], t) for n, t in types.items()]
    return pa.RecordBatch.from_arrays([*arrays, identities(len(rows), training)], [*types, IDENTITY])


def build_type(column: TableColumn) -> pa.DataType:
    from headrace.features.types import declared

    return declared(column).arrow


def as_frame(spark: SparkSession, batch: pa.RecordBatch) -> DataFrame:
    ddl = ", ".join([*(f"{c.name} {c.type}" for c in COLUMNS), f"{IDENTITY} bigint"])
    return spark.createDataFrame(pa.Table.from_batches([batch]), ddl)


def learn_in_arrow(fitted: FittedWorkflow, batches: list[pa.RecordBatch]) -> tuple[Any, dict[str, pa.Table]]:
    """States and keyed tables of partial statistics of batches, merged; vocabularies are `fitted`'s."""
    states: list[Any] = []
    tables: dict[str, pa.Table] = {}

    def keyed(scope: str, name: str) -> KeyedTable:
        return KeyedTable(tables[f"{scope}.{name}"])

    for i, chain in enumerate(fitted.workflow.chains):
        columns = [{c: fitted._column(b, c) for c in chain.columns} for b in batches]
        results: list[Any] = []
        for j, step in enumerate(chain.steps):
            learned: Mapping[str, Any] = {}
            if isinstance(step.op, EstimatorOp) and step.op.name != "categorify":
                parts = [
                    partials_of(step.op, c, step.inputs, BatchRows(label=b["label"], identity=b[IDENTITY].to_numpy()))
                    for b, c in zip(batches, columns, strict=True)
                ]
                fitted_state = step.op.finish(merge_all(parts), step.inputs)
                learned = fitted_state.states
                tables |= {f"{i}.{j}.{name}": KeyedTable(t).table for name, t in fitted_state.tables.items()}
            results.append(learned)
            columns = [
                step.arrow(c, learned, fitted.vocabularies.__getitem__, partial(keyed, f"{i}.{j}"), b[IDENTITY])
                for b, c in zip(batches, columns, strict=True)
            ]
        states.append(results)
    return states, tables


# Shrinking would cost a Spark fit a step.
@settings(max_examples=3, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.lists(ROW, min_size=1, max_size=60), st.integers(0, 60))
def test_engines_agree_and_are_right(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, rows: list[Row], cut: int
) -> None:
    w = build()
    folder = tmp_path_factory.mktemp("learned")
    batch = as_batch(rows)
    # Of few rows, some of the partitions are empty.
    frame = as_frame(spark, batch).repartition(4)
    fitted = fit(w, frame, VocabularyTable(spark, local(folder / "vocabulary"), "2026-01-01"))
    cut = min(cut, len(rows))
    states, tables = learn_in_arrow(fitted, [batch.slice(cut), batch.slice(0, cut)])
    assert json.dumps(fitted.states) == json.dumps(states)
    assert {name: t.table.to_pydict() for name, t in fitted.tables.items()} == {
        name: t.to_pydict() for name, t in tables.items()
    }

    fitted.save(local(folder / "w"))
    loaded = FittedWorkflow.load(local(folder / "w"))
    assert loaded.schema == fitted.schema
    for training in (True, False):
        batch = as_batch(rows, training)
        by_arrow = pa.Table.from_batches([fitted.transform_batch(batch)])
        by_spark = transform(loaded, as_frame(spark, batch).coalesce(1)).toArrow()
        assert by_arrow.schema.names == by_spark.schema.names
        for name in by_arrow.schema.names:
            assert by_arrow[name].to_numpy().tobytes() == by_spark[name].to_numpy().tobytes(), name
        check(rows, by_arrow, training)
    # Without the column, no row is of the training range.
    plain = batch.select([c.name for c in COLUMNS])
    assert pa.Table.from_batches([fitted.transform_batch(plain)]).equals(by_arrow)


def test_tables_that_the_driver_does_not_hold(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks make them: the same files, byte for byte. Those from which their chain learns again, too."""
    rng = np.random.default_rng(7)
    rows: list[Row] = [
        {
            "s": [None, "a", "é", "日本"][rng.integers(4)],
            "i": int(rng.integers(-1, 2)),
            "b": [None, True, False][rng.integers(3)],
            "id": 2**53 + int(rng.integers(0, 9)),
            "x": [None, math.nan, 0.1, 1e300, 7.0][rng.integers(5)],
            "f": float(np.float32(rng.normal())),
            "n": int(rng.integers(0, 9)),
            "c": "c",
            "cs": [],
            "one": "only",
            "label": int(rng.integers(2)),
        }
        for _ in range(80)
    ]
    frame = as_frame(spark, as_batch(rows)).repartition(3)
    monkeypatch.setattr(aggregate, "PARTITION_VALUES", 10)

    def persisted() -> int:
        assert spark.sparkContext._jsc is not None
        return int(spark.sparkContext._jsc.getPersistentRDDs().size())

    persisted_before, by_limit = persisted(), {}
    for most in (1 << 20, 0):
        monkeypatch.setattr(transport, "most_in_driver", lambda spark, most=most: most)
        folder = local(tmp_path / f"tables-{most}")
        by_limit[most] = fit(build(), frame, VocabulariesInMemory(), folder=folder)
        by_limit[most].save(local(tmp_path / f"{most}"))
    in_memory, in_files = by_limit[1 << 20], by_limit[0]
    assert json.dumps(in_files.states) == json.dumps(in_memory.states)
    assert {type(table) for table in in_memory.tables.values()} == {KeyedTable}
    assert KeyedTable not in {type(table) for table in in_files.tables.values()}
    assert len(in_files.tables) == 7
    for name in in_memory.tables:
        files = [table_file(local(tmp_path / most), name).read_bytes() for most in ("0", f"{1 << 20}")]
        assert files[0] == files[1], name
    # Its own files go with the tables, and nothing stays with Spark.
    assert list((tmp_path / "tables-0").iterdir())
    del in_files, by_limit
    gc.collect()
    assert not list((tmp_path / "tables-0").iterdir())
    assert persisted() == persisted_before


@dataclass(frozen=True)
class _Noted(FinishParts):
    """Leaves in a file how many rows the batches that its task is given have."""

    file: Path = Path()

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        received = list(batches)
        self.file.write_text(json.dumps([batch.num_rows for batch in received]))
        yield from super().run(received)


def test_statistics_reach_a_task_a_few_at_a_time(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics have megabytes each, and a batch of Spark has thousands of rows unless it is told otherwise."""
    parts = [pa.table({"key": [f"k{i}"], "rows": pa.array([i], pa.int64())}) for i in range(30)]
    statistics = pa.table({"name": pa.array([0] * 30, pa.int32()), "statistic": [packed(part, 0) for part in parts]})
    monkeypatch.setattr(transport, "FinishParts", partial(_Noted, file=tmp_path / "rows"))
    step = KeyedStep(ValueCount(), {"s": ValueType("string")}, {0: "s"}, {})
    merged = spark.createDataFrame(statistics).coalesce(1)
    learned_table = keyed_tables(merged, {(0, 0): step}, local(tmp_path / "tables"))[0, 0].tables["s"]
    assert isinstance(learned_table, FileKeyedTable)
    assert dict(zip(*learned_table.table.to_pydict().values(), strict=True)) == {
        part["key"][0].as_py(): i for i, part in enumerate(parts)
    }
    assert json.loads((tmp_path / "rows").read_text()) == [16, 14]


def check(rows: list[Row], transformed: pa.Table, training: bool) -> None:
    """Against plain Python over the rows."""
    folds = {k: folds_of(identities(len(rows), True).to_numpy(), k) for k in (2, 3)}

    def equal(name: str, expected: Sequence[float | None]) -> None:
        rounded = np.array([0.0 if e is None or not math.isfinite(e) else e for e in expected])
        with np.errstate(over="ignore"):
            rounded = rounded.astype(np.float32)
        actual = transformed[name].to_numpy()
        np.testing.assert_allclose(
            actual, np.where(np.isfinite(rounded), rounded, 0), rtol=3e-6, atol=1e-30, err_msg=name
        )

    def encoded(key: Callable[[Row], Any], k: int, m: float) -> list[float]:
        out = []
        for j, row in enumerate(rows):
            other_rows = [r for i, r in enumerate(rows) if not training or folds[k][i] != folds[k][j]]
            prior = float(np.mean([r["label"] for r in other_rows])) if other_rows else 0.0
            labels = [r["label"] for r in other_rows if key(row) is not None and key(r) == key(row)]
            weight = len(labels) + m
            out.append((sum(labels) + m * prior) / weight if weight else prior)
        return out

    equal("s_te", encoded(lambda r: r["s"], 3, 1.5))
    equal("id_te", encoded(lambda r: r["id"], 3, 1.5))
    counted = Counter(r["i"] for r in rows)
    equal("i_count", [None if r["i"] is None else counted[r["i"]] for r in rows])

    for number in ("x", "n"):
        groups: dict[Any, list[float]] = defaultdict(list)
        for r in rows:
            groups[r["b"]] += usable([r[number]])
        measures: dict[str, Callable[[list[float]], float]] = {
            "sum": lambda v: float(sum(map(Fraction, v))),
            "mean": lambda v: float(sum(map(Fraction, v)) / len(v)),
            "std": deviation,
            "min": min,
            "max": max,
        }
        for stat, measure in measures.items():
            by = {k: measure(v) for k, v in groups.items() if v and k is not None}
            equal(f"b_{number}_{stat}", [by.get(r["b"]) for r in rows])
    size = Counter(r["b"] for r in rows if r["b"] is not None)
    equal("b_count", [size[r["b"]] for r in rows])
    pairs: dict[Any, list[float]] = defaultdict(list)
    for r in rows:
        pairs[r["s"], r["id"]] += usable([r["f"]])
    good = {k: v for k, v in pairs.items() if v and None not in k}
    equal(
        "s_id_f_mean",
        [
            float(sum(map(Fraction, good[k])) / len(good[k])) if k in good else None
            for k in ((r["s"], r["id"]) for r in rows)
        ],
    )

    ids = [Fraction(int(float(r["id"]))) for r in rows if r["id"] is not None]
    mean, std = (float(sum(ids) / len(ids)), deviation([float(v) for v in ids])) if ids else (0.0, 0.0)
    equal("id", [None if r["id"] is None else (float(r["id"]) - mean) / (std or 1.0) for r in rows])
    logs = [None if r["s"] is None else math.log1p(n) for r, n in zip(rows, of_text(rows), strict=True)]
    known_logs = [v for v in logs if v is not None]
    middle = sum(known_logs) / len(known_logs) if known_logs else 0.0
    spread = deviation(known_logs) if known_logs else 0.0
    if spread > 1e-6 or len(set(known_logs)) < 2:
        actual_logs, expected_logs = (
            transformed["s_count"].to_numpy(),
            [0.0 if v is None else (v - middle) / (spread if spread > 1e-6 else 1.0) for v in logs],
        )
        np.testing.assert_allclose(actual_logs, expected_logs, rtol=1e-4, atol=1e-4, err_msg="s_count")

    xs = pd.Series(usable([r["x"] for r in rows]), dtype=float)
    middle = float(xs.median()) if len(xs) else 0.0
    missing = [r["x"] is None or math.isnan(r["x"]) for r in rows]
    filled = [middle if m else r["x"] for m, r in zip(missing, rows, strict=True)]
    equal("x", [math.log1p(v) if v > -1 else None for v in filled])
    equal("x_missing", [float(m) for m in missing])

    ns = pd.Series([r["n"] for r in rows], dtype=float)
    # Counted to 16 significant bits.
    scaled = transformed["n"].to_numpy()
    assert ((scaled >= 0) & (scaled <= 1)).all() or len(set(ns.dropna())) < 2
    present_values = ns[ns.notna()].to_numpy()
    if len(present_values) and present_values.min() < present_values.max() and len(present_values) == len(ns):
        equal("n", list((present_values - present_values.min()) / (present_values.max() - present_values.min())))

    fs = usable([r["f"] for r in rows])
    edges = np.unique([np.quantile(fs, q, method="inverted_cdf") for q in (0.25, 0.5, 0.75)]) if fs else np.array([])
    assert transformed["f"].to_pylist() == [
        0 if r["f"] is None or math.isnan(r["f"]) else 1 + int((edges < r["f"]).sum()) for r in rows
    ]

    words = Counter(w for r in rows for w in [r["c"], *(r["cs"] or [])] if w is not None)
    known = {w for w, n in words.items() if n >= 2}
    assert "one" not in transformed.schema.names
    assert ("c" in transformed.schema.names) == bool(known)
    if not known:
        return
    codes = transformed["c"].to_pylist()
    for r, code in zip(rows, codes, strict=True):
        if r["c"] is None:
            assert code == 0
        elif r["c"] in known:
            assert 4 <= code < 4 + len(known)
        else:
            assert code == 1 + int(xxhash64_strings(pa.array([r["c"]]))[0]) % 3
    # History and candidate share one vocabulary: the same value is the same code.
    by_word = {r["c"]: code for r, code in zip(rows, codes, strict=True) if r["c"] is not None}
    for r, *pair in zip(rows, transformed["cs__0"].to_pylist(), transformed["cs__1"].to_pylist(), strict=True):
        expected_words = [*(r["cs"] or []), None, None][:2]
        assert all(
            code == by_word.get(word, code) and (code == 0) == (word is None)
            for word, code in zip(expected_words, pair, strict=True)
        )


def of_text(rows: list[Row]) -> list[int]:
    """Return the count of each row's text."""
    counted = Counter(r["s"] for r in rows)
    return [counted[r["s"]] for r in rows]


def usable(values: list[float | None]) -> list[float]:
    good = [v for v in values if v is not None and abs(v) <= LARGEST]
    return [0.0 if abs(v) < SMALLEST else v for v in good]


def deviation(values: list[float]) -> float:
    exact = [Fraction(v) for v in values]
    mean = sum(exact) / len(exact)
    return math.sqrt(sum((v - mean) ** 2 for v in exact) / max(len(exact) - 1, 1))


def test_a_rows_own_label_is_nowhere_in_its_encoding() -> None:
    rng = np.random.default_rng(3)
    empty_row = dict.fromkeys(c.name for c in COLUMNS)
    rows: list[Row] = [empty_row | {"s": f"v{rng.integers(4)}", "label": int(rng.integers(2))} for _ in range(40)]
    chains = [{"columns": ["s"], "ops": [{"target_encoding": {"folds": 4, "smoothing": 2}}]}]

    def encode(changed: list[Row], training: bool) -> np.ndarray[Any, Any]:
        w = build(chains)
        step, column = w.chains[0].steps[0], as_batch(changed)["s"]
        assert isinstance(step.op, EstimatorOp)
        facts = BatchRows(label=as_batch(changed)["label"], identity=as_batch(changed)[IDENTITY].to_numpy())
        partials = partials_of(step.op, {"s": column}, step.inputs, facts)
        learned = step.op.finish(partials, step.inputs)
        tables = {f"0.0.{name}": KeyedTable(t) for name, t in learned.tables.items()}
        fitted = FittedWorkflow(w, [[learned.states]], {}, tables)
        values: np.ndarray[Any, Any] = fitted.transform_batch(as_batch(changed, training))["s_te"].to_numpy()
        return values

    encoded, served = encode(rows, True), encode(rows, False)
    seen = 0
    for j in range(len(rows)):
        changed = [dict(r) for r in rows]
        changed[j]["label"] = 1 - changed[j]["label"]
        after = encode(changed, True)
        assert after[j] == encoded[j]
        seen += int((after != encoded).any())
        # A row that is not of the training range sees it.
        assert encode(changed, False)[j] != served[j]
    assert seen == len(rows)


def test_the_next_day(spark: SparkSession, tmp_path: Path) -> None:
    """Kept once, kept; codes stay, out-of-vocabulary buckets too; another number of buckets is refused."""
    path = tmp_path / "vocabulary"

    def on_day(ds: str, words: list[str], buckets: int = 2) -> FittedWorkflow:
        chains: list[dict[str, Any]] = [
            {"columns": ["c"], "ops": [{"categorify": {"oov_buckets": buckets}}, {"drop_low_cardinality": {}}]},
            {"columns": ["n"], "ops": ["normalize"]},
        ]
        rows = [dict.fromkeys(c.name for c in COLUMNS) | {"c": word, "label": 0, "n": 1} for word in words]
        return fit(build(chains), as_frame(spark, as_batch(rows)), VocabularyTable(spark, local(path), ds))

    first = on_day("2026-01-01", ["a", "a"])
    assert [f.name for f in first.features] == ["n"]
    assert on_day("2026-01-01", ["a", "a"]).schema == first.schema
    second = on_day("2026-01-02", ["a", "b", "b"])
    (feature,) = [f for f in second.features if f.name == "c"]
    assert (feature.cardinality, feature.oov_buckets, feature.first_code) == (5, 2, 3)
    assert second.vocabularies["c"].table.to_pydict() == {"value": ["a", "b"], "code": [3, 4]}
    third = on_day("2026-01-03", ["b", "b"])
    assert [f.name for f in third.features] == ["c", "n"]
    assert third.vocabularies["c"].table.to_pydict() == {"value": ["a", "b"], "code": [3, 4]}
    with pytest.raises(UserError, match=r"vocabulary 'c'.*oov_buckets"):
        on_day("2026-01-04", ["b"], buckets=3)


def test_statistics_of_spark_do_not_depend_on_partitioning(spark: SparkSession, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = 1e6 + rng.lognormal(0, 3, 3000)
    x[:2] = [np.inf, 1e39]  # no part of the statistics
    table = pa.table({"x": x, "f": pa.array(rng.normal(0, 1, 3000), pa.float32())})
    w = build([{"columns": ["x", "f"], "ops": ["normalize"]}])
    states = []
    for partitions in (1, 7):
        frame = spark.createDataFrame(table).repartition(partitions)
        states.append(fit(w, frame, VocabularyTable(spark, local(tmp_path / "v"), "2026-01-01")).states)
    assert states[0] == states[1]
    learned_state = states[0][0][0]["x"]
    exact = [Fraction(v) for v in x[2:]]
    mean = sum(exact) / len(exact)
    assert learned_state == {
        "mean": float(mean),
        "std": math.sqrt(sum((v - mean) ** 2 for v in exact) / (len(exact) - 1)),
        "count": 2998,
    }


def test_the_identity_of_rows_is_of_file_and_line(spark: SparkSession, tmp_path: Path) -> None:
    """Fit takes the folds from the lake's columns where the frame has no hash of them."""
    rows = [dict.fromkeys(c.name for c in COLUMNS) | {"s": "a", "label": i % 2} for i in range(20)]
    batch = as_batch(rows).select([c.name for c in COLUMNS])
    ddl = ", ".join(f"{c.name} {c.type}" for c in COLUMNS)
    frame = spark.createDataFrame(pa.Table.from_batches([batch]), ddl)
    w = build([{"columns": ["s"], "ops": ["target_encoding"]}])
    vocabularies = VocabularyTable(spark, local(tmp_path / "v"), "2026-01-01")
    with pytest.raises(UserError, match="_source_file"):
        fit(w, frame, vocabularies)
    lines = frame.withColumn("_source_file", F.lit("a.csv")).withColumn("_source_line", F.monotonically_increasing_id())
    fitted = fit(w, lines, vocabularies)
    marked = lines.withColumn(IDENTITY, F.xxhash64("_source_file", "_source_line"))
    assert fit(w, marked, vocabularies).tables["0.0.s_te"].table.equals(fitted.tables["0.0.s_te"].table)
