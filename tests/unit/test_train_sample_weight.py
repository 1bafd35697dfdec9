"""Weights of samples: what a loop says, on any number of ranks; what is no weight is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
import torch

from headrace.comm.base import LocalCollective, run_ranks
from headrace.config import build_spec
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.config.workspace import Workspace
from headrace.dataset.layout import split_of
from headrace.dataset.loaders import TrainLoader
from headrace.errors import UserError
from headrace.models.sharded_model import ShardedModel
from headrace.stage.manifest import Manifest
from headrace.train.carried_columns import SampleWeights, carried_weight, checked_weights
from headrace.train.job import Job, TrainingReport
from headrace.train.loop.run import train, train_local
from headrace.train.loop.trainer import EagerForward
from headrace.train.micro_batch import prefetch_to_device
from headrace.train.stage import Train as TrainStage
from tests.train_support import TRAIN, assert_same_weights, job_of

WEIGHTED = TRAIN.model_copy(update={"epochs": 1, "sample_weight": "query"})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def features(home: Workspace, make_dataset: Callable[..., Manifest]) -> Manifest:
    """`query` holds weights: 0, 1, 2 and 3 in turn."""
    return with_weights(home, make_dataset(home, train=1_000, valid=100), lambda n: np.arange(n) % 4)


def with_weights(home: Workspace, manifest: Manifest, weights: Callable[[int], np.ndarray]) -> Manifest:
    for path in sorted((home.locate(manifest.output("dataset").name).local_path() / "train").glob("*.parquet")):
        table = pd.read_parquet(path)
        table.assign(query=weights(len(table))).to_parquet(path, row_group_size=125, compression="none")
    return manifest


def run(home: Workspace, features: Manifest, key: str, ranks: int = 1, **more: object) -> tuple[Job, TrainingReport]:
    torch.set_num_threads(1)
    job = job_of(home, features, key, WEIGHTED.model_copy(update=more))
    return job, run_ranks(ranks, lambda collective: train(job, collective))[0]


def test_a_batch_loses_what_a_loop_says(home: Workspace, features: Manifest) -> None:
    layout, schema = split_of(features, home, "train", ["query"])
    model = ShardedModel(schema, job_of(home, features, "x").model, LocalCollective(), 1)
    with TrainLoader(layout, schema, WEIGHTED, carried=["query"]) as source:
        read_batch = next(source)
        batch = next(prefetch_to_device([read_batch], torch.device("cpu"), weights=SampleWeights(WEIGHTED, schema)))
    inputs = model.inputs_of(batch.continuous, batch.categorical, batch.labels, batch.weights)
    logits = model.outputs(inputs)["logits"].detach().double().numpy()
    losses = np.where(read_batch.labels > 0, np.logaddexp(0, -logits), np.logaddexp(0, logits))
    loss = EagerForward(model, 200).loss(inputs).detach()
    assert len(set(read_batch.carried["query"])) == 4
    assert float(loss) == pytest.approx((losses * read_batch.carried["query"]).sum() / 200, rel=1e-6)
    part = batch.rows(3, 9)
    assert part.weights is not None
    np.testing.assert_array_equal(part.weights.numpy(), read_batch.carried["query"][3:9])


def test_ranks_and_micro_batches_take_the_same_steps(home: Workspace, features: Manifest) -> None:
    expected = [p["loss"] for p in run(home, features, "one")[1].curve]
    plain = [p["loss"] for p in run(home, features, "plain", sample_weight=None)[1].curve]
    assert not np.allclose(expected, plain, rtol=0.05)
    for key, ranks, accumulate in (("two", 2, 1), ("parts", 1, 3)):
        losses = [p["loss"] for p in run(home, features, key, ranks, accumulate=accumulate)[1].curve]
        np.testing.assert_allclose(losses, expected, rtol=2e-4)


def test_weights_of_one_change_nothing(home: Workspace, make_dataset: Callable[..., Manifest]) -> None:
    ones = with_weights(home, make_dataset(home, train=1_000, valid=100, seed=5), lambda n: np.ones(n))
    job, _ = run(home, ones, "ones")
    unweighted, _ = run(home, ones, "none", sample_weight=None)
    assert job.config_fingerprint != unweighted.config_fingerprint
    for a, b in zip(*(j.metrics_file.read_text().splitlines()[:1] for j in (job, unweighted)), strict=True):
        assert a.split("samples")[0] == b.split("samples")[0]
    assert_same_weights(job, unweighted)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_other_weights_are_refused(bad: float) -> None:
    with pytest.raises(UserError, match=r"train.sample_weight: 'w' is .* in 1 of 2 rows of a batch"):
        checked_weights(np.array([1.0, bad]), "w")
    assert checked_weights(np.array([0, 3]), "w").tolist() == [0.0, 3.0]


def test_a_column_of_text_is_refused() -> None:
    schema = DatasetSchema(features=(Feature(name="w", kind=Kind.CARRIED, dtype="string"),))
    with pytest.raises(UserError, match="'w' is text"):
        carried_weight(TRAIN.model_copy(update={"sample_weight": "w"}), schema)
    assert carried_weight(TRAIN, schema) == ()


def test_the_weight_is_in_the_key(home: Workspace, features: Manifest) -> None:
    minimal = {
        "pipeline": "clicks",
        "source": {"format": "clicks", "path": "{ds}"},
        "table": {"columns": [{"name": "click", "type": "int"}, {"name": "w"}]},
        "features": {"label": "click", "workflow": [], "split": {"by": "position"}, "carried": ["w"]},
    }
    assert TrainStage().spec_part(build_spec(minimal))["train"]["sample_weight"] is None
    weighted = build_spec({**minimal, "train": {"sample_weight": "w"}})
    assert TrainStage().spec_part(weighted)["train"]["sample_weight"] == "w"
    with pytest.raises(UserError, match=r"train.sample_weight: 'x' must be in features.carried"):
        build_spec({**minimal, "train": {"sample_weight": "x"}})


def test_a_run_with_a_bad_weight_says_so(home: Workspace, make_dataset: Callable[..., Manifest]) -> None:
    bad_features = with_weights(home, make_dataset(home, train=400, valid=50, seed=6), lambda n: np.full(n, -2.0))
    with pytest.raises(UserError, match=r"'query' is -2.0 in 200 of 200 rows"):
        train_local(job_of(home, bad_features, "bad", WEIGHTED))
