"""Collaborative models in the training loop: on two ranks, stopped and resumed, saved and asked, warm, pretrained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headrace.comm.base import run_ranks
from headrace.config import Model, Train, load_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models.predictor import load_predictor
from headrace.models.saved import load_model
from headrace.stage.manifest import Manifest, Output
from headrace.train.job import Job
from headrace.train.loop.run import train, train_local
from headrace.train.setup.earlier_days import find_pretrained
from headrace.train.setup.initial_weights import check_pretrained
from headrace.train.stage import Train as TrainStage
from tests.train_support import TRAIN, Stopped, assert_same_weights, job_of, read_padded, stop_at, weights

UI = {"user": "user", "item": "item"}
CANDIDATES = {"negatives": {"column": "item", "as": "candidates", "per_positive": 3}}
SHARED = {"negatives": {"column": "item", "as": "candidates", "per_positive": 8, "shared": True}}
#: By name: the class, its settings, and those of the loop.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mf-bce": ("matrix_factorization", {**UI, "loss": "bce"}, {}),
    "mf-bpr": ("matrix_factorization", {**UI}, CANDIDATES),
    "mf-softmax": (
        "matrix_factorization",
        {**UI, "loss": "softmax", "similarity": "cosine", "temperature": 0.2},
        SHARED,
    ),
    "neumf": ("neumf", {**UI, "mlp_dim": 3, "mlp": [8, 4]}, {}),
    "mult-vae": ("mult_vae", {"item": "item", "history": "tags", "hidden": [6, 5], "anneal_steps": 9}, {}),
    "mult-dae": (
        "mult_vae",
        {"item": "item", "history": "tags", "hidden": [6], "dropout": 0, "variational": False},
        {},
    ),
    "lightgcn": ("lightgcn", {**UI, "loss": "bce", "layers": 2}, {}),
    "lightgcn-bpr": ("lightgcn", {**UI}, SHARED),
    "simplex": ("simplex", {**UI, "history": "tags", "margin": 0.2, "negative_weight": 3}, CANDIDATES),
}


def model_of(name: str, **more: Any) -> Model:
    kind, args, _ = MODELS[name]
    return Model.model_validate({"class": kind, "embedding_dim": 4, "args": {**args, **more}})


def train_of(name: str, **more: Any) -> Train:
    return Train.model_validate({**TRAIN.model_dump(), "epochs": 1, "patience": None, **MODELS[name][2], **more})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    torch.set_num_threads(1)
    return Workspace(tmp_path_factory.mktemp("collaborative"))


@pytest.fixture(scope="module")
def features(home: Workspace, make_dataset: Callable[..., Manifest]) -> Manifest:
    return with_lists_of_items(make_dataset(home, train=2_000, valid=400))  # 10 steps


def test_pretrained_models_are_found_and_of_the_same_vocabularies(
    home: Workspace, make_dataset: Callable[..., Manifest]
) -> None:
    features = make_dataset(home, train=400, valid=100, seed=9, ds="2026-02-02")
    dataset = home.locate(features.output("dataset").name)
    vocabulary = dataset / "workflow" / "vocabulary" / "item.parquet"
    vocabulary.put_text("items")
    names = {}
    for day, part in (("2026-02-01", "gmf"), ("2026-02-02", "gmf"), ("2026-02-02", "mlp"), ("2026-02-03", "mlp")):
        job = job_of(home, features, f"{part}-{day}", train_of("neumf", max_steps=1), model_of("neumf", part=part))
        train_local(job)
        name = home.name_of(job.saved_model)
        names[part, day] = name
        manifest = Manifest(stage="train", pipeline=f"my_{part}", ds=day, key=job.key, spec_hash="x")
        manifest = manifest.model_copy(update={"outputs": (Output(kind="model", name=name, version=job.key),)})
        manifest.save(home.manifest(f"my_{part}", day, "train"))

    spec = load_spec("movielens", ["train.pretrained={mlp: my_mlp, gmf: my_gmf}"])
    pretrained = find_pretrained(home, spec, "2026-02-02")
    assert [i.name for i in pretrained] == [names["gmf", "2026-02-02"], names["mlp", "2026-02-02"]]
    with pytest.raises(UserError, match=r"train.pretrained.gmf: pipeline 'my_gmf' has no trained model up to 2026-01"):
        find_pretrained(home, spec, "2026-01-31")

    models = {"gmf": home.locate(pretrained[0].name), "mlp": home.locate(pretrained[1].name)}
    assert features.dataset_schema is not None
    check_pretrained(models, dataset, features.dataset_schema)
    vocabulary.put_text("others")
    with pytest.raises(UserError, match=r"train.pretrained.gmf: .* has another vocabulary of 'item' than the dataset"):
        check_pretrained(models, dataset, features.dataset_schema)


def test_what_a_run_starts_from_is_part_of_its_key(home: Workspace, features: Manifest) -> None:
    plain, started = (load_spec("movielens", overrides) for overrides in ([], ["train.pretrained={gmf: a, mlp: b}"]))
    assert not TrainStage().spec_part(plain)["train"]["pretrained"]
    assert dict(TrainStage().spec_part(started)["train"]["pretrained"]) == {"gmf": "a", "mlp": "b"}
    jobs = [
        run("neumf", home, features, "key", pretrained=pretrained_models)
        for pretrained_models in ({}, {"gmf": "a"}, {"gmf": "b"})
    ]
    assert len({job.config_fingerprint for job in jobs}) == 3


def with_lists_of_items(manifest: Manifest) -> Manifest:
    """The tags are items: codes of one vocabulary."""
    schema = manifest.dataset_schema
    assert schema is not None
    changed = [
        f.model_copy(update={"vocabulary": "item", "cardinality": 40}) if f.name == "tags" else f
        for f in schema.features
    ]
    return manifest.model_copy(update={"dataset_schema": schema.model_copy(update={"features": tuple(changed)})})


def run(name: str, home: Workspace, features: Manifest, key: str, **more: Any) -> Job:
    return job_of(home, features, f"{name}-{key}", train_of(name), model_of(name), **more)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_resumes_and_answers(name: str, home: Workspace, features: Manifest) -> None:
    job = run(name, home, features, "one")
    losses = [p["loss"] for p in train_local(job).curve]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])

    stopped = run(name, home, features, "stopped")
    with pytest.raises(Stopped):
        train_local(stopped, stop_at(7))
    assert train_local(stopped).resumed_from_step == 5
    assert_same_weights(job, stopped)

    if name == "mult-vae":  # each rank draws its own noise
        return
    two = run(name, home, features, "two")
    for report in run_ranks(2, lambda collective: train(two, collective)):
        np.testing.assert_allclose([p["loss"] for p in report.curve], losses, rtol=1e-4)
    for tensor, value in weights(job).items():
        np.testing.assert_allclose(weights(two)[tensor], value, atol=2e-3, err_msg=tensor)

    assert features.dataset_schema is not None
    dataset = home.home / features.output("dataset").name
    table = read_padded(sorted((dataset / "valid").glob("*.parquet")), features.dataset_schema)
    columns = {c: table[c].to_numpy() for c in table.columns}
    predictions = load_predictor(job.saved_model).predict(columns)
    np.testing.assert_allclose(predictions, load_predictor(two.saved_model).predict(columns), atol=2e-3)
    assert len(np.unique(predictions)) > 100

    warm = run(name, home, features, "warm", warm_start=str(job.saved_model))
    assert np.mean([p["loss"] for p in train_local(warm).curve]) < np.mean(losses)


def test_a_graph_is_of_the_training_rows_and_saved(
    home: Workspace, features: Manifest, make_dataset: Callable[..., Manifest]
) -> None:
    job = run("lightgcn", home, features, "graph")
    train_local(job)

    def pairs(manifest: Manifest) -> set[tuple[int, int]]:
        dataset = home.home / manifest.output("dataset").name
        assert manifest.dataset_schema is not None
        rows = read_padded(sorted((dataset / "train").glob("*.parquet")), manifest.dataset_schema)
        return set(rows[rows.click > 0][["user", "item"]].itertuples(index=False, name=None))

    def edges(graph_job: Job) -> set[tuple[int, int]]:
        network = load_model(graph_job.saved_model).network
        return set(zip(network.graph_users.tolist(), network.graph_items.tolist(), strict=True))  # type: ignore[union-attr,operator,arg-type]

    assert edges(job) == pairs(features)
    # Tomorrow's rows are others, and there are more users.
    tomorrow = with_lists_of_items(make_dataset(home, train=1_000, valid=400, users=70, seed=5, ds="2026-01-11"))
    assert pairs(tomorrow) != pairs(features)
    warm = run("lightgcn", home, tomorrow, "tomorrow", warm_start=str(job.saved_model))
    train_local(warm)
    assert edges(warm) == pairs(tomorrow)


def test_a_pretrained_start_is_the_mean_of_two_models(home: Workspace, features: Manifest) -> None:
    parts = {}
    for part in ("gmf", "mlp"):
        model = model_of("neumf", part=part)
        parts[part] = job_of(home, features, f"pretrained-{part}", train_of("neumf"), model)
        train_local(parts[part])
    names = {part: str(job.saved_model) for part, job in parts.items()}
    still = train_of("neumf", max_steps=1, dense={"kind": "sgd", "learning_rate": 1e-12})
    still = still.model_copy(update={"embeddings": still.embeddings.model_copy(update={"learning_rate": 1e-12})})
    job = job_of(home, features, "pretrained", still, model_of("neumf", alpha=0.25), pretrained=names)
    train_local(job)
    columns = {c: np.arange(2, 40) for c in ("user", "item", "tags__0", "tags__1", "tags__2")}
    columns |= {c: np.zeros(38, np.float32) for c in ("age", "price")}  # type: ignore[dict-item]
    logits = {}
    for name, path in {**names, "both": job.saved_model}.items():
        p = load_predictor(path).predict(columns).astype(float)
        logits[name] = np.log(p) - np.log1p(-p)
    np.testing.assert_allclose(logits["both"], 0.25 * logits["gmf"] + 0.75 * logits["mlp"], atol=1e-4)
    two_rank_job = job_of(home, features, "pretrained-2", still, model_of("neumf", alpha=0.25), pretrained=names)
    run_ranks(2, lambda collective: train(two_rank_job, collective))
    np.testing.assert_allclose(
        load_predictor(two_rank_job.saved_model).predict(columns),
        load_predictor(job.saved_model).predict(columns),
        atol=1e-6,
    )

    def refused(model: Model, **models: str) -> str:
        with pytest.raises(UserError) as caught:
            train_local(job_of(home, features, f"refused-{len(models)}", still, model, pretrained=models))
        return str(caught.value)

    assert "none of the models has table" in refused(model_of("neumf"), gmf=names["gmf"])
    assert "does not start from other models" in refused(model_of("mf-bce"), **names)
    assert "do not fit the network" in refused(model_of("neumf", mlp=[8, 5]), **names)


@pytest.mark.parametrize("name", ["mf-bpr", "mf-softmax", "lightgcn", "mult-dae", "simplex"])
def test_all_items_are_ranked_by_the_logits(name: str, home: Workspace, features: Manifest) -> None:
    settings = train_of(name, max_steps=3, evaluation={"full_ranking": {"k": 5, "splits": ["valid"]}})
    job = job_of(home, features, f"{name}-full", settings, model_of(name))
    metrics = train_local(job).evaluation["valid_full"]["metrics"]

    assert features.dataset_schema is not None
    dataset = home.home / features.output("dataset").name
    table = read_padded(sorted((dataset / "valid").glob("*.parquet")), features.dataset_schema)
    rows = table[table.click > 0].reset_index(drop=True)
    all_pairs = rows.loc[np.repeat(rows.index, 38)].assign(item=np.tile(np.arange(2, 40), len(rows)).astype(np.int32))
    scores = load_predictor(job.saved_model).predict({c: all_pairs[c].to_numpy() for c in all_pairs}).reshape(-1, 38)
    target_scores = scores[np.arange(len(rows)), rows.item - 2]
    places = (scores >= target_scores[:, None]).sum(1) - 1
    # Probabilities of close logits may round to one number.
    assert metrics["hr_at_5_full"] == pytest.approx((places < 5).mean(), abs=2.1 / len(rows))
