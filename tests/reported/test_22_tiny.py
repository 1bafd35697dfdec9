"""Fewer rows than streams and ranks, one user and one item, then a day of one row more.

Reported as https://github.com/NVIDIA-Merlin/NVTabular/issues/1320 and https://github.com/horovod/horovod/issues/3888:
ranks with unequal numbers of batches, or none, wait for each other for ever.
"""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from tests.reported import support

#: Day -> rows.
ROWS = {"2026-01-06": 3, "2026-01-07": 2, "2026-01-08": 2, "2026-01-09": 1}
STAGES = ("ingest", "features", "train", "promote", "score", "publish")


def tiny_log() -> pd.DataFrame:
    """Return eight events of one user and one item; price is the same in all."""
    times = [pd.Timestamp(f"{day}T1{k}:00:00", tz="UTC") for day, n in ROWS.items() for k in range(n)]
    rows = {"event_id": range(1, len(times) + 1), "ts": times, "user_id": 7, "item_id": 9, "device": "m", "price": 1.5}
    frame = pd.DataFrame(rows)
    frame["clicked"] = frame.event_id % 2
    return frame


@pytest.mark.slow
def test_two_whole_days_by_two_ranks(spark: SparkSession, tmp_path: Path) -> None:
    del spark
    support.write_days(tiny_log(), tmp_path / "in")
    workflow = [
        {"columns": ["user_id"], "ops": ["categorify"], "tags": ["user"]},
        {"columns": ["item_id"], "ops": ["categorify"], "tags": ["item"]},
        {"columns": ["device"], "ops": ["categorify"]},
        {"columns": ["price"], "ops": ["fill_missing", "normalize"]},
    ]
    score = {
        "user": {"key": "user_id", "columns": []},
        "item": {"key": "item_id", "columns": ["price"]},
        "context": {"device": "m"},
        "top_k": 5,
    }
    train = {"ranks": 2, "batch_size": 4096, "streams": 4, "epochs": 2}
    spec = support.click_pipeline(tmp_path / "in", {}, {"workflow": workflow}, score=score, train=train)
    ws = Workspace(tmp_path / "home")
    for ds, rows in (("2026-01-08", {"train": 5, "valid": 2}), ("2026-01-09", {"train": 7, "valid": 1})):
        manifests = support.run_day(spec, ws, ds, *STAGES)
        assert {split: manifests["features"].rows[split] for split in rows} == rows
        facts = manifests["train"].facts
        assert facts["ranks"] == 2
        assert math.isfinite(facts["metrics"]["log_loss"])
        assert (facts["warm_start"] is None) == (ds == "2026-01-08")
    published = support.published(tmp_path / "in")
    assert published[["ds", "user_id", "item_id", "rank"]].astype(str).to_numpy().tolist() == [
        ["2026-01-08", "7", "9", "1"],
        ["2026-01-09", "7", "9", "1"],
    ]
    assert published["score"].between(0, 1).all()
