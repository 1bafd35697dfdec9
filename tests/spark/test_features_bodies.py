"""The two implementations of every operator give the same bits, on made data full of awkward values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Chain
from headrace.config.schema import TableColumn
from headrace.features.ops.numbers import log1p
from headrace.features.spark.fit import fit
from headrace.features.spark.transform import transform
from headrace.features.vocabulary.delta_table import VocabularyTable
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.lake.spark.exchange import partition_keys
from headrace.storage import local
from headrace.udfs.arrow import xxhash64_integers, xxhash64_strings

# Spark's own bodies are what is compared.
pytestmark = pytest.mark.usefixtures("generated_code")

COLUMNS = [
    TableColumn(name="x", type="double"),
    TableColumn(name="y", type="double"),
    TableColumn(name="f", type="float"),
    TableColumn(name="i", type="int"),
    TableColumn(name="b", type="bigint"),
    TableColumn(name="flag", type="boolean"),
    TableColumn(name="s", type="string"),
    TableColumn(name="id", type="bigint"),
    TableColumn(name="hs", type="string"),
    TableColumn(name="hi", type="int"),
    TableColumn(name="yes", type="boolean"),
    TableColumn(name="ss", type="array<string>"),
    TableColumn(name="is", type="array<bigint>"),
    TableColumn(name="ds", type="array<double>"),
    TableColumn(name="n.o`t", type="int"),
    TableColumn(name="label", type="int"),
]

CHAINS = [
    {"columns": ["x"], "ops": ["fill_missing", {"clip": {"min": -0.5, "max": 1e6}}, "log", "normalize"]},
    {"columns": ["y"], "ops": ["log", "normalize"]},
    {"columns": ["f"], "ops": ["normalize", {"clip": {"max": 3}}, {"fill_missing": {"value": -7.25}}]},
    {
        "columns": ["i"],
        "ops": [{"clip": {"min": -3}}, {"fill_missing": {"value": 2}}, {"categorify": {"vocabulary": "n"}}],
    },
    {"columns": ["b"], "ops": ["normalize"]},
    {"columns": ["flag"], "ops": [{"fill_missing": {"value": 0.5}}]},
    {"columns": ["s"], "ops": [{"fill_missing": {"value": "é"}}, {"categorify": {"min_count": 2}}]},
    {"columns": ["id"], "ops": [{"categorify": {"vocabulary": "n"}}]},
    {"columns": ["hs", "hi"], "ops": [{"hash_bucket": {"buckets": 1000}}]},
    {"columns": ["hs", "hi", "b"], "ops": ["raw_id", {"rename": {"suffix": "_raw"}}]},
    {"columns": ["b"], "ops": [{"raw_id": {"hash": True}}, {"rename": {"suffix": "_hashed"}}]},
    {
        "columns": ["is"],
        "ops": [
            "raw_id",
            {"list_slice": {"start": 1, "length": 2}},
            {"pad": {"length": 2}},
            {"rename": {"suffix": "_raw"}},
        ],
    },
    {"columns": ["yes"], "ops": ["categorify"]},
    {"columns": ["ss"], "ops": [{"list_slice": {"start": 1, "length": 3}}, "categorify", {"pad": {"length": 2}}]},
    {
        "columns": ["is"],
        "ops": [{"hash_bucket": {"buckets": 7}}, {"list_slice": {"start": 1, "length": 2}}, {"pad": {"length": 4}}],
    },
    {
        "columns": ["ds"],
        "ops": [{"clip": {"min": -2, "max": 9}}, "log", {"fill_missing": {"value": 3}}, {"pad": {"length": 3}}],
    },
    {"columns": ["n.o`t"], "ops": ["categorify"]},
]

REALS = (
    st.none() | st.floats() | st.sampled_from([0.0, -0.0, -1.0, math.nan, math.inf, -math.inf, 5e-324, 1e300, 0.41421])
)
INTS = st.none() | st.integers(-5, 5)
BIGS = st.none() | st.integers(-(2**63), 2**63 - 1) | st.sampled_from([2**53, 2**53 + 1, -1, 0])
TEXTS = (
    st.none() | st.text(st.characters(exclude_categories=("Cs",)), max_size=6) | st.sampled_from(["a", "é", "", "1"])
)
BITS = st.none() | st.booleans()
ROW = st.fixed_dictionaries(
    {
        "x": REALS,
        "y": REALS,
        "f": st.none() | st.floats(width=32),
        "i": INTS,
        "b": BIGS,
        "flag": BITS,
        "s": TEXTS,
        "id": BIGS,
        "hs": TEXTS,
        "hi": INTS,
        "yes": BITS,
        "ss": st.none() | st.lists(TEXTS, max_size=6),
        "is": st.none() | st.lists(BIGS, max_size=5),
        "ds": st.none() | st.lists(REALS, max_size=5),
        "n.o`t": INTS,
    }
)


def build() -> Workflow:
    return Workflow([Chain.model_validate(c) for c in CHAINS], COLUMNS, label="label")


def as_batch(w: Workflow, rows: list[dict[str, Any]]) -> pa.RecordBatch:
    names = w.input_columns
    return pa.RecordBatch.from_arrays(
        [pa.array([r[n] for r in rows], w.input_type(n).arrow) for n in names], names=list(names)
    )


def as_frame(spark: SparkSession, w: Workflow, batch: pa.RecordBatch) -> DataFrame:
    ddl = ", ".join(f"`{n.replace('`', '``')}` {w.input_type(n)}" for n in w.input_columns)
    return spark.createDataFrame(pa.Table.from_batches([batch]), ddl)


def assert_same_bits(left: pa.Table, right: pa.Table) -> None:
    assert left.schema.names == right.schema.names
    for name in left.schema.names:
        a = left.column(name).to_numpy()
        b = right.column(name).to_numpy()
        assert a.dtype == b.dtype, name
        assert a.tobytes() == b.tobytes(), (name, [(x, y) for x, y in zip(a, b, strict=True) if x != y][:5])


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ROW, min_size=1, max_size=60))
def test_spark_equals_arrow(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    w = build()
    folder = tmp_path_factory.mktemp("bodies")
    batch = as_batch(w, rows)
    frame = as_frame(spark, w, batch).coalesce(1)
    fitted = fit(w, frame, VocabularyTable(spark, local(folder / "vocabulary"), "2026-01-01"))
    by_arrow = pa.Table.from_batches([fitted.transform_batch(batch)])
    fitted.save(local(folder / "w"))
    by_spark = transform(FittedWorkflow.load(local(folder / "w")), frame, keep={"kept": "hs"}).toArrow()
    assert by_spark.column("kept").to_pylist() == [r["hs"] for r in rows]
    assert_same_bits(by_spark.drop_columns(["kept"]), by_arrow)
    for name in by_arrow.schema.names:
        assert np.isfinite(by_arrow.column(name).to_numpy()).all()


def test_no_row_at_all(spark: SparkSession, tmp_path: Path) -> None:
    w = build()
    frame = as_frame(spark, w, as_batch(w, []))
    fitted = fit(w, frame, VocabularyTable(spark, local(tmp_path / "v"), "2026-01-01"))
    assert {f.cardinality for f in fitted.features if f.vocabulary} == {2}
    assert transform(fitted, frame).count() == 0


@pytest.mark.parametrize(("most", "broadcasts", "sorts"), [(10**6, 4, 0), (5, 2, 2), (0, 0, 4)])
def test_vocabularies_too_large_to_broadcast(
    spark: SparkSession, tmp_path: Path, most: int, broadcasts: int, sorts: int
) -> None:
    """The smallest are broadcast, as long as all together are few; the others are sorted: the same bits."""
    sizes = {"s": 2, "id": 3, "hs": 40, "hi": 30}
    w = Workflow([Chain(columns=(n,), ops=({"op": "categorify"},)) for n in sizes], COLUMNS, label="label")
    rows = [
        {n: None if r % 7 == 3 else (str if n in ("s", "hs") else int)(r % size) for n, size in sizes.items()}
        for r in range(300)
    ]
    batch = as_batch(w, rows)
    frame = as_frame(spark, w, batch).coalesce(1).withColumn("at", F.monotonically_increasing_id())
    fitted = fit(w, frame.where("at < 250"), VocabularyTable(spark, local(tmp_path / "v"), "2026-01-01"))
    fitted.save(local(tmp_path / "w"))
    threshold = spark.conf.get("spark.sql.autoBroadcastJoinThreshold")
    spark.conf.set("spark.sql.autoBroadcastJoinThreshold", "-1")
    try:
        transformed = transform(
            FittedWorkflow.load(local(tmp_path / "w")), frame, {"at": "at"}, local(tmp_path / "w"), most
        )
        plan = transformed._jdf.queryExecution().sparkPlan().toString()
        by_spark = transformed.toArrow().sort_by("at").drop_columns(["at"])
    finally:
        spark.conf.set("spark.sql.autoBroadcastJoinThreshold", threshold)
    assert (plan.count("BroadcastHashJoin"), plan.count("SortMergeJoin")) == (broadcasts, sorts)
    assert_same_bits(by_spark, pa.Table.from_batches([fitted.transform_batch(batch)]))


def test_the_plan_has_no_python_and_one_projection_over_the_joins(spark: SparkSession, tmp_path: Path) -> None:
    w = build()
    rows = as_frame(spark, w, as_batch(w, []))
    rows.write.parquet(str(tmp_path / "rows"))
    frame = spark.read.parquet(str(tmp_path / "rows"))
    fitted = fit(w, frame, VocabularyTable(spark, local(tmp_path / "v"), "2026-01-01"))
    # As the stage does: the folder is filled under another name.
    fitted.save(local(tmp_path / "partial"))
    (tmp_path / "partial").rename(tmp_path / "w")
    assert transform(fitted, frame).count() == 0
    plan = transform(fitted, frame, saved=local(tmp_path / "w"))._jdf.queryExecution().optimizedPlan().toString()
    assert "Python" not in plan
    assert "Arrow" not in plan
    # Seven lookups (two of them for the list's two elements): as many joins, all broadcast.
    assert plan.count("Join LeftOuter") == 7
    assert plan.count("strategy=broadcast") == 7
    # The features are one projection: the only other ones choose the keys and the vocabularies' columns.
    assert plan.splitlines()[0].startswith("Project")
    assert "Project" not in plan.splitlines()[1]


def test_numpy_twins_are_spark(spark: SparkSession) -> None:
    rng = np.random.default_rng(5)
    x = np.concatenate(
        [
            rng.uniform(-0.9999, 3, 20_000),
            rng.lognormal(0, 10, 20_000),
            -(rng.uniform(0, 1, 5_000) ** 8),
            rng.normal(0, 1, 20_000) * 10.0 ** rng.integers(-320, 300, 20_000),
            2.0 ** np.arange(-70, 70),
            2.0 ** np.arange(-53, 70) - 1,
            [0.0, -0.0, -1, -2, np.inf, 5e-324, 1.7e308, 0.41421356237, -0.29289321881],
        ]
    )
    by_spark = spark.createDataFrame(pa.table({"x": x})).select("x", F.log1p("x").alias("y")).toArrow()
    a, b = by_spark["y"].to_numpy(zero_copy_only=False), log1p(by_spark["x"].to_numpy())
    assert np.array_equal(np.isnan(a), np.isnan(b))
    assert a[~np.isnan(a)].tobytes() == b[~np.isnan(b)].tobytes()

    texts = ["", "a", "é", *("x" * n for n in range(100)), "日本語" * 20]
    by_spark = spark.createDataFrame(pa.table({"s": texts})).select("s", F.xxhash64("s").alias("h")).toArrow()
    assert xxhash64_strings(pa.array(by_spark["s"].to_pylist())).tolist() == by_spark["h"].to_pylist()
    numbers = [0, -1, 2**63 - 1, -(2**63), 42]
    by_spark = spark.createDataFrame(pa.table({"n": numbers})).select("n", F.xxhash64("n").alias("h")).toArrow()
    assert xxhash64_integers(by_spark["n"].to_numpy()).tolist() == by_spark["h"].to_pylist()


def test_partition_keys_spread_the_files(spark: SparkSession) -> None:
    frame = spark.createDataFrame([(k,) for k in partition_keys(9)], "k int").repartition(9, "k")
    assert frame.select(F.spark_partition_id()).distinct().count() == 9


def test_statistics_are_exact_and_do_not_depend_on_partitioning(spark: SparkSession, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = 1e6 + rng.lognormal(0, 3, 4000)
    x[:3] = [np.nan, np.inf, 1e39]  # no part of the statistics
    w = Workflow([Chain(columns=("x", "y"), ops=("normalize",))], COLUMNS, label="label")  # type: ignore[arg-type]
    table = pa.table({"x": pa.array(x, from_pandas=True), "y": np.full(4000, 0.1)})
    states = []
    for partitions in (1, 7):
        frame = spark.createDataFrame(table).repartition(partitions)
        fitted = fit(w, frame, VocabularyTable(spark, local(tmp_path / "v"), "2026-01-01"))
        states.append(fitted.states[0][0])
    assert states[0] == states[1]
    good = x[3:]
    mean = math.fsum(good) / len(good)
    assert states[0]["x"]["count"] == 3997
    assert states[0]["x"]["mean"] == pytest.approx(mean, rel=1e-15)
    assert states[0]["x"]["std"] == pytest.approx(np.std(good - mean, ddof=1), rel=1e-12)
    assert states[0]["y"] == {"mean": 0.1, "std": 0.0, "count": 4000}


def test_passes_do_not_grow_with_the_columns(spark: SparkSession, tmp_path: Path) -> None:
    """Two passes for all means and deviations, one for all vocabularies: counted by the scans of the rows."""
    w = build()
    row = dict.fromkeys(w.input_columns) | {"x": 1.0, "y": 2.0, "f": 3.0, "b": 4, "s": "a"}
    rows = as_frame(spark, w, as_batch(w, [row]))
    seen = spark.sparkContext.accumulator(0)

    def watch(batches: Any) -> Any:
        seen.add(1)
        return batches

    numbered = rows.coalesce(1).toDF(*[f"c{i}" for i in range(len(rows.columns))])
    frame = numbered.mapInArrow(watch, numbered.schema).toDF(*rows.columns)
    fit(w, frame, VocabularyTable(spark, local(tmp_path / "v"), "2026-01-01"))
    assert seen.value == 3
