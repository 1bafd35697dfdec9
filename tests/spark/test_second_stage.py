"""The stage second_stage: trees over another model's predictions, of rows that it has not learned."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xgboost as xgb
from pyspark.sql import SparkSession
from sklearn.metrics import roc_auc_score

from headrace.comm.base import LocalCollective
from headrace.config import Model, Spec, build_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models.predictor import load_predictor, read_meta
from headrace.models.registry.versions import versions
from headrace.models.saved import save_model
from headrace.models.sharded_model import ShardedModel
from headrace.score.scoring_model import scoring_model
from headrace.stage import Context, identity, run_stage
from headrace.stage.manifest import Input, Manifest, Output
from headrace.storage import local
from headrace.train.baseline.stage import TrainSecondStage
from tests.train_support import read_padded

DS = "2026-01-10"
SETTINGS = {"rounds": 6, "max_depth": 3, "workers": 1}


def spec(**changes: Any) -> Spec:
    names = ["age", "price", "user", "item", "tags", "click", "row", "query"]
    data = {
        "pipeline": "clicks",
        "source": {"format": "clicks", "path": "{ds}"},
        "table": {"columns": [{"name": n} for n in names]},
        "features": {"label": "click", "workflow": [], "split": {"by": "column", "column": "query"}},
        "second_stage": SETTINGS,
    }
    return build_spec({**data, **changes})


def train_first(ws: Workspace, features: Manifest, key: str = "t", seed: int = 2, **facts: Any) -> Path:
    """A neural model (its weights are random: it says something) and its stage's manifest; its folder."""
    schema = features.dataset_schema
    assert schema is not None
    model = ShardedModel(schema, Model(embedding_dim=4, bottom_mlp=(8,), top_mlp=(8,)), LocalCollective(), seed)
    folder = ws.model("clicks", DS, key) / "model"
    workflow = ws.locate(features.output("dataset").name) / "workflow"
    torch.manual_seed(0)
    for parameter in model.network.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    save_model(folder, model, workflow=workflow, pipeline="clicks", ds=DS, key=key, metrics={"auc": 0.5})
    Manifest(
        stage="train",
        pipeline="clicks",
        ds=DS,
        key=key,
        spec_hash="",
        inputs=(Input(kind="stage", name="features", version=identity(features)),),
        facts={"metrics": {"auc": 0.5}, "evaluation": {"test": {"metrics": {"auc": 0.51}}}} | facts,
        outputs=(Output(kind="model", name=ws.name_of(folder), version=key),),
    ).save(ws.manifest("clicks", DS, "train"))
    return folder.local_path()


def columns_of(ws: Workspace, features: Manifest, split: str) -> dict[str, Any]:
    assert features.dataset_schema is not None
    folder = ws.home / features.output("dataset").name / split
    rows = read_padded(sorted(folder.glob("*.parquet")), features.dataset_schema)
    return {c: rows[c].to_numpy() for c in rows.columns}


def test_trees_learn_from_rows_that_the_first_model_has_not_learned(
    spark: SparkSession, ws: Workspace, make_dataset: Callable[..., Manifest], tmp_path: Path
) -> None:
    features = make_dataset(ws, train=1200, valid=1000, test=600)
    first = train_first(ws, features)
    m = run_stage(TrainSecondStage(), spec(), ws, DS).manifest
    folder = ws.home / m.output("model").name
    assert m.rows == {"valid": 1000, "test": 600}
    predictor = load_predictor(folder)
    assert predictor.kind == "second_stage"

    # The trees of XGBoost without Spark, of `valid` and what the first model says of it; of no other rows.
    names = ["age", "price", "user", "item", "tags__0", "tags__1", "tags__2"]

    def matrix(columns: dict[str, Any]) -> np.ndarray:
        codes = [np.where(columns[c] == 0, np.nan, columns[c]) for c in names[2:]]
        return np.stack([*(columns[c] for c in names[:2]), *codes, load_predictor(first).predict(columns)], axis=1)

    test = columns_of(ws, features, "test")
    predictions = predictor.predict(test)
    for split, are_equal in (("valid", True), ("train", False)):
        rows = columns_of(ws, features, split)
        reference_model = xgb.XGBClassifier(
            n_estimators=6, max_depth=3, learning_rate=0.2, tree_method="hist", n_jobs=1
        )
        reference_model.fit(matrix(rows), rows["click"])
        assert np.allclose(predictions, reference_model.predict_proba(matrix(test))[:, 1], atol=1e-5) == are_equal
    # The first model's answer is one of the columns, and looked at.
    importance = {e["feature"]: e["weight"] for e in m.facts["importance"]}
    assert importance["dlrm: label"] > 0
    assert m.facts["metrics"]["auc"] == pytest.approx(roc_auc_score(test["click"], predictions), abs=1e-12)
    assert m.facts["evaluation"].keys() == {"test"}
    assert m.facts["first_model"]["metrics"] == {"auc": 0.51}
    (version,) = versions(ws, "clicks-second_stage")
    assert version.source == local(folder)
    assert run_stage(TrainSecondStage(), spec(), ws, DS).skipped

    # It moves with its workspace, and answers for no other first model.
    shutil.copytree(ws.home / "models", tmp_path / "moved" / "models")
    moved = tmp_path / "moved" / folder.relative_to(ws.home)
    assert (load_predictor(moved).predict(test) == predictions).all()
    card = tmp_path / "moved" / first.relative_to(ws.home) / "model.json"
    card.write_text(card.read_text().replace('"auc": 0.5', '"auc": 0.6'))
    with pytest.raises(UserError, match="is another one by now: run the stage second_stage again"):
        read_meta(local(moved))
    shutil.rmtree(card.parent)
    with pytest.raises(UserError, match="predictions of the model t, which is gone"):
        load_predictor(moved)

    # Another first model makes other trees; one that may know `valid` makes none.
    train_first(ws, features, "u", seed=3)
    assert run_stage(TrainSecondStage(), spec(), ws, DS).manifest.key != m.key
    train_first(ws, features, "v", warm_start="models/clicks/2026-01-09/x/model")
    with pytest.raises(UserError, match="started from another one"):
        run_stage(TrainSecondStage(), spec(), ws, DS)
    older = features.model_copy(update={"key": "older"})
    train_first(ws, older, "w")
    with pytest.raises(UserError, match="was trained on another dataset"):
        run_stage(TrainSecondStage(), spec(), ws, DS)


def test_lists_of_the_test_split_are_measured(
    spark: SparkSession, ws: Workspace, make_dataset: Callable[..., Manifest]
) -> None:
    features = make_dataset(ws, train=400, valid=600, test=300, rank=10)
    train_first(ws, features)
    ranking = {**SETTINGS, "objective": "ranking", "group": "user", "workers": 2}
    carried = {**spec().features.model_dump(), "carried": ["row", "query", "user"]}
    assert features.dataset_schema is not None
    with pytest.raises(UserError, match="user"):
        run_stage(TrainSecondStage(), spec(second_stage=ranking, features=carried), ws, DS)
    ranking["group"] = "query"
    m = run_stage(TrainSecondStage(), spec(second_stage=ranking, features=carried), ws, DS).manifest
    # Candidate lists of `rank` may have rows of `valid`: they are no measure.
    assert m.facts["evaluation"].keys() == {"test", "test_lists"}
    assert m.facts["metrics"]["ndcg_at_k"] == m.facts["evaluation"]["test_lists"]["metrics"]["ndcg_at_k"]
    with pytest.raises(UserError, match="draws its negatives"):
        run_stage(TrainSecondStage(), spec(train={"negatives": {"column": "item"}}), ws, DS)


def test_it_scores_where_it_is_asked_for(ws: Workspace) -> None:
    score = {"user": {"key": "user"}, "item": {"key": "item"}, "model": "second_stage"}
    upstream = {
        stage: Manifest(
            stage=stage,
            pipeline="clicks",
            ds=DS,
            key=stage,
            spec_hash="",
            outputs=(Output(kind="model", name=stage, version=stage),),
        )
        for stage in ("train", "second_stage")
    }
    assert scoring_model(Context(spec(score=score), ws, DS, upstream)).output.name == "second_stage"
    with pytest.raises(UserError, match=r"has not finished for 2026-01-10; run: .* --from second_stage"):
        scoring_model(Context(spec(score=score), ws, DS, {"train": upstream["train"]}))
    with pytest.raises(UserError, match="there is no such section"):
        spec(score=score, second_stage=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": {"label": "click", "workflow": [], "split": {"by": "position"}}}, "set features.split.test_days"),
        ({"train": {"pretrained": {"gmf": "other"}}}, "leave one of the two out"),
        ({"second_stage": {**SETTINGS, "objective": "ranking"}}, "second_stage.group"),
        ({"second_stage": {**SETTINGS, "label": "row"}}, "label"),
    ],
)
def test_specs_that_leave_nothing_unseen_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        spec(**changes)
