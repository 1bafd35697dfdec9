"""Boosted trees as ONNX against the booster itself, for each objective, and the files that FIL takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xgboost as xgb

from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.errors import UserError
from headrace.models.xgboost_model import XGBoostPredictor, matrix

tree_graph = pytest.importorskip("headrace.export.tree_graph", reason="ONNX is not installed: run `make onnx`")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: run `make onnx`")

SCHEMA = DatasetSchema(
    features=(
        Feature(name="user", kind=Kind.CATEGORICAL, dtype="int32", cardinality=40),
        Feature(name="age", kind=Kind.CONTINUOUS, dtype="float32"),
        Feature(name="tags", kind=Kind.CATEGORICAL, dtype="int32", cardinality=9, length=3, is_list=True),
        Feature(name="prices", kind=Kind.CONTINUOUS, dtype="float32", length=2, is_list=True),
        Feature(name="raw", kind=Kind.CATEGORICAL, dtype="int64", dynamic=True),
        Feature(name="click", kind=Kind.LABEL, dtype="float32"),
    )
)
ROWS = 400


def columns(rows: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    tags = np.sort(rng.integers(0, 9, (rows, 3)), 1)[:, ::-1]
    prices = rng.normal(size=(rows, 2)).astype(np.float32)
    prices[rng.random(prices.shape) < 0.2] = np.nan
    return {
        "user": rng.integers(0, 40, rows).astype(np.int32),
        "age": rng.normal(size=rows).astype(np.float32),
        **{f"tags__{i}": tags[:, i].astype(np.int32) for i in range(3)},
        **{f"prices__{i}": prices[:, i] for i in range(2)},
        "raw": rng.integers(0, 2**60, rows),
    }


def tensors(columns: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    return {
        "user": columns["user"].astype(np.int64),
        "age": columns["age"][:, None],
        "tags": np.stack([columns[f"tags__{i}"] for i in range(3)], 1).astype(np.int64),
        "prices": np.stack([columns[f"prices__{i}"] for i in range(2)], 1),
    }


def trained(objective: str, categorical: bool = False, rounds: int = 15, **more: Any) -> xgb.Booster:
    features = columns(ROWS, 1)
    data = matrix(SCHEMA, features)
    target = (
        np.nan_to_num(data[:, 0]) + 3 * (np.sin(3 * features["user"]) > 0) + np.random.default_rng(2).normal(size=ROWS)
    )
    label = target if objective == "reg:squarederror" else (target > 2).astype(float)
    kinds = ["q", "q", "q", "c", "c", "c", "c"] if categorical else None
    training_matrix = xgb.DMatrix(data, label, feature_types=kinds, enable_categorical=categorical)
    if objective.startswith("rank:"):
        training_matrix.set_group([20] * (ROWS // 20))
    return xgb.train({"objective": objective, "max_depth": 4, "nthread": 1, "seed": 3, **more}, training_matrix, rounds)


@pytest.mark.parametrize(
    ("objective", "categorical", "more"),
    [
        ("binary:logistic", False, {}),
        ("binary:logistic", False, {"base_score": 0.1, "scale_pos_weight": 3}),
        ("binary:logistic", True, {"max_cat_to_onehot": 1}),
        ("reg:squarederror", True, {"max_cat_to_onehot": 50}),
        ("reg:squarederror", False, {"grow_policy": "lossguide", "max_leaves": 7}),
        ("reg:logistic", False, {}),
        ("rank:ndcg", False, {}),
        ("rank:pairwise", True, {}),
        ("binary:logistic", False, {"gamma": 1e9}),
    ],
)
def test_onnxruntime_gives_what_the_booster_gives(objective: str, categorical: bool, more: dict[str, Any]) -> None:
    booster = trained(objective, categorical, **more)
    graph = tree_graph.trees_graph(booster, SCHEMA)
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    assert [x.name for x in session.get_inputs()] == ["age", "prices", "user", "tags"]
    for rows in (1, 2, 300):
        features = columns(rows, rows)
        if rows > 2:  # codes that training had not seen, and the rows of nothing
            features["user"][:5] = 39
            for name in ("user", "tags__0", "tags__1", "tags__2"):
                features[name][-5:] = 0
        expected = XGBoostPredictor(SCHEMA, booster).predict(features)
        (labels,) = session.run(["label"], tensors(features))
        np.testing.assert_allclose(labels, expected, rtol=1e-5, atol=2e-6)
    # Shorter and longer lists than the schema's are the same and the first of them.
    short = tensors(features) | {"tags": tensors(features)["tags"][:, :1]}
    wide = tensors(features) | {"tags": np.pad(tensors(features)["tags"][:, :1], ((0, 0), (0, 9)))}
    np.testing.assert_array_equal(session.run(None, short)[0], session.run(None, wide)[0])
    if "gamma" not in more:
        assert np.std(expected) > 0.05


def test_the_matrix_alone_is_that_of_the_predictor() -> None:
    session = onnxruntime.InferenceSession(tree_graph.matrix_graph(SCHEMA).SerializeToString())
    features = columns(50, 4)
    (exported,) = session.run(["matrix"], tensors(features))
    np.testing.assert_array_equal(exported, matrix(SCHEMA, features))


def test_what_cannot_be_exported_is_named() -> None:
    with pytest.raises(UserError, match=r"booster 'dart'.*objective 'count:poisson'"):
        tree_graph.trees_graph(trained("count:poisson", rounds=2, booster="dart"), SCHEMA)
    taken = DatasetSchema(features=(Feature(name="matrix", kind=Kind.CONTINUOUS, dtype="float32"), *SCHEMA.features))
    with pytest.raises(UserError, match="names for itself: matrix"):
        tree_graph.trees_graph(trained("reg:squarederror", rounds=2), taken)
