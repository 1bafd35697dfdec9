"""Every class of model, the user's too: trained on one and two ranks, stopped and resumed, warm, saved and asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from headrace.comm.base import LocalCollective, run_ranks
from headrace.config import Model
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models.predictor import load_predictor
from headrace.models.saved import load_model, read_card
from headrace.models.sharded_model import ShardedModel
from headrace.stage.manifest import Manifest
from headrace.train.loop.run import train, train_local
from tests.train_support import TRAIN, Stopped, assert_same_weights, job_of, read_padded, stop_at, weights

SHORT = TRAIN.model_copy(update={"epochs": 1})

MODELS: dict[str, dict[str, Any]] = {
    "dlrm": {"bottom_mlp": (8,), "top_mlp": (16,)},
    "wide_deep": {"args": {"deep_mlp": [8]}},
    "deepfm": {"args": {"deep_mlp": [8], "dropout": 0.2}},
    "dcn_v2": {"args": {"layers": 2, "low_rank": 2, "experts": 2, "deep_mlp": [8]}},
    "final_mlp": {"args": {"first_mlp": [8, 4], "second_mlp": [6], "first_gate": ["user"]}},
    "masknet": {"args": {"blocks": [8, 8]}},
    "two_tower": {
        "args": {"item": "item", "user_features": ["user", "age"], "item_features": ["price", "tags"], "user_mlp": [8]}
    },
    "tests.plugin_models:Factors": {"args": {"left": "user", "right": "item"}},
    "tests.plugin_models:Settled": {"args": {"scale": 0.5}},
    "tests.plugin_models:Interests": {"args": {"dim": 3}},
}


def model_of(name: str) -> Model:
    return Model.model_validate({"class": name, "embedding_dim": 4, **MODELS[name]})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("classes"))


@pytest.fixture(scope="module")
def features(home: Workspace, make_dataset: Callable[..., Manifest]) -> Manifest:
    return make_dataset(home, train=2_000, valid=500)  # 10 steps


@pytest.mark.parametrize("name", MODELS)
def test_a_class_trains_resumes_and_answers(name: str, home: Workspace, features: Manifest) -> None:
    torch.set_num_threads(1)
    key = name.replace(":", "-")
    job = job_of(home, features, key, SHORT, model_of(name))
    report = train_local(job)
    losses = [p["loss"] for p in report.curve]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])

    stopped = job_of(home, features, f"{key}-stopped", SHORT, model_of(name))
    with pytest.raises(Stopped):
        train_local(stopped, stop_at(7))
    assert train_local(stopped).resumed_from_step == 5
    assert_same_weights(job, stopped)

    if "dropout" not in MODELS[name].get("args", {}):  # each rank draws its own
        two = job_of(home, features, f"{key}-2", SHORT, model_of(name))
        for r in run_ranks(2, lambda collective: train(two, collective)):
            np.testing.assert_allclose([p["loss"] for p in r.curve], losses, rtol=1e-4)
        for tensor, value in weights(job).items():
            np.testing.assert_allclose(weights(two)[tensor], value, atol=2e-3, err_msg=tensor)

    card = read_card(job.saved_model)
    assert (card.kind, card.model) == (name, model_of(name))
    assert features.dataset_schema is not None
    dataset = home.home / features.output("dataset").name
    table = read_padded(sorted((dataset / "valid").glob("*.parquet")), features.dataset_schema)
    predictor = load_predictor(job.saved_model)
    predictions = predictor.predict({c: table[c].to_numpy() for c in table.columns})
    assert predictor.kind == name
    # Log loss from what was saved, against what the run's own evaluation found.
    p, y = predictions.astype(np.float64), table["click"].to_numpy()
    assert report.metrics["log_loss"] == pytest.approx(-np.mean(y * np.log(p) + (1 - y) * np.log1p(-p)), rel=1e-5)

    warm = job_of(home, features, f"{key}-warm", SHORT, model_of(name), warm_start=str(job.saved_model))
    assert train_local(warm).curve[0]["loss"] < losses[0]


def test_the_loss_is_the_classes_own(home: Workspace, features: Manifest) -> None:
    name = "tests.plugin_models:Factors"
    model = ShardedModel(features.dataset_schema, model_of(name), LocalCollective(), 1)
    numbers = torch.randn(6, model.inputs.continuous_columns)
    codes = torch.ones(6, len(model.inputs.categorical) + 1, dtype=torch.int64)
    labels = torch.tensor([0.0, 1, 0, 1, 1, 0])
    inputs = model.inputs_of(numbers, codes, labels)
    outputs = {k: v.detach() for k, v in model.outputs(inputs).items()}
    expected = sum(
        (1 / (1 + np.exp(-float(z))) - float(y)) ** 2 for z, y in zip(outputs["logits"], labels, strict=True)
    )
    assert float(model.loss(outputs, inputs)) == pytest.approx(expected, rel=1e-5)


def test_a_start_follows_from_the_seed_and_leaves_torchs_generator_alone(features: Manifest) -> None:
    def starts(seed: int) -> dict[str, torch.Tensor]:
        return ShardedModel(features.dataset_schema, model_of("dcn_v2"), LocalCollective(), seed).dense_state()

    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    a = starts(1)
    assert torch.equal(torch.rand(3), expected)
    b, c = starts(1), starts(2)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not all(torch.equal(a[k], c[k]) for k in a)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class": "dcn"}, "no class 'dcn' (known: dlrm, wide_deep, deepfm, dcn_v2, final_mlp, masknet,"),
        ({"class": "dcn_v2", "args": {"layer": 3}}, "args of 'dcn_v2': unknown parameter 'layer'; did you mean"),
        ({"class": "dcn_v2", "args": {"layers": 0}}, "args of 'dcn_v2': parameter 'layers': Input should be greater"),
        ({"class": "dcn_v2", "top_mlp": [8]}, "'top_mlp' is a setting of dlrm: write what 'dcn_v2' takes into 'args'"),
        ({"args": {"top_mlp": [8]}}, "dlrm has no args"),
        ({"class": "deepfm", "embedding_dim": 1}, "embedding_dim is at least 2"),
    ],
)
def test_mistakes_in_the_spec(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Model.model_validate(options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("tests.plugin_models:Nothing", {}, "model.class: model 'tests.plugin_models:Nothing' cannot be imported"),
        ("tests.plugin_models:NoModule", {}, "is no model: it does not extend torch.nn.modules.module:Module"),
        ("subprocess:Popen", {"args": "x"}, "is no model"),
        ("tests.plugin_models:Factors", {"left": "user"}, "Factors': parameter 'right' is missing"),
        ("tests.plugin_models:Factors", {"left": "user", "right": "item", "width": 3}, "unknown parameter 'width'"),
        ("tests.plugin_models:Settled", {"scale": "much"}, "parameter 'scale': Input should be a valid number"),
    ],
)
def test_mistakes_in_a_class_of_the_users(name: str, args: dict[str, Any], message: str, features: Manifest) -> None:
    model = Model.model_validate({"class": name, "args": args})
    with pytest.raises(UserError) as caught:
        ShardedModel(features.dataset_schema, model, LocalCollective(), 1)
    assert message in str(caught.value)


def test_a_section_has_the_keys_of_its_class() -> None:
    """Others would be refused when it is read back."""
    keys = {"kind": "dlrm", "embedding_dim": 8, "bottom_mlp": [4], "top_mlp": [4], "dropout": 0.0, "pooling": "sum"}
    model = Model.model_validate(keys)
    assert model.model_dump(mode="json") == keys | {"loss": None}
    assert Model.model_validate(model.model_dump(mode="json", by_alias=True)) == model
    final_mlp = model_of("final_mlp")
    assert "top_mlp" not in final_mlp.model_dump(mode="json")
    assert Model.model_validate(final_mlp.model_dump(mode="json", by_alias=True)) == final_mlp


def test_a_saved_model_names_no_class_that_is_none(home: Workspace, features: Manifest) -> None:
    job = job_of(home, features, "renamed", SHORT.model_copy(update={"max_steps": 1}), model_of("wide_deep"))
    train_local(job)
    path = job.saved_model / "model.json"
    path.put_text(path.read_text().replace('"wide_deep"', '"subprocess:Popen"'))
    with pytest.raises(UserError, match="is no model: it does not extend"):
        load_model(job.saved_model)
