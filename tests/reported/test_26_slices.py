"""Input 26: values of slices with characters that MLflow and HTML have no place for."""

from __future__ import annotations

import html
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from tests.reported import support

DAYS = ["2026-01-06", "2026-01-07", "2026-01-08"]
CITIES = {0: "São Paulo", 1: "a=b, c|d", 2: "100% {x}", 3: "MAP@10 <b>", 4: "日本", 5: None}


@pytest.mark.slow
def test_metrics_of_slices(spark: SparkSession, tmp_path: Path) -> None:
    frame = support.click_log(DAYS)
    frame["city"] = (frame["user_id"] % 6).map(CITIES)
    support.write_days(frame, tmp_path / "in")
    workflow = [
        {"columns": ["user_id", "item_id", "city"], "ops": ["categorify"]},
        {"columns": ["price"], "ops": ["fill_missing", "normalize"]},
    ]
    slices = {"city": "city", "city / x": "concat(city, '@')"}
    spec = support.click_pipeline(
        tmp_path / "in",
        {"city": "string"},
        {"workflow": workflow, "carried": ["event_id", "city"]},
        train={"ranks": 1, "batch_size": 128, "streams": 2, "epochs": 1, "evaluation": {"slices": slices}},
        publish=None,
    )
    ws = Workspace(tmp_path / "home")
    manifests = support.run_day(spec, ws, DAYS[-1], "ingest", "features", "train", "promote", "report")
    facts = str(manifests["train"].facts)
    page = ws.report("reported", DAYS[-1]).read_text()
    for city in filter(None, CITIES.values()):
        assert city in facts
        assert html.escape(city) in page
    assert "MAP@10 <b>" not in page
