"""Training with items that are drawn beside the rows: any number of ranks, stopped and resumed, in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headrace.comm.base import run_ranks
from headrace.config import Model, Negatives
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.stage.manifest import Manifest
from headrace.train.loop.run import train, train_local
from tests.train_support import TRAIN, Stopped, assert_same_weights, job_of, stop_at, weights

COMPARED = Model.model_validate({"class": "tests.plugin_models:Compared", "embedding_dim": 4})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("candidates"))


@pytest.fixture(scope="module")
def features(home: Workspace, make_dataset: Callable[..., Manifest]) -> Manifest:
    return make_dataset(home, train=2_000, valid=500)  # 10 steps


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("popular", {"method": "popularity", "per_positive": 6}),
        ("shared", {"shared": True, "per_positive": 50}),
        ("batch", {"method": "in_batch", "per_positive": 3}),
    ],
)
def test_a_run_is_the_same_on_any_ranks_and_resumed(
    name: str, options: dict[str, Any], home: Workspace, features: Manifest
) -> None:
    torch.set_num_threads(1)
    negatives = Negatives.model_validate({"column": "item", "as": "candidates", **options})
    settings = TRAIN.model_copy(update={"negatives": negatives, "patience": None})
    job = job_of(home, features, name, settings, COMPARED)
    report = train_local(job)
    losses = [p["loss"] for p in report.curve]
    assert np.mean(losses[10:]) < np.mean(losses[:10])  # of the same rows
    assert report.steps == 20  # as many as without: no rows were added

    stopped = job_of(home, features, f"{name}-stopped", settings, COMPARED)
    with pytest.raises(Stopped):
        train_local(stopped, stop_at(7))
    assert train_local(stopped).resumed_from_step == 5
    assert_same_weights(job, stopped)

    parts = settings.model_copy(update={"accumulate": 2})
    two = job_of(home, features, f"{name}-2", parts, COMPARED)
    for r in run_ranks(2, lambda collective: train(two, collective)):
        np.testing.assert_allclose([p["loss"] for p in r.curve], losses, rtol=1e-4)
    for tensor, value in weights(job).items():
        np.testing.assert_allclose(weights(two)[tensor], value, atol=2e-3, err_msg=tensor)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (None, r"items that are drawn for each row: set train\.negatives, such as .column: item, as: candidates"),
        ({"column": "item"}, r"items that are drawn for each row: set train\.negatives"),
        ({"column": "user", "as": "candidates"}, r"train\.negatives\.column is 'user', whose codes are others'"),
    ],
)
def test_draws_that_a_model_lacks(
    options: dict[str, Any] | None, message: str, home: Workspace, features: Manifest
) -> None:
    negatives = None if options is None else Negatives.model_validate(options)
    job = job_of(home, features, "lacks", TRAIN.model_copy(update={"negatives": negatives}), COMPARED)
    with pytest.raises(UserError, match=message):
        train_local(job)
