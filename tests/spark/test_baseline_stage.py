"""The baseline stage on a small dataset: against scikit-learn's metrics and XGBoost without Spark."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb
from pyspark.sql import SparkSession
from sklearn.metrics import log_loss, roc_auc_score

from headrace import registry
from headrace.config import Spec, build_spec
from headrace.errors import UserError
from headrace.manifest import Manifest
from headrace.models.predictor import load_predictor
from headrace.stage import run_stage
from headrace.storage import local
from headrace.train.baseline.stage import TrainBaseline
from headrace.train.baseline.xgboost_spark import check_slots, sample_row_groups
from headrace.workspace import Workspace
from tests.dataset_support import read_padded

DS = "2026-01-10"


def spec(**changes: Any) -> Spec:
    names = ["age", "price", "user", "item", "tags", "click", "row", "query"]
    data = {
        "pipeline": "clicks",
        "source": {"format": "clicks", "path": "{ds}"},
        "table": {"columns": [{"name": n} for n in names]},
        "features": {"label": "click", "workflow": [], "split": {"by": "position"}},
        "baseline": {"rounds": 12, "max_depth": 4, "workers": 2},
    }
    return build_spec({**data, **changes})


def read(ws: Workspace, manifest: Manifest, split: str) -> pd.DataFrame:
    assert manifest.dataset_schema is not None
    folder = ws.home / manifest.output("dataset").name / split
    return read_padded(sorted(folder.glob("*.parquet")), manifest.dataset_schema)


def test_a_day(
    spark: SparkSession,
    ws: Workspace,
    make_dataset: Callable[..., Manifest],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    features = make_dataset(ws, train=4000, valid=900)
    done = run_stage(TrainBaseline(), spec(), ws, DS)
    m = done.manifest
    folder = ws.home / m.output("model").name
    assert folder == ws.model("clicks", DS, m.key).local_path() / "model"
    assert m.rows == {"train": 4000, "valid": 900}

    # What it says of itself is what scikit-learn says of the saved model's answers.
    valid = read(ws, features, "valid")
    columns = {c: valid[c].to_numpy() for c in valid.columns}
    answers = load_predictor(folder).predict(columns)
    label = columns["click"]
    said = m.facts["metrics"]
    assert said["auc"] == pytest.approx(roc_auc_score(label, answers), abs=1e-12)
    assert said["log_loss"] == pytest.approx(log_loss(label, answers.astype(float)), abs=1e-9)
    assert said["calibration"] == pytest.approx(answers.mean(dtype=float) / label.mean(dtype=float), rel=1e-9)
    assert said["auc"] > 0.65
    assert sum(b["rows"] for b in m.facts["calibration_bins"]) == 900
    assert m.peak_memory_mib["worker"] > 50

    # As good as XGBoost on the same rows without Spark (trees differ: quantiles are sketched by worker).
    train = read(ws, features, "train")
    alone = xgb.XGBClassifier(n_estimators=12, max_depth=4, learning_rate=0.2, tree_method="hist", n_jobs=1)
    names = ["age", "price", "user", "item", "tags__0", "tags__1", "tags__2"]
    as_matrix = {c: np.where(train[c].to_numpy() == 0, np.nan, train[c].to_numpy()) for c in names[2:]}
    x = np.stack([*(train[c].to_numpy() for c in names[:2]), *as_matrix.values()], axis=1)
    alone.fit(x, train["click"].to_numpy())
    of_valid = [*(columns[c] for c in names[:2]), *(np.where(columns[c] == 0, np.nan, columns[c]) for c in names[2:])]
    other = roc_auc_score(label, alone.predict_proba(np.stack(of_valid, axis=1))[:, 1])
    assert said["auc"] == pytest.approx(other, abs=0.03)

    # The curve falls, a row a tree; the importance names features, not columns.
    curve = [point["loss"] for point in m.facts["curve"]]
    assert len(curve) == 12
    assert curve == sorted(curve, reverse=True)
    assert {e["feature"] for e in m.facts["importance"]} == {"age", "price", "user", "item", "tags"}

    champion = registry.champion(ws, "clicks-baseline")
    assert champion is not None
    assert (champion.source, champion.key) == (local(folder), m.key)
    assert m.facts["registered"] == {"name": "clicks-baseline", "version": champion.version}

    # A rerun does nothing; a damaged model is made again, the same to the bit, and registered once.
    before = (folder / "model.ubj").read_bytes()
    assert run_stage(TrainBaseline(), spec(), ws, DS).skipped
    (folder / "model.ubj").write_bytes(before[:100])
    again = run_stage(TrainBaseline(), spec(), ws, DS)
    assert not again.skipped
    assert (folder / "model.ubj").read_bytes() == before
    assert again.manifest.facts["registered"] == m.facts["registered"]
    assert again.manifest.facts["metrics"] == said

    # A sample says so, and is the same each time it is drawn.
    small = spec(baseline={"rounds": 3, "workers": 1, "max_rows": 777})
    with caplog.at_level(logging.INFO, "headrace.train"):
        sampled = run_stage(TrainBaseline(), small, ws, DS).manifest
    assert sampled.rows == {"train": 777, "valid": 900}
    assert "a sample of 777 of 4,000 rows" in caplog.text
    shutil.copytree(ws.home / features.output("dataset").name, tmp_path / "copy")
    assert [s.take for s in sample_row_groups(local(tmp_path / "copy"), "train", _schema(features), 777)] == [
        97
    ] * 7 + [98]


def test_what_cannot_work_is_said_first(
    spark: SparkSession, ws: Workspace, make_dataset: Callable[..., Manifest]
) -> None:
    features = make_dataset(ws, train=40, valid=10)
    with pytest.raises(UserError, match=r"baseline\.workers is 3, .* runs 2 task\(s\) at a time"):
        check_slots(spark, 3)
    with pytest.raises(UserError, match="remove the section `baseline`"):
        run_stage(TrainBaseline(), spec(train={"negatives": {"column": "item"}}), ws, DS)
    broken = ws.home / features.output("dataset").name / "train" / "part-0001.parquet"
    broken.write_bytes(broken.read_bytes()[:50])
    with pytest.raises(UserError, match=r"part-0001\.parquet"):
        run_stage(TrainBaseline(), spec(), ws, DS)
    assert not ws.manifest("clicks", DS, "baseline").exists()


def _schema(manifest: Manifest) -> Any:
    return manifest.dataset_schema
