"""The baseline stage on a small dataset: against scikit-learn's metrics and XGBoost without Spark."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xgboost as xgb
from pyspark.sql import SparkSession
from sklearn.metrics import log_loss, ndcg_score, roc_auc_score, zero_one_loss

from headrace.config import Spec, build_spec
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models import registry
from headrace.models.predictor import load_predictor
from headrace.models.registry.versions import versions
from headrace.models.xgboost_model import matrix
from headrace.stage import run_stage
from headrace.stage.manifest import Manifest
from headrace.storage import local
from headrace.train.baseline.stage import TrainBaseline
from headrace.train.baseline.xgboost_spark import check_slots, sample_row_groups
from tests.train_support import read_padded

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
    outcome = run_stage(TrainBaseline(), spec(), ws, DS)
    m = outcome.manifest
    folder = ws.home / m.output("model").name
    assert folder == ws.model("clicks", DS, m.key).local_path() / "model"
    assert m.rows == {"train": 4000, "valid": 900}

    # What it says of itself is what scikit-learn says of the saved model's answers.
    valid = read(ws, features, "valid")
    columns = {c: valid[c].to_numpy() for c in valid.columns}
    answers = load_predictor(folder).predict(columns)
    label = columns["click"]
    metrics = m.facts["metrics"]
    assert metrics["auc"] == pytest.approx(roc_auc_score(label, answers), abs=1e-12)
    assert metrics["log_loss"] == pytest.approx(log_loss(label, answers.astype(float)), abs=1e-9)
    assert metrics["calibration"] == pytest.approx(answers.mean(dtype=float) / label.mean(dtype=float), rel=1e-9)
    assert metrics["auc"] > 0.65
    assert sum(b["rows"] for b in m.facts["calibration_bins"]) == 900
    assert m.peak_memory_mib["worker"] > 50

    # As good as XGBoost on the same rows without Spark (trees differ: quantiles are sketched by worker).
    train = read(ws, features, "train")
    reference_model = xgb.XGBClassifier(n_estimators=12, max_depth=4, learning_rate=0.2, tree_method="hist", n_jobs=1)
    names = ["age", "price", "user", "item", "tags__0", "tags__1", "tags__2"]
    as_matrix = {c: np.where(train[c].to_numpy() == 0, np.nan, train[c].to_numpy()) for c in names[2:]}
    x = np.stack([*(train[c].to_numpy() for c in names[:2]), *as_matrix.values()], axis=1)
    reference_model.fit(x, train["click"].to_numpy())
    of_valid = [*(columns[c] for c in names[:2]), *(np.where(columns[c] == 0, np.nan, columns[c]) for c in names[2:])]
    reference_auc = roc_auc_score(label, reference_model.predict_proba(np.stack(of_valid, axis=1))[:, 1])
    assert metrics["auc"] == pytest.approx(reference_auc, abs=0.03)

    # The curve falls, a row a tree; the importance names features, not columns.
    curve = [point["loss"] for point in m.facts["curve"]]
    assert len(curve) == 12
    assert curve == sorted(curve, reverse=True)
    assert {e["feature"] for e in m.facts["importance"]} == {"age", "price", "user", "item", "tags"}
    splits = load_predictor(folder).booster.trees_to_dataframe()  # type: ignore[attr-defined]
    splits = splits[splits["Feature"] != "Leaf"]
    feature = splits["Feature"].map(dict(zip([f"f{i}" for i in range(7)], [*names[:4], *["tags"] * 3], strict=True)))
    by_feature = splits.groupby(feature).agg(gain=("Gain", "mean"), cover=("Cover", "mean"), weight=("Gain", "size"))
    for entry in m.facts["importance"]:
        if entry["weight"]:
            row = by_feature.loc[entry["feature"]]
            assert entry["weight"] == row["weight"]
            assert (entry["gain"], entry["cover"]) == pytest.approx((row["gain"], row["cover"]), rel=1e-4, abs=1e-3)
    assert sum(entry["weight"] for entry in m.facts["importance"]) == len(splits)

    assert registry.champion(ws, "clicks-baseline") is None  # registering is not promoting
    (version,) = versions(ws, "clicks-baseline")
    assert (version.source, version.key, version.status) == (local(folder), m.key, "registered")
    assert m.facts["registered"] == {"name": "clicks-baseline", "version": version.version}

    # A rerun does nothing; a damaged model is made again, the same to the bit, and registered once.
    model_bytes = (folder / "model.ubj").read_bytes()
    assert run_stage(TrainBaseline(), spec(), ws, DS).skipped
    (folder / "model.ubj").write_bytes(model_bytes[:100])
    rerun = run_stage(TrainBaseline(), spec(), ws, DS)
    assert not rerun.skipped
    assert (folder / "model.ubj").read_bytes() == model_bytes
    assert rerun.manifest.facts["registered"] == m.facts["registered"]
    assert rerun.manifest.facts["metrics"] == metrics

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


def with_targets(ws: Workspace, manifest: Manifest) -> Manifest:
    """The same dataset with lists of 20 rows, `query`, and numbers to learn, `dwell`, of which a tenth is missing."""
    assert manifest.dataset_schema is not None
    folder = ws.home / manifest.output("dataset").name
    for path in sorted(folder.glob("*/*.parquet")):
        table = pq.read_table(path)
        row, rng = table["row"].to_numpy(), np.random.default_rng(int(table["row"][0].as_py()))
        dwell = 30 + 10 * table["age"].to_numpy() + 5 * table["click"].to_numpy() + rng.normal(size=len(row))
        table = table.set_column(table.schema.get_field_index("query"), "query", pa.array(row // 20))
        table = table.append_column("dwell", pa.array(dwell, mask=rng.random(len(row)) < 0.1))
        table = table.append_column("propensity", pa.array(rng.uniform(0.01, 1, len(row))))
        groups = pq.ParquetFile(path).num_row_groups
        pq.write_table(table, path, row_group_size=-(-table.num_rows // groups))
    schema = manifest.dataset_schema
    more = [Feature(name=n, kind=Kind.CARRIED, dtype="float64") for n in ("dwell", "propensity")]
    extended = manifest.model_copy(update={"dataset_schema": DatasetSchema(features=(*schema.features, *more))})
    extended.save(ws.manifest(extended.pipeline, extended.ds, "features"))
    return extended


def test_other_objectives_stop_early_and_are_measured_as_the_neural_model_is(
    spark: SparkSession, ws: Workspace, make_dataset: Callable[..., Manifest]
) -> None:
    features = with_targets(ws, make_dataset(ws, train=2000, valid=600, rank=30))
    valid = read(ws, features, "valid")
    columns = {c: valid[c].to_numpy() for c in valid.columns}
    evaluation = {"user": "row", "bootstrap": {"replicates": 20}, "slices": {"old": "row >= 1000300"}}
    evaluation["metrics"] = ["pr_auc", "error_rate"]
    evaluation["off_policy"] = {"propensity": "propensity", "action": "item", "policy": "greedy"}
    train = {"evaluation": evaluation, "rank_group": "query", "rank_k": 5}
    carried = {
        "label": "click",
        "workflow": [],
        "split": {"by": "position"},
        "carried": ["row", "query", "dwell", "propensity"],
    }
    columns_of_table = ["age", "price", "user", "item", "tags", "click", "row", "query", "dwell", "propensity"]
    table = {"columns": [{"name": n} for n in columns_of_table]}

    def trained(**baseline: Any) -> tuple[Manifest, Any]:
        changed = spec(table=table, features=carried, train=train, baseline={"rounds": 80, "max_depth": 3, **baseline})
        m = run_stage(TrainBaseline(), changed, ws, DS).manifest
        return m, load_predictor(ws.home / m.output("model").name)

    # Lists: those of `query`, whole on one worker; NDCG@5 by tree is what stops, and the trees end at the best one.
    m, ranker = trained(objective="ranking", early_stopping_rounds=5)
    scores = ranker.predict(columns)
    assert ranker.booster.num_boosted_rounds() == m.facts["best_step"] < 80
    curve = [p["loss"] for p in m.facts["validation_curve"]]
    assert len(curve) == m.facts["steps"] == int(np.argmax(curve)) + 1 + 5
    lists = [
        (columns["click"][in_query], scores[in_query])
        for q in np.unique(columns["query"])
        if columns["click"][in_query := columns["query"] == q].any()
    ]
    # Among equal scores clicks stand last.
    ndcg = np.mean([ndcg_score([y], [-np.argsort(np.lexsort((y, -s)))], k=5) for y, s in lists])
    assert m.facts["evaluation"]["valid_lists"]["metrics"]["ndcg_at_k"] == pytest.approx(ndcg, abs=1e-12)
    assert ndcg > np.mean([ndcg_score([y], [np.arange(20)], k=5) for y, _ in lists]) + 0.05
    valid_facts = m.facts["evaluation"]["valid"]
    assert valid_facts["metrics"]["auc"] == pytest.approx(roc_auc_score(columns["click"], scores), abs=1e-12)
    assert "log_loss" not in valid_facts["metrics"]  # the scores are no probabilities
    assert {s["value"]: s["rows"] for s in valid_facts["slices"]} == {"true": 300, "false": 300}
    assert valid_facts["intervals"]["auc"][0] < valid_facts["metrics"]["auc"] < valid_facts["intervals"]["auc"][1]
    assert m.rows["rank"] == 300
    # What stands beside the neural model's is of the same lists.
    of_rank = m.facts["evaluation"]["rank"]["metrics"]
    assert m.facts["metrics"]["ndcg_at_k"] == of_rank["ndcg_at_k"] != pytest.approx(ndcg)

    # Numbers of a carried column, rows without one left out.
    m, regressor = trained(objective="regression", label="dwell", early_stopping_rounds=5)
    known = ~np.isnan(columns["dwell"])
    error = regressor.predict(columns)[known] - columns["dwell"][known].astype(np.float32)
    valid_facts = m.facts["evaluation"]["valid"]
    assert valid_facts["rows"] == known.sum()
    assert valid_facts["metrics"]["rmse"] == pytest.approx(np.sqrt((error.astype(float) ** 2).mean()), rel=1e-9)
    assert valid_facts["metrics"]["mae"] == pytest.approx(np.abs(error.astype(float)).mean(), rel=1e-9)
    assert valid_facts["metrics"]["r2"] > 0.8

    # Codes split into sets; one worker finds about what two find.
    settings = {"enable_categorical": True, "max_categories": 45, "early_stopping_rounds": 5, "learning_rate": 0.3}
    m, two = trained(**settings)
    single = trained(**settings, workers=1)[0]
    kinds = dict(zip((f"f{i}" for i in range(7)), two.booster.feature_types, strict=True))
    assert kinds == {"f0": "q", "f1": "q", "f2": "q", "f3": "c", "f4": "c", "f5": "c", "f6": "c"}  # 60 users are many
    assert m.facts["metrics"]["auc"] == pytest.approx(single.facts["metrics"]["auc"], abs=0.02)
    answers = two.predict(columns)
    assert m.facts["metrics"]["auc"] == pytest.approx(roc_auc_score(columns["click"], answers), abs=1e-12)
    wrong = zero_one_loss(columns["click"], answers > 0.5)
    assert m.facts["metrics"]["error_rate"] == pytest.approx(wrong, abs=1e-12)
    assert {"hr_at_k", "ndcg_at_k"} <= m.facts["metrics"].keys()
    # As a policy: the best of 38 items for each row.
    by_item = [two.predict({**columns, "item": np.full(600, i, np.int32)}).astype(float) for i in range(2, 40)]
    best = np.argmax([np.log(p) - np.log1p(-p) for p in by_item], axis=0) + 2
    value = ((best == columns["item"]) / columns["propensity"] * columns["click"]).mean()
    assert m.facts["metrics"]["ips"] == pytest.approx(value, rel=1e-9)
    assert m.facts["metrics"]["dm"] == pytest.approx(np.max(by_item, axis=0).mean(), rel=1e-9)
    # Weights of samples: the trees of XGBoost without Spark, told the same.
    small = {"rounds": 5, "max_depth": 3, "workers": 1}
    changed = spec(table=table, features=carried, train={**train, "sample_weight": "propensity"}, baseline=small)
    m = run_stage(TrainBaseline(), changed, ws, DS).manifest
    rows, schema = read(ws, features, "train"), _schema(features)
    reference_model = xgb.XGBClassifier(n_estimators=5, max_depth=3, learning_rate=0.2, tree_method="hist", n_jobs=1)
    x = matrix(schema, {c: rows[c].to_numpy() for c in rows.columns})
    predictions = load_predictor(ws.home / m.output("model").name).predict(columns)
    for weights, are_equal in ((rows["propensity"].to_numpy(np.float32), True), (None, False)):
        reference_model.fit(x, rows["click"].to_numpy(), sample_weight=weights)
        expected = reference_model.predict_proba(matrix(schema, columns))[:, 1]
        assert np.allclose(predictions, expected, atol=1e-5) == are_equal

    # A code that no row had, one that the vocabulary lacks, and none: each has an answer.
    strange = {c: columns[c][:3].copy() for c in columns}
    strange["item"] = np.array([39, 1, 0], np.int32)
    assert np.isfinite(two.predict(strange)).all()


def _schema(manifest: Manifest) -> Any:
    return manifest.dataset_schema
