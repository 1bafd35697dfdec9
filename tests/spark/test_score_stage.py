"""The score stage against a cross join in pandas, with features by training's own Spark expressions."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import SparkSession

from headrace.comm.base import LocalCollective
from headrace.config import Model, Task
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models.saved import save_model
from headrace.models.sharded_model import ShardedModel
from headrace.score import run
from headrace.score.stage import ScoreCandidates
from headrace.stage import run_stage
from tests.score_support import DS, clicked_pairs, expected, manifest_of, scores, sides, spec


def test_equals_brute_force_and_reruns(spark: SparkSession, shop: Workspace, shop_events: pd.DataFrame) -> None:
    s = spec(model="baseline")
    manifest = run_stage(ScoreCandidates(), s, shop, DS).manifest
    actual, expected_scores = scores(spark, shop), expected(spark, shop, shop_events, "baseline")
    pd.testing.assert_frame_equal(
        actual[["user", "item", "rank", "score"]], expected_scores, check_dtype=False, check_exact=True
    )
    # Worth something: shallow trees give many ties.
    assert expected_scores.duplicated(["user", "score"]).sum() > len(expected_scores) / 10
    assert list(actual.columns) == ["ds", "user", "item", "rank", "score", "model_version"]
    assert set(actual.model_version) == {manifest_of(shop, "baseline").key}
    users, _ = sides(shop_events, 12)
    assert manifest.rows == {"users": len(users), "candidates": 12, "pairs": 12 * len(users), "scores": 5 * len(users)}
    assert manifest.facts["model"]["stage"] == "baseline"
    assert manifest.peak_memory_mib["worker"] > 50
    assert manifest.facts["sample"][0] == actual.iloc[0].to_dict()
    clicked = set(clicked_pairs(shop_events))
    consumed = sum(pair in clicked for pair in zip(actual.user, actual.item, strict=True))
    assert manifest.facts["consumed"] == {"users": len(users), "listed": len(actual), "consumed": consumed}
    assert 0 < consumed < len(actual)
    assert run_stage(ScoreCandidates(), s, shop, DS).skipped

    # Another day's rows stay; a run that died after its commit is made again, with nothing doubled.
    other_day = actual.head(1).assign(ds="2026-01-04")
    types = "ds string, user bigint, item string, rank int, score float, model_version string"
    table = shop.table("shop", "scores")
    spark.createDataFrame(other_day, types).write.format("delta").mode("append").save(str(table))
    shop.manifest("shop", DS, "score").remove()
    rerun = run_stage(ScoreCandidates(), s, shop, DS).manifest
    pd.testing.assert_frame_equal(scores(spark, shop), actual, check_exact=True)
    assert len(scores(spark, shop, "2026-01-04")) == 1
    assert rerun.key == manifest.key

    # A lost data file is noticed, and mended.
    for path in (table.local_path() / f"ds={DS}").glob("*.parquet"):
        path.unlink()
    healed = run_stage(ScoreCandidates(), s, shop, DS)
    assert not healed.skipped
    assert "is gone" in healed.reason
    pd.testing.assert_frame_equal(scores(spark, shop), actual, check_exact=True)


def test_neural(
    spark: SparkSession, shop: Workspace, shop_events: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_SAMPLED_USERS", 3)
    manifest = run_stage(ScoreCandidates(), spec(model="neural"), shop, DS).manifest
    assert manifest.facts["model"]["version"] == "t"
    assert {name: manifest.facts["consumed"][name] for name in ("users", "listed")} == {"users": 3, "listed": 15}
    actual, expected_scores = scores(spark, shop), expected(spark, shop, shop_events, "train")
    # A matrix product's last bits depend on the batch's size, so near ties may change places.
    np.testing.assert_allclose(actual.score, expected_scores.score, rtol=1e-5)
    np.testing.assert_array_equal(actual.user, expected_scores.user)
    assert (actual.item == expected_scores.item).mean() > 0.98


def test_ranks_by_a_product_of_tasks(
    spark: SparkSession, shop: Workspace, shop_events: pd.DataFrame, tmp_path: Path
) -> None:
    ws = Workspace(tmp_path / "home")
    shutil.copytree(shop.home, ws.home)
    schema = manifest_of(ws, "features").dataset_schema
    assert schema is not None
    tasks = {"click": Task(), "buy": Task(label="bought"), "click_and_buy": Task(product=("click", "buy"))}
    shape = Model.model_validate({"class": "shared_bottom", "embedding_dim": 4})
    model = ShardedModel(schema, shape, LocalCollective(), 5, tasks=tasks)
    trained = manifest_of(ws, "train")
    folder = ws.locate(trained.output("model").name)
    workflow = ws.locate(manifest_of(ws, "features").output("dataset").name) / "workflow"
    save_model(folder, model, workflow=workflow, pipeline="shop", ds=DS, key="t", metrics={"auc": 0.5})
    if ws.manifest("shop", DS, "score").is_file():
        ws.manifest("shop", DS, "score").remove()  # of another model
    results = []
    for output in (None, "click_and_buy"):
        s = spec(model="neural")
        assert s.score is not None
        s = s.model_copy(update={"score": s.score.model_copy(update={"output": output})})
        manifest = run_stage(ScoreCandidates(), s, ws, DS).manifest
        assert manifest.facts["model"].get("output") == output
        results.append(scores(spark, ws))
        expected_scores = expected(spark, ws, shop_events, "train", output=output)
        np.testing.assert_allclose(results[-1].score, expected_scores.score, rtol=1e-5)
        assert (results[-1].item == expected_scores.item).mean() > 0.98
    assert (results[0].item != results[1].item).any()
    assert results[0].score.mean() > results[1].score.mean()


@pytest.mark.parametrize("exclude_seen", [True, "any_label"])
def test_limits_and_seen(
    spark: SparkSession, shop: Workspace, shop_events: pd.DataFrame, exclude_seen: bool | str
) -> None:
    s = spec(
        model="baseline",
        exclude_seen=exclude_seen,
        top_k=50,
        user={"key": "user", "columns": ["age", "home.city", "likes"], "limit": 7},
    )
    assert "consumed" not in run_stage(ScoreCandidates(), s, shop, DS).manifest.facts
    clicked = clicked_pairs(shop_events, any_label=exclude_seen == "any_label")
    expected_scores = expected(spark, shop, shop_events, "baseline", k=50, clicked=clicked)
    train = shop_events[(shop_events.ts >= "2026-01-02") & (shop_events.ts < "2026-01-05") & (shop_events.ds <= DS)]
    counts = train.user.value_counts()
    most = sorted(counts.index, key=lambda u: (-counts[u], u))[:7]
    expected_scores = expected_scores[expected_scores.user.isin(most)].reset_index(drop=True)
    actual = scores(spark, shop)[["user", "item", "rank", "score"]]
    pd.testing.assert_frame_equal(actual, expected_scores, check_dtype=False, check_exact=True)
    assert len(actual) < 7 * 12, "nobody has clicked anything"


def test_messages(spark: SparkSession, shop: Workspace, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ws = Workspace(tmp_path / "home")
    shutil.copytree(shop.home, ws.home)
    with pytest.raises(UserError, match="the features read 'hour'"):
        run_stage(ScoreCandidates(), spec(context={}), ws, DS)

    # The table's other days were written with other keys.
    swapped = spec(user={"key": "home.city", "columns": ["user", "age", "likes"]})
    with pytest.raises(UserError, match="its keys were others"):
        run_stage(ScoreCandidates(), swapped, ws, DS)

    # A damage that only a task finds still comes out as one message.
    dense = ws.home / manifest_of(ws, "train").output("model").name / "dense.safetensors"
    data = bytearray(dense.read_bytes())
    data[-1] ^= 0xFF
    dense.write_bytes(data)
    with caplog.at_level(logging.CRITICAL), pytest.raises(UserError, match=r"dense\.safetensors"):
        run_stage(ScoreCandidates(), spec(top_k=4), ws, DS)

    ws.manifest("shop", DS, "baseline").local_path().unlink()
    with pytest.raises(UserError, match=f"no finished baseline for {DS}"):
        run_stage(ScoreCandidates(), spec(model="baseline"), ws, DS)
