"""Saved models opened by kind; what XGBoost is fed, against a plain construction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xgboost as xgb

from headrace import config
from headrace.comm.base import LocalCollective
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.errors import UserError
from headrace.models import xgboost_model
from headrace.models.predictor import load_predictor, read_meta
from headrace.models.saved import save_model
from headrace.models.sharded_model import ShardedModel
from headrace.storage import local

SCHEMA = DatasetSchema(
    features=(
        Feature(name="user", kind=Kind.CATEGORICAL, dtype="int32", cardinality=9),
        Feature(name="a [price] <x>", kind=Kind.CONTINUOUS, dtype="float32"),
        Feature(name="tags", kind=Kind.CATEGORICAL, dtype="int32", cardinality=5, length=2, is_list=True),
        Feature(name="click", kind=Kind.LABEL, dtype="float32"),
    )
)


def columns(n: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    price = rng.normal(size=n).astype(np.float32)
    price[rng.random(n) < 0.2] = np.nan
    return {
        "user": rng.integers(0, 9, n).astype(np.int32),
        "a [price] <x>": price,
        "tags__0": rng.integers(0, 5, n).astype(np.int32),
        "tags__1": rng.integers(0, 5, n).astype(np.int32),
    }


def plain_matrix(c: dict[str, np.ndarray]) -> np.ndarray:
    """Row by row: continuous first, code 0 is missing."""
    rows = zip(c["a [price] <x>"], c["user"], c["tags__0"], c["tags__1"], strict=True)
    return np.array([[p, *(float(v) if v else np.nan for v in codes)] for p, *codes in rows], dtype=np.float32)


MODEL = config.Model(embedding_dim=4, bottom_mlp=(8,), top_mlp=(8,))


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    folder = tmp_path / "workflow"
    folder.mkdir()
    (folder / "workflow.json").write_text("{}\n")
    return folder


@pytest.fixture
def booster() -> xgb.Booster:
    c = columns(500)
    # Clicks follow the user's null code and the price, so that missing values matter.
    label = ((c["user"] == 0) | (np.nan_to_num(c["a [price] <x>"]) > 0.5)).astype(np.float32)
    data = xgb.DMatrix(plain_matrix(c), label)
    return xgb.train({"objective": "binary:logistic", "max_depth": 4, "nthread": 1}, data, 12)


@pytest.fixture
def saved_trees(tmp_path: Path, workflow: Path, booster: xgb.Booster) -> Path:
    folder = tmp_path / "trees"
    folder.mkdir()
    xgboost_model.save(
        local(folder), booster, SCHEMA, local(workflow), {"pipeline": "p", "ds": "2026-01-01", "key": "k"}
    )
    return folder


@pytest.fixture
def saved_dlrm(tmp_path: Path, workflow: Path) -> Path:
    model = ShardedModel(SCHEMA, MODEL, LocalCollective(), seed=3)
    folder = tmp_path / "dlrm"
    save_model(
        local(folder), model, workflow=local(workflow), pipeline="p", ds="2026-01-01", key="k", metrics={"auc": 0.5}
    )
    return folder


def test_matrix_is_what_the_docstring_says() -> None:
    c = columns(200)
    np.testing.assert_array_equal(xgboost_model.matrix(SCHEMA, c), plain_matrix(c))
    assert xgboost_model.matrix_columns(SCHEMA) == ("a [price] <x>", "user", "tags__0", "tags__1")


def test_trees_answer_as_the_booster_does(saved_trees: Path, booster: xgb.Booster) -> None:
    predictor = load_predictor(saved_trees, threads=1)
    c = columns(300, seed=9)
    predictions = predictor.predict(c)
    np.testing.assert_array_equal(predictions, booster.predict(xgb.DMatrix(plain_matrix(c))))
    assert predictions.dtype == np.float32
    assert (predictor.kind, predictor.schema) == ("xgboost", SCHEMA)
    # A row's probability does not depend on its neighbours.
    single = predictor.predict({name: v[17:18] for name, v in c.items()})
    assert single[0] == predictions[17]
    assert len(predictor.predict({name: v[:0] for name, v in c.items()})) == 0


def test_importance_is_the_mean_over_all_splits_of_a_feature(booster: xgb.Booster) -> None:
    importances = {e["feature"]: e["gain"] for e in xgboost_model.importance(booster, SCHEMA)}
    gains: dict[str, list[float]] = {}
    names = ["a [price] <x>", "user", "tags", "tags"]
    for tree in booster.trees_to_dataframe().query("Feature != 'Leaf'").itertuples():
        gains.setdefault(names[int(tree.Feature[1:])], []).append(tree.Gain)
    assert {len(g) for g in gains.values()} != {1}
    for name in ("user", "tags", "a [price] <x>"):
        assert importances.pop(name) == pytest.approx(np.mean(gains.get(name, [0.0])), rel=1e-4)
    assert not importances
    ranked = [e["gain"] for e in xgboost_model.importance(booster, SCHEMA)]
    assert ranked == sorted(ranked, reverse=True)


def test_dlrm_answers_as_its_forward_does(saved_dlrm: Path) -> None:
    c = {name: np.nan_to_num(v) for name, v in columns(64).items()}
    model = ShardedModel(SCHEMA, MODEL, LocalCollective(), seed=3)
    codes = np.stack([c["user"], c["tags__0"], c["tags__1"]], axis=1).astype(np.int64)
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(c["a [price] <x>"][:, None]), torch.from_numpy(codes)).numpy()
    predictor = load_predictor(saved_dlrm)
    predictions = predictor.predict(c)
    np.testing.assert_allclose(predictions, 1 / (1 + np.exp(-logits.astype(np.float64))), rtol=1e-5)
    assert predictions.dtype == np.float32
    assert (predictor.kind, predictor.schema) == ("dlrm", SCHEMA)
    assert len(predictor.predict({name: v[:0] for name, v in c.items()})) == 0


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("trees", "model.ubj"),
        ("trees", "model.json"),
        ("trees", "workflow"),
        ("dlrm", "dense.safetensors"),
        ("dlrm", "embeddings"),
        ("dlrm", "workflow"),
    ],
)
def test_incomplete_folder_is_refused(kind: str, part: str, saved_trees: Path, saved_dlrm: Path) -> None:
    folder = saved_trees if kind == "trees" else saved_dlrm
    (folder / part).rename(folder.parent / "away")
    with pytest.raises(UserError, match=part) as e:
        load_predictor(folder)
    assert str(folder) in str(e.value)


@pytest.mark.parametrize("name", ["model.ubj", "workflow/workflow.json"])
def test_damaged_trees_are_refused(saved_trees: Path, name: str) -> None:
    path = saved_trees / name
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(UserError, match=f"{name} is damaged"):
        load_predictor(saved_trees)
    path.write_bytes(data[:-1])
    with pytest.raises(UserError, match=f"{name} of a saved model is damaged: {len(data) - 1} bytes"):
        read_meta(local(saved_trees))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "linear"}, "unknown kind of model 'linear'"),
        ({"schema": {"features": 3}}, "no valid dataset schema"),
        ({"schema": SCHEMA.model_copy(update={"features": SCHEMA.features[1:]}).model_dump(mode="json")}, "4 columns"),
    ],
)
def test_wrong_card_is_refused(saved_trees: Path, change: dict[str, Any], message: str) -> None:
    path = saved_trees / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        load_predictor(saved_trees)
    path.write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        load_predictor(saved_trees)
