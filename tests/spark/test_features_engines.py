"""The stage from lake files against the stage from a frame: the same files, bit for bit, and the same facts."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headrace.config import Spec, build_spec
from headrace.drift.count_day import count_day
from headrace.features.build import run
from headrace.features.build.stage import BuildFeatures
from headrace.stage import run_stage
from headrace.workspace import Workspace
from tests.spark.test_features_stage import DS, clicks, dataset, digests, land, make_clicks, make_snapshot, snapshot

#: Beside what the pipelines have: what is not value by value, what is out of fold, what looks at several columns.
FURTHER = [
    {"columns": ["device", "hour"], "ops": [{"hashed_cross": {"buckets": 50}}]},
    {"columns": ["item_category"], "ops": [{"target_encoding": {"folds": 3}}]},
    {"columns": ["user_country"], "ops": ["value_count", "normalize"]},
    {"columns": ["user_id", "device"], "ops": ["raw_id", {"rename": {"suffix": "_raw"}}]},
    {"columns": ["item_tags"], "ops": ["raw_id", {"pad": {"length": 3}}, {"rename": {"suffix": "_raw"}}]},
]


def both(ws: Workspace, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Manifests of the stage from files, and from a frame in another workspace's dataset folder."""
    one = run_stage(BuildFeatures(count_day), spec, ws, DS).manifest
    first = digests(dataset(ws, one))
    assert list(ws.encoded(spec.pipeline).local_path().glob("*/*/0.arrow"))
    monkeypatch.setattr(run, "day_files", lambda *_: nullcontext())
    ws.manifest(spec.pipeline, DS, "features").remove()
    two = run_stage(BuildFeatures(count_day), spec, ws, DS).manifest
    assert digests(dataset(ws, two)) == first
    return one, two


def test_by_time(spark: SparkSession, ws: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    data = clicks().model_dump(mode="json", by_alias=True, exclude_none=True)
    data["features"]["workflow"] += FURTHER
    spec = build_spec(data)
    # Several files a day, days of which no row is seen, rows that landed a day late.
    land(spark, ws, spec, make_clicks(1200, days=6), partitions=2)
    one, two = both(ws, spec, monkeypatch)
    assert one.facts == two.facts
    assert one.rows == two.rows
    assert one.dataset_schema == two.dataset_schema


def test_by_position_and_column(spark: SparkSession, ws: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    events = make_snapshot(("train", "valid", "rank"))
    for spec in (snapshot(), snapshot(split={"by": "column", "column": "part"})):
        with monkeypatch.context() as patch:
            land(spark, ws, spec, events)
            one, two = both(ws, spec, patch)
            assert one.facts == two.facts
            assert one.rows == two.rows
