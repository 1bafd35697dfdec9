"""Models of several labels: trained on one and two ranks, stopped and resumed, saved, asked and evaluated."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import ValidationError
from sklearn import metrics as reference

from headrace.comm.base import run_ranks
from headrace.config import Model, Train
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models.predictor import load_predictor
from headrace.models.saved import read_card
from headrace.stage.manifest import Manifest
from headrace.train.job import Job
from headrace.train.loop.run import train, train_local
from tests.train_support import TRAIN, Stopped, assert_same_weights, job_of, read_padded, stop_at, weights

MODELS: dict[str, dict[str, Any]] = {
    "shared_bottom": {"bottom_mlp": [12], "tower_mlp": [6]},
    "mmoe": {"experts": 3, "expert_mlp": [8], "tower_mlp": [6]},
    "ple": {"levels": 2, "shared_experts": 1, "task_experts": 1, "expert_mlp": [8], "tower_mlp": [6]},
    "esmm": {"tower_mlp": [8]},
}
TASKS = {
    "click": {},
    "purchase": {"label": "bought", "where": "click", "weight": 0},
    "amount": {"label": "paid", "loss": "squared_error", "weight": 0.02},
    "click_and_purchase": {"product": ["click", "purchase"]},
}
SETTINGS = Train.model_validate({**TRAIN.model_dump(), "epochs": 1, "tasks": TASKS})


def model_of(name: str) -> Model:
    return Model.model_validate({"class": name, "embedding_dim": 4, "args": MODELS[name]})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def features(home: Workspace, make_dataset: Callable[..., Manifest]) -> Manifest:
    return with_purchases(home, make_dataset(home, train=2_000, valid=600))  # 10 steps


def with_purchases(home: Workspace, manifest: Manifest) -> Manifest:
    """`bought` follows some clicks, of cheap items mostly, and is not known of each tenth row; `paid` is a number."""
    folder = home.locate(manifest.output("dataset").name).local_path()
    for path in sorted(folder.glob("*/*.parquet")):
        table = pd.read_parquet(path)
        rng = np.random.default_rng(int(table["row"][0]))
        chance = 1 / (1 + np.exp(2 * table["price"]))
        bought = ((table["click"] == 1) & (rng.random(len(table)) < chance)).astype(object)
        bought[table["row"] % 10 == 3] = None
        paid = np.where(table["row"] % 3 == 1, np.nan, 2 * table["age"] + rng.normal(size=len(table)))
        table.assign(bought=bought, paid=paid).to_parquet(path, row_group_size=125, compression="none")
    schema = manifest.dataset_schema
    assert schema is not None
    more = (
        Feature(name="bought", kind=Kind.CARRIED, dtype="bool"),
        Feature(name="paid", kind=Kind.CARRIED, dtype="float64"),
    )
    return manifest.model_copy(update={"dataset_schema": DatasetSchema(features=(*schema.features, *more))})


@pytest.mark.parametrize("name", MODELS)
def test_a_class_learns_its_tasks_and_resumes(name: str, home: Workspace, features: Manifest) -> None:
    torch.set_num_threads(1)
    job = job_of(home, features, name, SETTINGS, model_of(name))
    report = train_local(job)
    losses = [p["loss"] for p in report.curve]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])

    stopped = job_of(home, features, f"{name}-stopped", SETTINGS, model_of(name))
    with pytest.raises(Stopped):
        train_local(stopped, stop_at(7))
    assert train_local(stopped).resumed_from_step == 5
    assert_same_weights(job, stopped)

    two = job_of(home, features, f"{name}-2", SETTINGS, model_of(name))
    for r in run_ranks(2, lambda collective: train(two, collective)):
        np.testing.assert_allclose([p["loss"] for p in r.curve], losses, rtol=1e-4)
    for tensor, value in weights(job).items():
        np.testing.assert_allclose(weights(two)[tensor], value, atol=2e-3, err_msg=tensor)

    card = read_card(job.saved_model)
    assert {n: t.model_dump(exclude_defaults=True) for n, t in card.tasks.items()} == {
        n: Train.model_validate({"tasks": TASKS}).tasks[n].model_dump(exclude_defaults=True) for n in TASKS
    }
    warm = job_of(home, features, f"{name}-warm", SETTINGS, model_of(name), warm_start=str(job.saved_model))
    assert train_local(warm).curve[0]["loss"] < losses[0]


def test_a_checkpoint_is_of_the_tasks_in_their_order(home: Workspace, features: Manifest) -> None:
    """Its towers are in that order."""
    orders = (TASKS, {name: TASKS[name] for name in ("click", "amount", "purchase", "click_and_purchase")})
    jobs = [
        job_of(home, features, "order", Train.model_validate({**TRAIN.model_dump(), "tasks": tasks}), model_of("mmoe"))
        for tasks in (*orders, TASKS)
    ]
    first, reordered, repeated = (job.config_fingerprint for job in jobs)
    assert first == repeated != reordered


def test_micro_batches_take_the_same_steps(home: Workspace, features: Manifest) -> None:
    reports = []
    for accumulate in (1, 3):
        conf = SETTINGS.model_copy(update={"accumulate": accumulate, "max_steps": 4})
        reports.append(train_local(job_of(home, features, f"parts-{accumulate}", conf, model_of("esmm"))))
    np.testing.assert_allclose(*([p["loss"] for p in r.curve] for r in reports), rtol=2e-4)


def test_a_model_of_one_task_says_what_it_lacks(home: Workspace, features: Manifest) -> None:
    job = job_of(home, features, "dlrm", SETTINGS)
    with pytest.raises(UserError, match=r"gives no output 'click', but: logits; choose a model.class of several"):
        train_local(job)
    bare = Train.model_validate({**SETTINGS.model_dump(), "tasks": {"click": {}, "purchase": {"label": "bought"}}})
    with pytest.raises(UserError, match=r"model.class 'esmm' learns a conversion from a product"):
        train_local(job_of(home, features, "esmm-bare", bare, model_of("esmm")))


EVALUATION = {
    "metrics": ["pr_auc"],
    "user": "row",
    "slices": {"part": "case when row < 1000200 then 'first' else 'second' end"},
    "bootstrap": {"replicates": 20},
}


def test_each_task_is_measured_on_its_rows(home: Workspace, features: Manifest) -> None:
    tasks = {**TASKS, "click_and_purchase": {**TASKS["click_and_purchase"], "metrics": ["calibration_error"]}}
    conf = Train.model_validate({**SETTINGS.model_dump(), "tasks": tasks, "evaluation": EVALUATION})
    job = job_of(home, features, "evaluated", conf, model_of("mmoe"))
    report = train_local(job)
    rows = read_split(job, "valid")
    schema = features.dataset_schema
    assert schema is not None
    columns = {name: rows[name].to_numpy() for f in schema.features for name in f.physical if name in rows}
    predictor = load_predictor(job.saved_model)
    rows = rows.assign(**{f"p_{name}": p for name, p in predictor.predict_tasks(columns).items()})
    np.testing.assert_array_equal(rows["p_click"], predictor.predict(columns))
    np.testing.assert_allclose(rows["p_click_and_purchase"], rows["p_click"] * rows["p_purchase"], rtol=1e-5)
    chosen = load_predictor(job.saved_model, output="amount")
    np.testing.assert_array_equal(chosen.predict(columns), rows["p_amount"])
    assert {
        n: len(p) for n, p in chosen.predict_tasks({n: c[:0] for n, c in columns.items()}).items()
    } == dict.fromkeys(TASKS, 0)
    with pytest.raises(UserError, match=r"has no output 'buy'; it has: click, purchase, amount, click_and_purchase"):
        load_predictor(job.saved_model, output="buy")

    rows["part"] = np.where(rows["row"] < 1_000_200, "first", "second")
    rows["y_purchase"] = rows["bought"].where(rows["click"] == 1)
    rows["y_click_and_purchase"] = rows["bought"].where(rows["click"] == 1, False)
    evaluation = report.evaluation["valid"]
    task_figures = evaluation["tasks"]
    assert list(task_figures) == ["purchase", "amount", "click_and_purchase"]
    for name in ("purchase", "click_and_purchase"):
        known = rows[rows[f"y_{name}"].notna()]
        assert task_figures[name]["rows"] == len(known)
        parts = {("", ""): known} | {("part", str(value)): part for value, part in known.groupby("part")}
        sliced = {(s["slice"], s["value"]): s for s in task_figures[name]["slices"]} | {("", ""): task_figures[name]}
        assert sliced.keys() == parts.keys()
        for key, part in parts.items():
            y, p = part[f"y_{name}"].astype(int), part[f"p_{name}"].astype(float)
            metrics = sliced[key]["metrics"]
            assert metrics["auc"] == pytest.approx(reference.roc_auc_score(y, p), abs=1e-6)
            assert metrics["log_loss"] == pytest.approx(reference.log_loss(y, p), abs=1e-6)
            assert metrics["base_rate"] == pytest.approx(y.mean())
    pr_auc = task_figures["purchase"]["metrics"]["pr_auc"]
    known = rows[rows["y_purchase"].notna()]
    assert pr_auc == pytest.approx(
        reference.average_precision_score(known["y_purchase"].astype(int), known["p_purchase"]), abs=1e-6
    )
    assert "pr_auc" not in task_figures["click_and_purchase"]["metrics"]
    assert task_figures["click_and_purchase"]["metrics"]["calibration_error"] is not None
    low, high = task_figures["purchase"]["intervals"]["auc"]
    assert low <= task_figures["purchase"]["metrics"]["auc"] + 0.2
    assert low < high

    known = rows[rows["paid"].notna()]
    assert task_figures["amount"]["rows"] == len(known)
    error = known["p_amount"] - known["paid"]
    assert task_figures["amount"]["metrics"]["rmse"] == pytest.approx(np.sqrt((error**2).mean()), rel=1e-5)
    assert task_figures["amount"]["metrics"]["mae"] == pytest.approx(error.abs().mean(), rel=1e-5)
    assert task_figures["amount"]["metrics"]["rmse"] < known["paid"].std()
    assert report.metrics["auc.purchase"] == task_figures["purchase"]["metrics"]["auc"]
    assert report.metrics["rmse.amount"] == task_figures["amount"]["metrics"]["rmse"]
    assert report.metrics["auc"] == pytest.approx(reference.roc_auc_score(rows["click"], rows["p_click"]), abs=1e-6)

    # Of the same weights on two ranks, one of which has fewer rows of a task.
    two_rank_job = job_of(home, features, "evaluated-2", conf, model_of("mmoe"))
    shutil.copytree(job.checkpoints.local_path(), two_rank_job.checkpoints.local_path())
    for r in run_ranks(2, lambda collective: train(two_rank_job, collective)):
        for name, value in report.metrics.items():
            assert r.metrics[name] == pytest.approx(value, abs=1e-5), name


@pytest.mark.parametrize("monitor", ["auc.purchase", "rmse.amount"])
def test_the_model_is_that_of_a_tasks_best_metric(monitor: str, home: Workspace, features: Manifest) -> None:
    conf = SETTINGS.model_copy(update={"epochs": 3, "patience": 1, "monitor": monitor})
    report = train_local(job_of(home, features, monitor, conf, model_of("mmoe")))
    values = [e[monitor] for e in report.evals]
    best = values.index(max(values) if monitor.startswith("auc") else min(values))
    assert report.best_step == report.evals[best]["step"]
    assert report.metrics[monitor] == values[best]
    with pytest.raises(ValidationError, match="is not measured"):
        Train.model_validate({**SETTINGS.model_dump(), "monitor": "auc.amount"})


def test_a_task_without_rows_has_no_values(home: Workspace, features: Manifest) -> None:
    tasks = {
        "click": {},
        "purchase": {"label": "bought", "where": "row < 0"},
        "amount": {**TASKS["amount"], "where": "row < 0"},
    }
    conf = Train.model_validate({**SETTINGS.model_dump(), "tasks": tasks, "max_steps": 1})
    job = job_of(home, features, "no-rows", conf, model_of("shared_bottom"))
    report = run_ranks(2, lambda collective: train(job, collective))[0]
    assert report.metrics["auc"] is not None
    of_tasks = {name: value for name, value in report.metrics.items() if "." in name}
    assert set(of_tasks) >= {"auc.purchase", "log_loss.purchase", "rmse.amount", "mae.amount"}
    assert set(of_tasks.values()) == {None}


def read_split(job: Job, split: str) -> pd.DataFrame:
    assert job.features.dataset_schema is not None
    dataset = job.ws.locate(job.features.output("dataset").name).local_path()
    return read_padded(sorted((dataset / split).glob("*.parquet")), job.features.dataset_schema).reset_index(drop=True)
