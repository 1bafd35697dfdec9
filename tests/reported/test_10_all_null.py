"""Input 10: a column that is null in all rows, of the day that validates, under many operators."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from tests.reported import support

DAYS = ["2026-01-06", "2026-01-07", "2026-01-08"]
WORKFLOW = [
    {"columns": ["user_id", "item_id"], "ops": [{"categorify": {"min_count": 2}}]},
    {"columns": ["device", "segment"], "ops": ["categorify"]},
    {"columns": ["price"], "ops": ["fill_median", "normalize"]},
    {"columns": ["price"], "ops": [{"rename": {"suffix": "_bin"}}, {"quantile_bin": {"bins": 4}}]},
    {"columns": ["price"], "ops": [{"rename": {"suffix": "_range"}}, "normalize_minmax"]},
    {"columns": ["segment"], "ops": ["target_encoding"]},
    {"columns": ["segment"], "ops": ["value_count"]},
    {"columns": ["segment", "price"], "ops": [{"join_groupby": {"by": ["segment"], "stats": ["mean", "std", "min"]}}]},
]


@pytest.mark.slow
def test_a_whole_day_of_nulls(spark: SparkSession, tmp_path: Path) -> None:
    frame = support.click_log(DAYS)
    frame["segment"] = "s" + (frame["user_id"] % 5).astype(str)
    is_empty = frame["ts"].dt.date.astype(str) == DAYS[-1]
    frame.loc[is_empty, ["segment", "price"]] = None
    support.write_days(frame, tmp_path / "in")
    score = {
        "user": {"key": "user_id", "columns": ["segment"]},
        "item": {"key": "item_id", "columns": ["price"]},
        "context": {"device": "mobile"},
        "top_k": 3,
    }
    spec = support.click_pipeline(
        tmp_path / "in", {"segment": "string"}, {"workflow": WORKFLOW, "window_days": 2}, score=score
    )
    stages = ("ingest", "features", "train", "promote", "score", "publish")
    manifests = support.run_day(spec, Workspace(tmp_path / "home"), DAYS[-1], *stages)
    assert manifests["ingest"].rows["quarantined"] == 0
    assert manifests["features"].rows["train"] + manifests["features"].rows["valid"] == len(frame)
    rows = support.published(tmp_path / "in")
    assert len(rows) == 3 * frame["user_id"].nunique()
    assert rows["score"].between(0, 1).all()
