"""The Java UDFs and the operators on them: Spark row by row equals Arrow by ctypes, and Spark's own expressions."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headrace.config import Chain
from headrace.config.schema import TableColumn
from headrace.errors import UserError
from headrace.features.ops import OPERATORS
from headrace.features.spark.transform import transform
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.udfs import arrow
from headrace.udfs import spark as udfs
from headrace.udfs.library import udf_jars
from tests.native import reference
from tests.native.test_columns import BIGS, LISTS, TEXTS
from tests.spark.test_features_bodies import INTS, as_batch, as_frame, assert_same_bits

# Spark's own bodies are what is compared.
pytestmark = pytest.mark.usefixtures("generated_code")
IDS = pa.list_(pa.int64())


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if not udf_jars(rapids=False):
        pytest.skip("the UDFs' jar is not here: make native")


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(TEXTS, LISTS, st.none() | BIGS, LISTS), min_size=1, max_size=40))
@example([(b"\xed\xa0\x80" * 3, [None], None, None), (b"x" * 100_000, list(range(500)), 1, [2, None, 3])])
def test_java_is_the_c_interface(spark: SparkSession, rows: list[tuple[Any, ...]]) -> None:
    t, a, b, c = (pa.array([r[i] for r in rows], type_) for i, type_ in enumerate([pa.binary(), IDS, pa.int64(), IDS]))
    frame = spark.createDataFrame(pa.table({"t": t, "a": a, "b": b, "c": c})).coalesce(1)
    actual = frame.select(
        udfs.ngrams(F.col("t"), 3, 1000).alias("grams"),
        udfs.ngrams(F.col("t"), 1, 2**31 - 1, 2).alias("two"),
        udfs.cross([F.col("a"), F.col("b"), F.col("c")], 77, 9).alias("cross"),
        udfs.minhash(F.col("a"), 5).alias("signature"),
    ).toArrow()
    assert actual["grams"].to_pylist() == arrow.ngrams(t, 3, 1000).to_pylist()
    assert actual["two"].to_pylist() == arrow.ngrams(t, 1, 2**31 - 1, 2).to_pylist()
    assert actual["cross"].to_pylist() == arrow.cross([a, b, c], 77, 9).to_pylist()
    assert actual["signature"].to_pylist() == arrow.minhash(a, 5).to_pylist()
    assert actual["signature"].to_pylist() == [reference.minhash(r[1], 5) for r in rows]


def test_where_spark_has_an_expression_it_gives_the_same(spark: SparkSession) -> None:
    rows = [("naïve 😀", [3, 1], 5), ("abc", [2**62], -7), ("日本語のテキスト", [9, 9, -9], 0)]
    frame = spark.createDataFrame(rows, "s string, ids array<bigint>, b bigint").coalesce(1)
    actual = frame.select(
        udfs.ngrams(F.col("s"), 3, 1000).alias("grams"),
        F.expr(
            "transform(sequence(1, length(s) - 2), i -> cast(pmod(xxhash64(substring(s, i, 3)), 1000) + 1 as int))"
        ).alias("grams in sql"),
        udfs.cross([F.col("ids"), F.col("b")], 99, 50).alias("cross"),
        F.expr("transform(ids, i -> cast(pmod(xxhash64(i, b), 99) + 1 as int))").alias("cross in sql"),
        udfs.minhash(F.col("ids"), 3).alias("signature"),
        F.expr("transform(sequence(0, 2), j -> array_min(transform(ids, i -> xxhash64(cast(j as bigint), i))))").alias(
            "signature in sql"
        ),
        F.expr("headrace_minhash(ids, 3)").alias("by name"),
    ).toPandas()
    for name in ("grams", "cross", "signature"):
        assert [list(x) for x in actual[name]] == [list(x) for x in actual[f"{name} in sql"]], name
    assert [list(x) for x in actual["by name"]] == [list(x) for x in actual["signature"]]


COLUMNS = [
    TableColumn(name="s", type="string"),
    TableColumn(name="i", type="int"),
    TableColumn(name="flag", type="boolean"),
    TableColumn(name="ss", type="array<string>"),
    TableColumn(name="bs", type="array<bigint>"),
    TableColumn(name="label", type="int"),
]
CHAINS: list[tuple[str, list[Any]]] = [
    ("s", [{"text_ngrams": {"n": 2, "buckets": 100}}, {"pad": {"length": 4}}, {"rename": {"to": "first"}}]),
    ("s", [{"text_ngrams": {"n": 3, "buckets": 9, "most": 5}}, {"pad": {"length": 3, "keep": "last"}}]),
    ("ss bs i", [{"feature_cross": {"buckets": 50, "most": 6}}, {"pad": {"length": 4}}]),
    ("s flag bs", [{"feature_cross": {"buckets": 50, "to": "wide"}}, {"pad": {"length": 70}}]),
    ("ss bs", [{"minhash": {"length": 3, "buckets": 20}}]),
]
WORDS = st.none() | st.text(st.characters(exclude_categories=("Cs",)), max_size=7)
ROW = st.fixed_dictionaries(
    {
        "s": WORDS,
        "i": INTS,
        "flag": st.none() | st.booleans(),
        "ss": st.none() | st.lists(WORDS, max_size=4),
        "bs": LISTS,
    }
)


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ROW, min_size=1, max_size=40))
def test_both_bodies_of_the_operators(spark: SparkSession, rows: list[dict[str, Any]]) -> None:
    chains = [Chain(columns=tuple(names.split()), ops=tuple(ops)) for names, ops in CHAINS]
    w = Workflow(chains, COLUMNS, label="label")
    fitted = FittedWorkflow(w, [[{} for _ in chain.steps] for chain in w.chains], {})
    batch = as_batch(w, rows)
    by_arrow = pa.Table.from_batches([fitted.transform_batch(batch)])
    assert_same_bits(transform(fitted, as_frame(spark, w, batch).coalesce(1)).toArrow(), by_arrow)
    # Not both wrong: by plain Python, for one feature of each operator.
    for k, row in enumerate(rows):
        text = None if row["s"] is None else row["s"].encode()
        grams = (reference.ngrams(text, 2, 100, None) or [])[:4]
        assert [by_arrow[f"first__{j}"][k].as_py() for j in range(4)] == grams + [0] * (4 - len(grams))
        signature = reference.minhash(row["bs"], 3)
        codes = [reference.code(h, 20) for h in signature] if signature else [0] * 3
        assert [by_arrow[f"bs__{j}"][k].as_py() for j in range(3)] == codes


@pytest.mark.parametrize(
    ("columns", "op", "message"),
    [
        ("i", {"text_ngrams": {"buckets": 5}}, "takes text"),
        ("ss", {"text_ngrams": {"buckets": 5}}, "takes text"),
        ("s i", {"feature_cross": {"buckets": 5}}, "hashed_cross crosses scalars"),
        ("ss", {"feature_cross": {"buckets": 5}}, "crosses 2 to 8 columns, not 1"),
        ("s", {"minhash": {"length": 2, "buckets": 5}}, "takes lists"),
    ],
)
def test_wrong_columns_are_refused(columns: str, op: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Workflow([Chain(columns=tuple(columns.split()), ops=(op,))], COLUMNS, label="label")
    assert {"text_ngrams", "feature_cross", "minhash"} <= OPERATORS.builtin.keys()
