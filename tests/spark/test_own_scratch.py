"""Executors that share no scratch folder: datasets, tables and scores are a machine's, also where one is lost."""

from __future__ import annotations

import bz2
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import SparkSession

from headrace.config import Spec, build_spec
from headrace.config.installation import checkout
from headrace.config.workspace import Workspace
from headrace.score.stage import ScoreCandidates
from headrace.stage import run_stage
from headrace.stage.manifest import Manifest
from tests import ingest_support, score_support
from tests.ingest_support import D1, D2, event, jsonl, make_spec, put
from tests.spark.test_features_engines import FURTHER, PREPARE, PREPARED
from tests.spark.test_features_stage import DS, assert_same_dataset, clicks, dataset, digests, land, make_clicks, run

#: Candidates that are kept in files, of vectors and of an index of these; and users whose lists are copied.
SCORES = score_support.spec(
    model="neural",
    item={"key": "item", "columns": ["price"]},
    candidates={
        "limit": 12,
        "sources": {
            "liked": {"kind": "popular", "k": 6},
            "near": {"kind": "vectors", "k": 4},
            "indexed": {"kind": "vectors", "k": 3, "index": "ivf", "min_recall": 0.5},
        },
    },
    incremental=True,
)


def clicked() -> Spec:
    data = spoken(clicks())
    data["features"]["workflow"] += [*FURTHER, *PREPARED]
    data["features"]["prepare"] = PREPARE
    data["features"]["split"]["test_days"] = 1
    return build_spec(data)


def remembered() -> Spec:
    """Return a spec whose rows Spark makes, since they look at earlier ones."""
    data = spoken(clicked())
    data["features"]["prepare"].append({"history": {"keys": ["user_id"], "values": ["item_id"], "length": 3}})
    histories = {"columns": ["item_id_history"], "ops": ["categorify", {"pad": {"length": 3}}]}
    data["features"]["workflow"].append(histories)
    return build_spec(data)


def spoken(spec: Spec) -> dict[str, Any]:
    fields: dict[str, Any] = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    return fields


def deliver(ws: Workspace) -> None:
    """Two days of files: rows that are good, bad or there twice, and lines for Spark's rules, also in bzip2."""
    first = [event(i, D1) for i in range(60)]
    put(ws, f"in/{D1}/a.jsonl", jsonl([*first, event(3, D1, price=9), "not JSON", event(60, D1, hour=77)]))
    put(ws, f"in/{D1}/b.jsonl.bz2", bz2.compress(jsonl([event(i, D1, note="b" * i) for i in range(50, 160)])))
    second = [event(i, D2) for i in range(155, 300)]
    put(ws, f"in/{D2}/a.jsonl.bz2", bz2.compress(jsonl([*second, event(7, D2, ts=f"{D1}T07:30:00Z"), "{", "[]"])))
    put(ws, f"in/{D2}/b.jsonl", jsonl([event(i, D2, user=i % 7) for i in range(290, 360)]))


@pytest.fixture(scope="module")
def homes(spark: SparkSession, shop: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of homes for each place, this machine and the executors: what stages begin with."""
    folder = tmp_path_factory.mktemp("homes")
    for place in ("here", "there"):
        for name, spec in (("features", clicked()), ("prepared", remembered())):
            land(spark, Workspace(folder / place / name), spec, make_clicks(1200, days=6), partitions=2)
        deliver(Workspace(folder / place / "ingest"))
        home = Workspace(folder / place / "score")
        shutil.copytree(shop.home, home.home)
        score_support.save_two_tower(home)
        home.manifest("shop", score_support.DS, "score").remove()
        home.mapped("shop").parent.remove()
        (home.scratch / "spark").remove()
    return folder


@pytest.fixture(scope="module")
def report(homes: Path) -> dict[str, Any]:
    """Return the executors' report: one application for all stages."""
    stages = {
        "features": (clicked(), DS),
        "prepared": (remembered(), DS),
        "ingest": (make_spec(), D2),
        "score": (SCORES, score_support.DS),
    }
    specs = {stage: (spoken(spec), ds) for stage, (spec, ds) in stages.items()}
    (homes / "there" / "specs.json").write_text(json.dumps(specs))
    line = [sys.executable, "-m", "tests.spark.own_scratch_side", str(homes / "there")]
    completed = subprocess.run(line, capture_output=True, text=True, check=False, cwd=checkout())
    assert completed.returncode == 0, (completed.stdout + completed.stderr)[-6000:]
    answer: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return answer


def both(homes: Path, stage: str) -> tuple[Workspace, Workspace]:
    return Workspace(homes / "here" / stage), Workspace(homes / "there" / stage)


def test_features(spark: SparkSession, homes: Path, report: dict[str, Any]) -> None:
    """An executor is lost with what it decoded, after the fit; another one in the middle of a shuffle."""
    local_ws, cluster_ws = both(homes, "features")
    expected = run(clicked(), local_ws).manifest
    arrow, by_spark = (Manifest.model_validate(report[engine]) for engine in ("arrow", "spark"))
    assert digests(dataset(cluster_ws, arrow)) == digests(dataset(local_ws, expected))
    assert (arrow.facts, arrow.rows, arrow.key) == (expected.facts, expected.rows, expected.key)
    assert_same_dataset(dataset(cluster_ws, by_spark), dataset(local_ws, expected))
    assert by_spark.facts == expected.facts
    # Each executor decoded files, no file was decoded twice, and nothing where the driver's folder would be.
    assert len(report["decoded"]) == 2
    assert all(report["decoded"])
    assert not set.intersection(*map(set, report["decoded"]))
    assert local_ws.encoded("clicks").exists()
    assert not list(cluster_ws.encoded("clicks").files())
    # No table by key was in the driver, nor those from which their chains learn again; of these nothing is left.
    tables = ["groups", "item_category_te", "user_country", "user_id"]
    assert report["tables"] == dict.fromkeys(("arrow", "spark"), tables)
    assert not list(cluster_ws.staging("clicks").files())
    assert not list((cluster_ws.spark_local / "prepared").files())
    # What was sent by the lost executor was sent again.
    assert report["lost"] == sorted([x for t in range(6) for k in (p, p + 4) for x in (t, k)] for p in range(4))


def test_rows_that_spark_prepared(spark: SparkSession, homes: Path, report: dict[str, Any]) -> None:
    """Spark leaves the rows in the lake; executors decode them, and one is lost with what it decoded."""
    local_ws, cluster_ws = both(homes, "prepared")
    expected = run(remembered(), local_ws).manifest
    prepared = report["prepared"]
    manifest = Manifest.model_validate(prepared["manifest"])
    assert digests(dataset(cluster_ws, manifest)) == digests(dataset(local_ws, expected))
    assert (manifest.facts, manifest.rows, manifest.key) == (expected.facts, expected.rows, expected.key)
    assert prepared["staged"] == sum(map(len, prepared["decoded"])) > 0
    assert not set.intersection(*map(set, prepared["decoded"]))
    assert not list(cluster_ws.staging("clicks").files())


def test_ingest(spark: SparkSession, homes: Path, report: dict[str, Any]) -> None:
    """Tasks that have left their files were lost: none of their lines is there twice."""
    local_ws, cluster_ws = both(homes, "ingest")
    expected, actual = ingest_support.run(make_spec(), local_ws, D2).manifest, Manifest.model_validate(report["ingest"])
    for name in ("events", "quarantine"):
        rows = ingest_support.table(spark, cluster_ws, name)
        assert rows == ingest_support.table(spark, local_ws, name)
        assert len({(r["_source_file"], r["_source_line"]) for r in rows}) == len(rows) > 2
    assert (actual.rows, actual.facts, actual.key) == (expected.rows, expected.facts, expected.key)
    assert actual.rows["duplicates"] > 10
    assert {p.name for p in cluster_ws.home.glob("lost-*")} == {"lost-ReadTask", "lost-SuspectTask"}
    # In the lake nothing is left of what tasks handed to each other.
    assert not list(cluster_ws.staging("shop").files())


def test_scores(spark: SparkSession, homes: Path, report: dict[str, Any]) -> None:
    local_ws, cluster_ws = both(homes, "score")
    expected = run_stage(ScoreCandidates(), SCORES, local_ws, score_support.DS).manifest
    actual, expected_scores = (score_support.scores(spark, ws) for ws in (cluster_ws, local_ws))
    pd.testing.assert_frame_equal(actual, expected_scores, check_exact=True)
    manifest = Manifest.model_validate(report["score"])
    assert (manifest.rows, manifest.key) == (expected.rows, expected.key)
    assert len(actual) > 100
    assert (cluster_ws.home / "lost-_Transform").exists()
    # Executors laid out the model's tables, and the items' features, in folders of their own.
    assert "tables" in report["mapped"]
    assert any(name.startswith("item-features-") for name in report["mapped"])
    assert not list(cluster_ws.staging("shop").files())
