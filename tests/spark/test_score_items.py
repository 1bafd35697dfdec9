"""ItemTable written by Spark's tasks, against the same items in pandas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.config import build_spec
from headrace.config.workspace import Workspace
from headrace.score.items import HASHES, ItemTable
from headrace.stage import Context
from headrace.storage import local


@pytest.mark.parametrize(("limit", "listed"), [(None, None), (5000, None), (5000, "catalogue")])
def test_spark_writes_what_it_reads(spark: SparkSession, tmp_path: Path, limit: int | None, listed: str | None) -> None:
    types = {"shop.id": "string", "price": "double", "tags": "array<string>", "at": "timestamp", "click": "int"}
    spec = build_spec(
        {
            "pipeline": "shop",
            "source": {"format": "jsonl", "path": "{ds}/*"},
            "table": {"columns": [{"name": k, "type": v} for k, v in types.items()], "event_time": "at"},
            "features": {
                "label": "click",
                "split": {"by": "time", "valid_days": 1},
                "window_days": 3,
                "workflow": [{"columns": ["price"], "ops": ["log"]}],
            },
            "sources": {
                "catalogue": {
                    "source": {"format": "jsonl", "path": "catalogue/*"},
                    "table": {"columns": [{"name": "shop.id", "type": "string"}]},
                }
            },
            "score": {"user": {"key": "click"}, "item": {"key": "shop.id", "limit": limit, "from": listed}},
        }
    )
    ctx = Context(spec, Workspace(tmp_path / "home"), "2026-01-05")
    rng = np.random.default_rng(3)
    ids = [f"{'é' if i % 3 else 'Z'}{i}" for i in rng.permutation(4000)]
    prices = [None if p < 0.1 else p for p in rng.random(len(ids))]
    seconds = pa.array(np.arange(len(ids)) * 10**6, pa.timestamp("us", "UTC"))
    tags = [list("ab"[: i % 3]) for i in range(len(ids))]
    table = pa.table({"shop.id": [*ids[:-1], None], "price": prices, "tags": tags, "at": seconds})
    frame = spark.createDataFrame(table).repartition(3)
    item_table = ItemTable.write(ctx, spark, frame, local(tmp_path / "items"))
    expected = table.to_pandas().dropna(subset=["shop.id"])
    expected = expected.assign(order=expected["shop.id"].str.encode("utf-8")).sort_values("order").drop(columns="order")
    expected = expected.reset_index(drop=True)
    assert item_table.rows == len(ids) - 1
    assert len(item_table.parts) == (1 if limit and not listed else spark.sparkContext.defaultParallelism)
    pd.testing.assert_frame_equal(item_table.open().drop(list(HASHES)).to_pandas(), expected)
    rows = rng.integers(0, item_table.rows, 500)
    assert item_table.rows_of(item_table.keys(rows)).tolist() == rows.tolist()
    stored = item_table.frame(spark).orderBy("item_row").toArrow()
    assert stored["item_row"].to_pylist() == list(range(item_table.rows))
    pd.testing.assert_frame_equal(stored.drop(["item_row"]).to_pandas(), expected)

    # Cut otherwise it is the same; another value is another.
    rewritten = ItemTable.write(ctx, spark, frame.coalesce(1), local(tmp_path / "items"))
    assert rewritten.fingerprint == item_table.fingerprint
    changed_table = ItemTable.write(
        ctx, spark, frame.replace(prices[1] or 0.5, 0.25, "price"), local(tmp_path / "other")
    )
    assert changed_table.fingerprint != item_table.fingerprint
    changed = changed_table.open()[HASHES[0]].to_numpy() != item_table.open()[HASHES[0]].to_numpy()
    assert changed.sum() == 1
    none = ItemTable.write(ctx, spark, frame.limit(0), local(tmp_path / "none"))
    assert (none.rows, none.frame(spark).count()) == (0, 0)
