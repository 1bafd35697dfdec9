"""Table operators: the Spark body makes the rows that the Arrow body makes; nothing leaks; a day's run uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from headrace.features.tables.preparation import Preparation
from headrace.features.tables.table_op import TrainRows
from tests.tables_support import (
    PAST,
    ROWS,
    TYPES,
    Row,
    as_table,
    assert_rows,
    external,
    number,
    prepare,
)

OTHERS: list[dict[str, Any]] = [
    {"filter": {"where": "not (n = 3 and flag) or ts >= '2026-01-04 06:00:00'"}},
    {"dropna": {"subset": ["user", "item", "tags", "price"], "how": "all"}},
    {"join_external": {"path": "tables/items", "format": "parquet", "keys": {"item": "id"}, "prefix": "its_",
                       "add": {"brand": "string", "stock": "bigint"}}},
    {"join_asof": {"path": "tables/prices", "format": "parquet", "keys": ["item"], "valid_from": "since",
                   "add": {"list_price": "double", "tier": "string"}, "tolerance_days": 4}},
    {"join_asof": {"path": "tables/prices", "format": "parquet", "keys": ["item"], "valid_from": "since",
                   "add": {"list_price": "double"}, "at": "before", "prefix": "earlier_"}},
    {"rename": {"to": {"n": "number", "odd.na`me": "n", "big": "odd.na`me"}}},
]  # fmt: skip
NEGATIVES = {
    "negatives": {"item": "item", "item_columns": ["price", "tags"], "user": "user", "exclude_seen": True,
                  "per_positive": 3, "method": "popularity", "tries": 5}
}  # fmt: skip


def as_frame(spark: SparkSession, table: pa.Table) -> DataFrame:
    ddl = [f"`{n.replace('`', '``')}` {t}" for n, t in TYPES.items()]
    ddl += ["_source_file string", "_source_line bigint"]
    ddl += ["__probe string"] if "__probe" in table.schema.names else []
    return spark.createDataFrame(table, ", ".join(ddl)).repartition(3)


def both(spark: SparkSession, p: Preparation, rows: list[Row], home: Path, train: TrainRows | None = None) -> pa.Table:
    """The rows by the Arrow body, after the Spark body has made the same."""
    reader, table = external(home), as_table(rows, probe=any("__probe" in r for r in rows))
    by_arrow = p.arrow(table, reader, train)
    by_spark = p.spark(as_frame(spark, table), reader, train).toArrow()
    assert_rows(by_spark.select(by_arrow.schema.names), by_arrow)
    return by_arrow


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(ROWS, st.lists(st.sampled_from([None, None, None, "asks"]), min_size=40, max_size=40))
def test_spark_equals_arrow(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, rows: list[Row], probes: list[str | None]
) -> None:
    rows = [{**r, "__probe": p} for r, p in zip(number(rows), probes, strict=False)]
    both(spark, prepare(*OTHERS[:-1], *PAST, OTHERS[-1]), rows, tmp_path_factory.mktemp("tables"))
