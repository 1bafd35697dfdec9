"""Executors that share no scratch folder: the dataset is the one of a machine, to the bit, also where one is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from headrace.config import build_spec
from headrace.manifest import Manifest
from headrace.workspace import Workspace, checkout
from tests.spark.test_features_engines import FURTHER, PREPARE, PREPARED
from tests.spark.test_features_stage import DS, assert_same_dataset, clicks, dataset, digests, land, make_clicks, run


def test_two_executors(spark: SparkSession, tmp_path: Path) -> None:
    """An executor is lost with what it decoded, after the fit; another one in the middle of a shuffle."""
    data = clicks().model_dump(mode="json", by_alias=True, exclude_none=True)
    data["features"]["workflow"] += [*FURTHER, *PREPARED]
    data["features"]["prepare"] = PREPARE
    data["features"]["split"]["test_days"] = 1
    events, here, there = make_clicks(1200, days=6), Workspace(tmp_path / "here"), Workspace(tmp_path / "there")
    for ws in (here, there):
        land(spark, ws, build_spec(data), events, partitions=2)
    (tmp_path / "spec.json").write_text(json.dumps(data))
    line = [sys.executable, "-m", "tests.spark.own_scratch_side", tmp_path / "spec.json", there.home, DS]
    done = subprocess.run([str(w) for w in line], capture_output=True, text=True, check=False, cwd=checkout())
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    said = json.loads(done.stdout.splitlines()[-1])

    expected = run(build_spec(data), here).manifest
    arrow, by_spark = (Manifest.model_validate(said[engine]) for engine in ("arrow", "spark"))
    assert digests(dataset(there, arrow)) == digests(dataset(here, expected))
    assert (arrow.facts, arrow.rows, arrow.key) == (expected.facts, expected.rows, expected.key)
    assert_same_dataset(dataset(there, by_spark), dataset(here, expected))
    assert by_spark.facts == expected.facts
    # Each executor decoded files, no file was decoded twice, and nothing where the driver's folder would be.
    assert len(said["decoded"]) == 2
    assert all(said["decoded"])
    assert not set.intersection(*map(set, said["decoded"]))
    assert here.encoded("clicks").exists()
    assert not list(there.encoded("clicks").files())
    # No table by key was in the driver, but for the one from which its chain learns again.
    assert said["tables"] == ["groups", "item_category_te"]
    assert not (there.spark_local / "prepared").exists()
    # What was sent by the lost executor was sent again.
    assert said["lost"] == sorted([x for t in range(6) for k in (p, p + 4) for x in (t, k)] for p in range(4))
