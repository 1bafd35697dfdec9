"""Several models on one day: each user has the list of the model of his arm, as Arrow says it of his key."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headrace.config import Experiment, Outcomes, Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.score.assignment import Live, Stop, arms, stop_arm
from headrace.score.model_lists import AssignmentColumns
from headrace.score.stage import ScoreCandidates
from headrace.stage import run_stage
from tests.score_support import DS, expected, manifest_of, scores, spec

EXPERIMENTS: dict[str, Any] = {
    "ranker": {"arms": {"neural": {"share": 0.4}, "trees": {"model": "baseline", "share": 0.6}}, "percent": 70},
    "banner": {"arms": {"red": {}, "blue": {}, "none": {}}, "salt": "of its own"},
    "again": {"arms": {"neural": {}, "trees": {"model": "baseline"}}, "percent": 60, "start": DS, "end": DS},
    "over": {"arms": {"a": {}, "b": {"model": "baseline"}}, "end": "2026-01-04"},
}


def with_experiments(**score: Any) -> Spec:
    known = {name: Experiment.model_validate(fields) for name, fields in EXPERIMENTS.items()}
    return spec(**score).model_copy(update={"experiments": known, "outcomes": Outcomes()})


def dealt(users: pa.Array) -> pd.DataFrame:
    """Return the experiments' arms of users, as the column `arms`, and which model scores them."""
    assigned: dict[str, list[str | None]] = {}
    for name in ("ranker", "banner", "again"):
        experiment = Experiment.model_validate(EXPERIMENTS[name])
        place = arms(users, experiment.salt or name, experiment.shares, experiment.percent)
        assigned[name] = [None if i < 0 else list(experiment.arms)[i] for i in place]
    records = []
    for user, ranker, banner, again in zip(
        users.to_pylist(), assigned["ranker"], assigned["banner"], assigned["again"], strict=True
    ):
        user_arms = {"ranker": ranker, "banner": banner, "again": None if ranker else again}
        text = ",".join(f"{name}={arm}" for name, arm in user_arms.items() if arm)
        stage = "baseline" if "trees" in (user_arms["ranker"], user_arms["again"]) else "train"
        records.append((user, text, stage))
    return pd.DataFrame(records, columns=["user", "arms", "stage"])


def test_users_are_scored_by_the_model_of_their_arm(
    spark: SparkSession, shop: Workspace, shop_events: pd.DataFrame, tmp_path: Path
) -> None:
    ws = Workspace(tmp_path / "home")
    shutil.copytree(shop.home, ws.home)
    if ws.manifest("shop", DS, "score").is_file():
        ws.manifest("shop", DS, "score").remove()
    s = with_experiments(incremental=True)
    manifest = run_stage(ScoreCandidates(), s, ws, DS).manifest
    actual = scores(spark, ws)
    assert list(actual.columns) == ["ds", "user", "item", "rank", "score", "model_version", "arms"]
    by_stage = {stage: expected(spark, ws, shop_events, stage) for stage in ("train", "baseline")}
    users = pa.array(sorted(set(by_stage["train"].user)))
    assignment = dealt(users)
    assert set(assignment.stage) == {"train", "baseline"}
    assert assignment.arms.str.contains("again=").any()
    expected_rows = pd.concat(
        rows[rows.user.isin(assignment.user[assignment.stage == stage])] for stage, rows in by_stage.items()
    )
    expected_rows = expected_rows.sort_values(["user", "rank"], ignore_index=True).merge(assignment, on="user")
    pd.testing.assert_frame_equal(
        actual[["user", "item", "rank", "score", "arms"]],
        expected_rows[["user", "item", "rank", "score", "arms"]],
        check_dtype=False,
        check_exact=True,
    )
    assert actual.model_version.tolist() == [manifest_of(ws, stage).key for stage in expected_rows.stage]
    assert manifest.rows["users"] == len(users)
    counts = {entry["kind"]: entry["users"] for entry in manifest.facts["models"]}
    assert counts == {"neural": (assignment.stage == "train").sum(), "baseline": (assignment.stage == "baseline").sum()}
    assert sum(manifest.facts["experiments"]["banner"].values()) == len(users)
    assert manifest.facts["model"]["kind"] == "neural"
    assert run_stage(ScoreCandidates(), s, ws, DS).skipped

    # An arm is stopped from this day on: its users alone are scored again, by the control's model.
    stop = Stop(experiment="ranker", arm="trees", ds=DS, by="me", at=datetime.now(UTC), reason="x")
    stop_arm(ws, "shop", stop)
    rerun = run_stage(ScoreCandidates(), s, ws, DS)
    assert not rerun.skipped
    stopped = assignment.arms.str.contains("ranker=trees")
    assert rerun.manifest.rows["users_scored"] == stopped.sum() > 0
    after = scores(spark, ws)
    lists = by_stage["train"][by_stage["train"].user.isin(assignment.user[stopped])]
    stopped_rows = after[after.user.isin(assignment.user[stopped])]
    assert stopped_rows.score.tolist() == lists.score.tolist()
    assert set(stopped_rows.arms) == {text.removeprefix("ranker=trees,") for text in assignment.arms[stopped]}
    unaffected = [frame[~frame.user.isin(assignment.user[stopped])].reset_index(drop=True) for frame in (after, actual)]
    pd.testing.assert_frame_equal(*unaffected, check_exact=True)

    # What asks for a model that is not there is said before anything is read.
    lost = json.loads(json.dumps(EXPERIMENTS["ranker"]).replace('"baseline"', '"@challenger"'))
    bad = s.model_copy(update={"experiments": {"fresh": Experiment.model_validate(lost)}})
    with pytest.raises(UserError, match="no alias 'challenger' of model 'shop'"):
        run_stage(ScoreCandidates(), bad, ws, DS)


def test_arms_of_texts_and_numbers_are_those_of_arrow(spark: SparkSession) -> None:
    experiments = [
        Live(name, Experiment.model_validate(EXPERIMENTS[name]), {}) for name in ("ranker", "banner", "again")
    ]
    for users in (pa.array([f"é{i}" for i in range(500)]), pa.array(np.arange(-250, 250))):
        is_integer = pa.types.is_integer(users.type)
        assigned = AssignmentColumns.of_users(F.col("k"), is_integer, experiments, {None: 0, "baseline": 1})
        frame = spark.createDataFrame(pa.table({"k": users}))
        actual = frame.select("k", assigned.arms.alias("arms"), assigned.model.alias("model")).toPandas()
        assignment = dealt(users).set_index("user").loc[actual.k]
        assert actual.arms.fillna("").tolist() == assignment.arms.tolist()
        assert actual.model.tolist() == (assignment.stage == "baseline").astype(int).tolist()


def test_candidates_are_made_for_each_models_users(spark: SparkSession, shop: Workspace, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "candidates": {"limit": 8, "sources": {"liked": {"kind": "popular", "k": 8}}},
        "exclude_seen": True,
    }
    lists = {}
    for name, s in (
        ("both", with_experiments(**settings)),
        ("neural", spec(**settings)),
        ("trees", spec(**settings, model="baseline")),
    ):
        ws = Workspace(tmp_path / name)
        shutil.copytree(shop.home, ws.home)
        if ws.manifest("shop", DS, "score").is_file():
            ws.manifest("shop", DS, "score").remove()
        manifest = run_stage(ScoreCandidates(), s, ws, DS).manifest
        assert manifest.facts["candidates"]["violations"] == 0
        lists[name] = scores(spark, ws)
    assignment = dealt(pa.array(sorted(set(lists["both"].user)))).set_index("user")
    by_trees = lists["both"].user.map(assignment.stage) == "baseline"
    assert 0 < by_trees.sum() < len(by_trees)
    for name, mask in (("neural", ~by_trees), ("trees", by_trees)):
        users = lists["both"].user[mask]
        own_lists = lists[name][lists[name].user.isin(users)].reset_index(drop=True)
        pd.testing.assert_frame_equal(
            lists["both"][mask].drop(columns="arms").reset_index(drop=True), own_lists, check_exact=True
        )
