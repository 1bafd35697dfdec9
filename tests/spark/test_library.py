"""headrace as a library over Spark frames, and the checks that users call on operators of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from pyspark.sql import SparkSession

import headrace as hr
from headrace.lake.delta.log import DeltaLog
from headrace.storage import local
from headrace.testing import batches, check_operator, check_table_operator
from tests.plugin_operators import Halve, HalveOtherwise, LessTheMean, Rank

ROWS = 2_000


def frame() -> pd.DataFrame:
    rng = np.random.default_rng(7)
    return pd.DataFrame(
        {
            "user": [f"u{i}" for i in rng.zipf(1.4, ROWS) % 60],
            "price": rng.lognormal(size=ROWS),
            "row": np.arange(ROWS),
            "click": rng.integers(0, 2, ROWS),
        }
    )


def workflow() -> Any:
    chains = (["user"] >> hr.Categorify(min_count=3)) + (["price"] >> hr.Log() >> Halve())
    return hr.Workflow(chains, label="click", carried=["row"])


def test_a_spark_frame_gives_what_a_pandas_frame_gives(spark: SparkSession, tmp_path: Path) -> None:
    df = frame()
    table = spark.createDataFrame(df).repartition(3)
    by_pandas, by_spark = workflow().fit(df), workflow().fit(table, vocabulary=tmp_path / "codes", day="2026-01-05")
    assert by_spark.fitted.states == by_pandas.fitted.states
    assert by_spark.vocabularies["user"].equals(by_pandas.vocabularies["user"])
    expected = by_pandas.transform(df)
    actual = by_spark.transform(table).toPandas().sort_values("row").reset_index(drop=True)
    pd.testing.assert_frame_equal(actual[expected.columns], expected, check_dtype=False)

    assert DeltaLog(local(tmp_path / "codes")).version == 0
    refitted = workflow().fit(table.where("row < 900"), vocabulary=tmp_path / "codes", day="2026-01-06")
    codes = dict(zip(*by_spark.vocabularies["user"].to_pydict().values(), strict=True))
    assert dict(zip(*refitted.vocabularies["user"].to_pydict().values(), strict=True)) == codes, "codes stay"

    halves = [table.where("row < 1500"), table.where("row >= 1500")]
    counts = by_spark.write_dataset(halves[0], tmp_path / "data", valid=halves[1])
    assert counts == {"train": 1_500, "valid": 500}
    labels = [int(y) for _, ys in hr.load_dataset(tmp_path / "data", "valid") for y in ys]
    assert sorted(labels) == sorted(df["click"][1_500:])
    with pytest.raises(hr.UserError, match="have no order"):
        by_spark.write_dataset(table, tmp_path / "other")
    with pytest.raises(hr.UserError, match="all of one kind"):
        by_spark.write_dataset(table, tmp_path / "other", valid=df)


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=batches({"price": "double", "n": "bigint", "click": "int"}, label="click"))
def test_a_right_operator_passes(spark: SparkSession, table: pa.Table) -> None:
    check_operator(["price", "n"] >> Halve(), table, label="click", spark=spark)


def test_wrong_operators_are_told_apart(spark: SparkSession) -> None:
    table = pa.table({"price": [1.0, -2.0, 4.0], "click": [0, 1, 0]})
    with pytest.raises(AssertionError, match=r"'price', row 1: 1.0 by Arrow, -1.0 by Spark"):
        check_operator(["price"] >> HalveOtherwise(), table, label="click", spark=spark)
    with pytest.raises(AssertionError, match="without some of the rows"):
        check_operator(["price"] >> LessTheMean(), table, label="click", spark=spark)


def test_a_look_at_the_future_is_seen(spark: SparkSession) -> None:
    days = pd.Timestamp("2026-01-01", tz="UTC") + pd.to_timedelta([0, 1, 1, 2, 5, 3], "D")
    table = pa.table(
        {
            "user": ["a", "a", "b", "a", "b", None],
            "at": pa.array(days, pa.timestamp("us", tz="UTC")),
            "click": [0, 1, 0, 1, 1, 0],
        }
    )
    result = check_table_operator(Rank(key="user"), table, label="click", time="at", spark=spark)
    assert result.column("rank").to_pylist() == [1, 2, 1, 3, 2, 1]
    with pytest.raises(AssertionError, match="without the rows after it"):
        check_table_operator(Rank(key="user", backwards=True), table, label="click", time="at", spark=spark)
