"""Models of several labels: trained on one and two ranks, stopped and resumed, saved, asked and evaluated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from headrace.comm.threads import run_ranks
from headrace.config import Model, Train
from headrace.errors import UserError
from headrace.manifest import Manifest
from headrace.models.saved import read_card
from headrace.schema import DatasetSchema, Feature, Kind
from headrace.train.loop.run import train, train_local
from headrace.workspace import Workspace
from tests.train_support import TRAIN, Stopped, assert_same_weights, job_of, stop_at, weights

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


def with_purchases(home: Workspace, found: Manifest) -> Manifest:
    """`bought` follows some clicks, of cheap items mostly, and is not known of each tenth row; `paid` is a number."""
    folder = home.locate(found.output("dataset").name).local_path()
    for path in sorted(folder.glob("*/*.parquet")):
        table = pd.read_parquet(path)
        rng = np.random.default_rng(int(table["row"][0]))
        chance = 1 / (1 + np.exp(2 * table["price"]))
        bought = ((table["click"] == 1) & (rng.random(len(table)) < chance)).astype(object)
        bought[table["row"] % 10 == 3] = None
        paid = np.where(table["row"] % 3 == 1, np.nan, 2 * table["age"] + rng.normal(size=len(table)))
        table.assign(bought=bought, paid=paid).to_parquet(path, row_group_size=125, compression="none")
    schema = found.dataset_schema
    assert schema is not None
    more = (
        Feature(name="bought", kind=Kind.CARRIED, dtype="bool"),
        Feature(name="paid", kind=Kind.CARRIED, dtype="float64"),
    )
    return found.model_copy(update={"dataset_schema": DatasetSchema(features=(*schema.features, *more))})


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


def test_micro_batches_take_the_same_steps(home: Workspace, features: Manifest) -> None:
    found = []
    for accumulate in (1, 3):
        conf = SETTINGS.model_copy(update={"accumulate": accumulate, "max_steps": 4})
        found.append(train_local(job_of(home, features, f"parts-{accumulate}", conf, model_of("esmm"))))
    np.testing.assert_allclose(*([p["loss"] for p in r.curve] for r in found), rtol=2e-4)


def test_a_model_of_one_task_says_what_it_lacks(home: Workspace, features: Manifest) -> None:
    job = job_of(home, features, "dlrm", SETTINGS)
    with pytest.raises(UserError, match=r"gives no output 'click', but: logits; choose a model.class of several"):
        train_local(job)
    bare = Train.model_validate({**SETTINGS.model_dump(), "tasks": {"click": {}, "purchase": {"label": "bought"}}})
    with pytest.raises(UserError, match=r"model.class 'esmm' learns a conversion from a product"):
        train_local(job_of(home, features, "esmm-bare", bare, model_of("esmm")))
