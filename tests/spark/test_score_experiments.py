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
from headrace.errors import UserError
from headrace.experiments.assignment import Live, Stop, arms, stop_arm
from headrace.score.model_lists import Assigned
from headrace.score.stage import ScoreCandidates
from headrace.stage import run_stage
from headrace.workspace import Workspace
from tests.score_support import DS, expected, manifest_of, scores, spec

EXPERIMENTS: dict[str, Any] = {
    "ranker": {"arms": {"neural": {"share": 0.4}, "trees": {"model": "baseline", "share": 0.6}}, "percent": 70},
    "banner": {"arms": {"red": {}, "blue": {}, "none": {}}, "salt": "of its own"},
    "again": {"arms": {"neural": {}, "trees": {"model": "baseline"}}, "percent": 60, "start": DS, "end": DS},
    "over": {"arms": {"a": {}, "b": {"model": "baseline"}}, "end": "2026-01-04"},
}


def with_experiments(**score: Any) -> Spec:
    known = {name: Experiment.model_validate(of) for name, of in EXPERIMENTS.items()}
    return spec(**score).model_copy(update={"experiments": known, "outcomes": Outcomes()})


def dealt(users: pa.Array) -> pd.DataFrame:
    """What the experiments give users: the column `arms`, and which model."""
    of: dict[str, list[str | None]] = {}
    for name in ("ranker", "banner", "again"):
        given = Experiment.model_validate(EXPERIMENTS[name])
        place = arms(users, given.salt or name, given.shares, given.percent)
        of[name] = [None if i < 0 else list(given.arms)[i] for i in place]
    found = []
    for user, ranker, banner, again in zip(users.to_pylist(), of["ranker"], of["banner"], of["again"], strict=True):
        mine = {"ranker": ranker, "banner": banner, "again": None if ranker else again}
        text = ",".join(f"{name}={arm}" for name, arm in mine.items() if arm)
        stage = "baseline" if "trees" in (mine["ranker"], mine["again"]) else "train"
        found.append((user, text, stage))
    return pd.DataFrame(found, columns=["user", "arms", "stage"])


def test_users_are_scored_by_the_model_of_their_arm(
    spark: SparkSession, shop: Workspace, shop_events: pd.DataFrame, tmp_path: Path
) -> None:
    ws = Workspace(tmp_path / "home")
    shutil.copytree(shop.home, ws.home)
    if ws.manifest("shop", DS, "score").is_file():
        ws.manifest("shop", DS, "score").remove()
    s = with_experiments(incremental=True)
    done = run_stage(ScoreCandidates(), s, ws, DS).manifest
    found = scores(spark, ws)
    assert list(found.columns) == ["ds", "user", "item", "rank", "score", "model_version", "arms"]
    by_stage = {stage: expected(spark, ws, shop_events, stage) for stage in ("train", "baseline")}
    users = pa.array(sorted(set(by_stage["train"].user)))
    given = dealt(users)
    assert set(given.stage) == {"train", "baseline"}
    assert given.arms.str.contains("again=").any()
    wanted = pd.concat(rows[rows.user.isin(given.user[given.stage == stage])] for stage, rows in by_stage.items())
    wanted = wanted.sort_values(["user", "rank"], ignore_index=True).merge(given, on="user")
    pd.testing.assert_frame_equal(
        found[["user", "item", "rank", "score", "arms"]],
        wanted[["user", "item", "rank", "score", "arms"]],
        check_dtype=False,
        check_exact=True,
    )
    assert found.model_version.tolist() == [manifest_of(ws, stage).key for stage in wanted.stage]
    assert done.rows["users"] == len(users)
    counts = {of["kind"]: of["users"] for of in done.facts["models"]}
    assert counts == {"neural": (given.stage == "train").sum(), "baseline": (given.stage == "baseline").sum()}
    assert sum(done.facts["experiments"]["banner"].values()) == len(users)
    assert done.facts["model"]["kind"] == "neural"
    assert run_stage(ScoreCandidates(), s, ws, DS).skipped

    # An arm is stopped from this day on: its users alone are scored again, by the control's model.
    stop = Stop(experiment="ranker", arm="trees", ds=DS, by="me", at=datetime.now(UTC), reason="x")
    stop_arm(ws, "shop", stop)
    again = run_stage(ScoreCandidates(), s, ws, DS)
    assert not again.skipped
    stopped = given.arms.str.contains("ranker=trees")
    assert again.manifest.rows["users_scored"] == stopped.sum() > 0
    after = scores(spark, ws)
    lists = by_stage["train"][by_stage["train"].user.isin(given.user[stopped])]
    mine = after[after.user.isin(given.user[stopped])]
    assert mine.score.tolist() == lists.score.tolist()
    assert set(mine.arms) == {text.removeprefix("ranker=trees,") for text in given.arms[stopped]}
    others = [frame[~frame.user.isin(given.user[stopped])].reset_index(drop=True) for frame in (after, found)]
    pd.testing.assert_frame_equal(*others, check_exact=True)

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
        assigned = Assigned.of(F.col("k"), is_integer, experiments, {None: 0, "baseline": 1})
        frame = spark.createDataFrame(pa.table({"k": users}))
        found = frame.select("k", assigned.arms.alias("arms"), assigned.model.alias("model")).toPandas()
        given = dealt(users).set_index("user").loc[found.k]
        assert found.arms.fillna("").tolist() == given.arms.tolist()
        assert found.model.tolist() == (given.stage == "baseline").astype(int).tolist()


def test_candidates_are_made_for_each_models_users(spark: SparkSession, shop: Workspace, tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "candidates": {"limit": 8, "sources": {"liked": {"kind": "popular", "k": 8}}},
        "exclude_seen": True,
    }
    found = {}
    for name, s in (
        ("both", with_experiments(**asked)),
        ("neural", spec(**asked)),
        ("trees", spec(**asked, model="baseline")),
    ):
        ws = Workspace(tmp_path / name)
        shutil.copytree(shop.home, ws.home)
        if ws.manifest("shop", DS, "score").is_file():
            ws.manifest("shop", DS, "score").remove()
        done = run_stage(ScoreCandidates(), s, ws, DS).manifest
        assert done.facts["candidates"]["violations"] == 0
        found[name] = scores(spark, ws)
    given = dealt(pa.array(sorted(set(found["both"].user)))).set_index("user")
    by_trees = found["both"].user.map(given.stage) == "baseline"
    assert 0 < by_trees.sum() < len(by_trees)
    for name, mine in (("neural", ~by_trees), ("trees", by_trees)):
        users = found["both"].user[mine]
        alone = found[name][found[name].user.isin(users)].reset_index(drop=True)
        pd.testing.assert_frame_equal(
            found["both"][mine].drop(columns="arms").reset_index(drop=True), alone, check_exact=True
        )
