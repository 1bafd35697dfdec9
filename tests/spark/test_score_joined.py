"""Scores where Spark joins the rows of tables in, against those with tables mapped: equal to the bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headrace.config import EmbeddingOptimizer
from headrace.config.installation import checkout
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models.joined import table_bytes
from headrace.models.saved import Changes, load_model, save_model
from headrace.score.joined_rows import _part
from headrace.score.joined_tables import Partitioning
from headrace.score.score_table import score_table
from headrace.score.scoring_model import scoring_model
from headrace.score.stage import ScoreCandidates
from headrace.stage import Context, run_stage
from headrace.storage import local
from tests.score_support import DS, manifest_of, scores, spec

#: All pairs; candidates with a list by the model's vectors, for those alone whose inputs have changed.
WAYS: list[dict[str, Any]] = [
    {"exclude_seen": True},
    {"candidates": {"limit": 8, "sources": {"liked": {"kind": "popular", "k": 8}}}, "incremental": True},
]


@pytest.fixture
def many_files(shop: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """The shop, whose model lies in a file for every few rows; half of its rows upon a save of the others."""
    ws = Workspace(tmp_path / "home")
    shutil.copytree(shop.home, ws.home)
    if ws.manifest("shop", DS, "score").is_file():
        ws.manifest("shop", DS, "score").remove()
    folder = ws.locate(manifest_of(ws, "train").output("model").name)
    model = load_model(folder)
    model.configure_optimizer(EmbeddingOptimizer())
    monkeypatch.setattr("headrace.embeddings.checkpoint.shards.FILE_BYTES", 500)
    monkeypatch.setattr("headrace.embeddings.checkpoint.changes.FILE_BYTES", 500)
    workflow = ws.locate(manifest_of(ws, "features").output("dataset").name) / "workflow"
    metadata: dict[str, Any] = {"workflow": workflow, "pipeline": "shop", "ds": DS, "key": "t", "metrics": {"auc": 0.5}}
    base = folder.parent.parent / "base" / "model"
    save_model(base, model, **metadata)
    for weight in model.embeddings.weights:
        weight[::2] += 0.25
    folder.remove()
    save_model(folder, model, changes=Changes(base, 1.0), **metadata)
    return ws


def test_scores_are_those_of_mapped_tables_to_the_bit(
    spark: SparkSession, many_files: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no task has a whole table: each file is read by one, and a task holds rows of its own users and items."""
    ws = many_files
    monkeypatch.setattr("headrace.score.model_lists._TASK_PAIRS", 60)  # many parts
    full_model = load_model(folder := ws.locate(manifest_of(ws, "train").output("model").name))
    assert full_model.dynamic is not None
    rows = sum(len(w) for w in full_model.embeddings.weights) + sum(len(t) for t in full_model.dynamic.tables)
    sizes = table_bytes(folder)
    largest = max(sizes, key=sizes.__getitem__)
    for way in WAYS:
        results = []
        # Of all tables; and of the one that the room is too small for.
        auto = {"mapped_mib": (sum(sizes.values()) - 1) / 2**20}
        for embeddings in ({"rows": "mapped"}, {"rows": "joined"}, auto)[: 2 if "candidates" in way else 3]:
            if results:  # so that there is no run before to compare with
                ws.manifest("shop", DS, "score").remove()
            manifest = run_stage(ScoreCandidates(), spec(model="neural", embeddings=embeddings, **way), ws, DS).manifest
            assert manifest.rows.get("users_scored") in (None, manifest.rows["users"])
            results.append(scores(spark, ws))
            joined = manifest.facts["model"].get("joined")
            if embeddings == {"rows": "mapped"}:
                assert joined is None
                continue
            assert joined["tables"] == ([largest] if embeddings is auto else sorted(sizes))
            assert 0 < joined["most_rows_of_a_task"] < joined["rows"]
            assert joined["most_rows_of_a_task"] < (sizes[largest] / 16 if embeddings is auto else rows / 2)
            assert joined["bytes"] > 0
        ws.manifest("shop", DS, "score").remove()
        for result in results[1:]:
            pd.testing.assert_frame_equal(result, results[0], check_exact=True)
    assert len(results[0]) > 100


def test_two_executors_with_a_jvm_each_hold_rows_of_their_own_users(
    spark: SparkSession, many_files: Workspace, tmp_path: Path
) -> None:
    """Each executor's workers have a JVM and a core of their own, and hold the rows of one part at a time."""
    ws = many_files
    run_stage(ScoreCandidates(), spec(model="neural", embeddings={"rows": "mapped"}), ws, DS)
    mapped = scores(spark, ws)
    ws.manifest("shop", DS, "score").remove()
    ws.mapped("shop").remove()
    command = [sys.executable, "-m", "tests.spark.joined_side", str(ws.home), str(tmp_path / "scores")]
    completed = subprocess.run(command, cwd=checkout(), capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout[-4000:] + completed.stderr[-8000:]
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "scores"), mapped, check_exact=True)
    assert len(mapped) > 100

    full_model = load_model(ws.locate(manifest_of(ws, "train").output("model").name))
    assert full_model.dynamic is not None
    rows = sum(len(w) for w in full_model.embeddings.weights) + sum(len(t) for t in full_model.dynamic.tables)
    reports = pd.DataFrame(json.loads(completed.stdout.splitlines()[-1]))
    by_executor = reports.groupby("executor")["rows"].max()
    assert len(by_executor) == 2
    assert by_executor.max() == manifest_of(ws, "score").facts["model"]["joined"]["most_rows_of_a_task"] < rows / 2
    # A user's row goes to one executor alone, once.
    users = next(t for t in full_model.dynamic.tables if t.spec.name == "user_raw")
    assert sorted(reports["users"].sum()) == sorted(users.ids.tolist())
    assert reports["users"].map(len).max() < len(users) / 4
    # And no file of rows was laid out for either.
    files = [p for p in ws.mapped("shop").local_path().rglob("*") if p.is_file() and p.suffix != ".lock"]
    assert [p.name for p in files if not p.name.endswith("=sizes")] == []


def test_rows_of_any_table_have_the_scores_of_mapped_tables(
    spark: SparkSession,
    many_files: Workspace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Pairs whose other columns are looked up; some twice, some of users and items that nobody knows."""
    ws = many_files
    run_stage(ScoreCandidates(), spec(model="neural", top_k=12), ws, DS)
    known = scores(spark, ws)[["user", "item"]].sample(200, random_state=1, replace=True)
    unknown = pd.DataFrame({"user": [known.user.iloc[0], -1, None], "item": [None, "nobody's", None]})
    pairs = pd.concat([known, unknown]).assign(user=lambda d: d.user.astype("Int64"), note=range(203))
    pairs.to_parquet(tmp_path / "pairs")
    monkeypatch.setattr("headrace.score.joined_tables._PART_ROWS", 9)  # many parts
    sizes = table_bytes(ws.locate(manifest_of(ws, "train").output("model").name))
    upstream = {stage: manifest_of(ws, stage) for stage in ("ingest", "features", "train")}
    results = []
    for embeddings in ({"rows": "mapped"}, {"rows": "joined"}, {"mapped_mib": (sum(sizes.values()) - 1) / 2**20}):
        ctx = Context(spec(model="neural", embeddings=embeddings), ws, DS, upstream)
        target, caplog_before = local(tmp_path / f"scored{len(results)}"), len(caplog.records)
        with caplog.at_level("INFO", "headrace.score"):
            assert score_table(ctx, scoring_model(ctx), spark, local(tmp_path / "pairs"), target) == 203
        results.append(pd.read_parquet(target.local_path()).sort_values("note").reset_index(drop=True))
        messages = [r.args for r in caplog.records[caplog_before:] if "were brought" in r.msg]
        if embeddings == {"rows": "mapped"}:
            assert messages == []
            continue
        ((fetched, names, _, most),) = messages
        assert names == (", ".join(sorted(sizes)) if "rows" in embeddings else max(sizes, key=sizes.__getitem__))
        assert 0 < int(most.replace(",", "")) < int(fetched.replace(",", "")) / 5
    assert results[0].score.nunique() > 100
    # The last bit depends on how many rows there are in a batch.
    for result in results[1:]:
        pd.testing.assert_frame_equal(result, results[0], rtol=1e-6)


def test_a_damaged_file_and_too_little_room_are_named(spark: SparkSession, many_files: Workspace) -> None:
    ws = many_files
    with pytest.raises(UserError, match=r"a host may map 0\.0 MiB of them .*score\.embeddings\.rows: auto"):
        run_stage(ScoreCandidates(), spec(model="neural", embeddings={"rows": "mapped", "mapped_mib": 1e-6}), ws, DS)
    folder = ws.locate(manifest_of(ws, "train").output("model").name).local_path()
    file = sorted((folder / "embeddings").glob("weight-*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(UserError, match=f"{file.name} is damaged"):
        run_stage(ScoreCandidates(), spec(model="neural", embeddings={"rows": "joined"}), ws, DS)


def test_each_part_is_a_partition_of_its_own(spark: SparkSession) -> None:
    frame = spark.range(500).withColumn("part", _part(spark, Partitioning.by_hash(F.col("id"), 37)))
    placed = frame.repartition(37, "part").withColumn("partition", F.spark_partition_id())
    counts = placed.groupBy("partition").agg(F.count_distinct("part").alias("parts")).collect()
    assert {row["parts"] for row in counts} == {1}
    assert len(counts) == frame.select("part").distinct().count() > 30
    ranges = Partitioning.by_range(F.col("id"), 500, 7)
    cut = spark.range(500).select("id", ranges.number.alias("part")).orderBy("id").toPandas()["part"]
    assert (cut.is_monotonic_increasing, set(cut), min(cut.value_counts())) == (True, set(range(7)), 71)
