"""ItemTable written by Spark's tasks, against the same items in pandas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.config import build_spec
from headrace.score.items import HASHES, ItemTable
from headrace.stage import Context
from headrace.storage import local
from headrace.workspace import Workspace


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
    made = ItemTable.write(ctx, spark, frame, local(tmp_path / "items"))
    wanted = table.to_pandas().dropna(subset=["shop.id"])
    wanted = wanted.assign(order=wanted["shop.id"].str.encode("utf-8")).sort_values("order").drop(columns="order")
    wanted = wanted.reset_index(drop=True)
    assert made.rows == len(ids) - 1
    assert len(made.parts) == (1 if limit and not listed else spark.sparkContext.defaultParallelism)
    pd.testing.assert_frame_equal(made.open().drop(list(HASHES)).to_pandas(), wanted)
    rows = rng.integers(0, made.rows, 500)
    assert made.rows_of(made.keys(rows)).tolist() == rows.tolist()
    found = made.frame(spark).orderBy("item_row").toArrow()
    assert found["item_row"].to_pylist() == list(range(made.rows))
    pd.testing.assert_frame_equal(found.drop(["item_row"]).to_pandas(), wanted)

    # Cut otherwise it is the same; another value is another.
    again = ItemTable.write(ctx, spark, frame.coalesce(1), local(tmp_path / "items"))
    assert again.fingerprint == made.fingerprint
    other = ItemTable.write(ctx, spark, frame.replace(prices[1] or 0.5, 0.25, "price"), local(tmp_path / "other"))
    assert other.fingerprint != made.fingerprint
    changed = other.open()[HASHES[0]].to_numpy() != made.open()[HASHES[0]].to_numpy()
    assert changed.sum() == 1
    none = ItemTable.write(ctx, spark, frame.limit(0), local(tmp_path / "none"))
    assert (none.rows, none.frame(spark).count()) == (0, 0)
