"""Models of histories in the trainer: on one and two ranks, stopped and resumed, saved and asked for whole lists."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from headrace.comm.base import LocalCollective, run_ranks
from headrace.compute.jagged import JaggedArray
from headrace.config import Model, Train
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.config.workspace import Workspace
from headrace.dataset.layout import split_of
from headrace.models.categorical import CategoricalBatch
from headrace.models.predictor import load_predictor
from headrace.models.saved import load_model, read_card
from headrace.stage.manifest import Manifest, Output
from headrace.storage import Location, local
from headrace.train.evaluation.evaluate import evaluate_basic
from headrace.train.evaluation.predict import predict_split
from headrace.train.evaluation.ranks import Ranks
from headrace.train.job import Job, TrainingReport
from headrace.train.loop.run import train, train_local
from tests.train_support import TRAIN, Stopped, assert_same_weights, job_of, stop_at, weights

ITEMS, LENGTH = 30, 6
SCHEMA = DatasetSchema(
    features=(
        Feature(name="age", kind=Kind.CONTINUOUS, dtype="float32"),
        Feature(name="times", kind=Kind.CONTINUOUS, dtype="float32", length=LENGTH, is_list=True),
        Feature(name="item", kind=Kind.CATEGORICAL, dtype="int32", cardinality=ITEMS, vocabulary="item"),
        Feature(
            name="history",
            kind=Kind.CATEGORICAL,
            dtype="int32",
            length=LENGTH,
            is_list=True,
            cardinality=ITEMS,
            vocabulary="item",
        ),
        Feature(name="click", kind=Kind.LABEL, dtype="float32"),
    )
)
_NEXT = {"item": "item", "history": "history", "length": 4, "dropout": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "sasrec": ("sasrec", _NEXT | {"loss": "softmax", "heads": 2}),
    "sasrec with dropout": ("sasrec", _NEXT | {"loss": "softmax", "dropout": 0.2}),
    "sasrec, drawn items": ("sasrec", _NEXT | {"loss": "sampled_softmax"}),
    "sasrec, shared items": ("sasrec", _NEXT | {"loss": "sampled_softmax"}),
    "sasrec, bce": ("sasrec", _NEXT | {"loss": "bce", "negatives": "position"}),
    "hstu": ("hstu", _NEXT | {"loss": "softmax", "times": "times"}),
    "din": ("din", {"histories": {"item": "history"}, "attention_mlp": [6], "mlp": [8]}),
}


def _rows(n: int, rng: np.random.Generator) -> tuple[pa.Table, list[list[int]]]:
    """Histories that count upwards; a click is on what comes next, no click on anything else."""
    first, lengths, click = rng.integers(2, ITEMS, n), rng.integers(0, LENGTH + 1, n), rng.random(n) < 0.6
    known = ITEMS - 2
    history = [[2 + (f - 2 + i) % known for i in range(k)] for f, k in zip(first, lengths, strict=True)]
    follows = 2 + (first - 2 + lengths) % known
    item = np.where(click, follows, rng.integers(2, ITEMS, n))
    times = [np.sort(rng.random(k) * 100).astype(np.float32) for k in lengths]
    columns = {
        "age": rng.normal(size=n).astype(np.float32),
        "times": pa.array(times, pa.list_(pa.float32())),
        "item": item.astype(np.int32),
        "history": pa.array(history, pa.list_(pa.int32())),
        "click": click.astype(np.float32),
    }
    return pa.table(columns), history


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("sequences"))


@pytest.fixture(scope="module")
def features(home: Workspace) -> Manifest:
    rng = np.random.default_rng(5)
    folder = home.dataset("clicks", "2026-01-10", "sequences").local_path()
    for split, n in (("train", 1_600), ("valid", 200)):
        (folder / split).mkdir(parents=True)
        for i in range(4):
            pq.write_table(_rows(n // 4, rng)[0], folder / split / f"part-{i:04d}.parquet", use_dictionary=False)
    (folder / "workflow").mkdir()
    (folder / "workflow" / "workflow.json").write_text("{}\n")
    manifest = Manifest(
        stage="features",
        pipeline="clicks",
        ds="2026-01-10",
        key="sequences",
        spec_hash="test",
        dataset_schema=SCHEMA,
        outputs=(Output(kind="dataset", name=str(folder.relative_to(home.home)), version="sequences", rows=1_600),),
        rows={"train": 1_600, "valid": 200},
        facts={"splits": {"train": {"rows": 1_600}, "valid": {"rows": 200}}},
    )
    manifest.save(home.manifest("clicks", "2026-01-10", "features"))
    return manifest


def _train_of(args: dict[str, Any], shared: bool) -> Train:
    changes: dict[str, Any] = {"epochs": 1}
    if args.get("loss") in ("sampled_softmax", "bce"):
        changes["negatives"] = {"column": "item", "as": "candidates", "per_positive": 3, "shared": shared}
    return Train.model_validate(TRAIN.model_dump() | changes)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_histories_trains_resumes_and_answers(
    name: str, home: Workspace, features: Manifest, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    kind, args = MODELS[name]
    model, settings = (
        Model.model_validate({"class": kind, "embedding_dim": 4, "args": args}),
        _train_of(args, "shared" in name),
    )
    key = name.replace(" ", "-").replace(",", "")
    job = job_of(home, features, key, settings, model)
    report = train_local(job)
    losses = [p["loss"] for p in report.curve]
    assert np.mean(losses[-2:]) < np.mean(losses[:2])

    stopped = job_of(home, features, f"{key}-stopped", settings, model)
    with pytest.raises(Stopped):
        train_local(stopped, stop_at(7))
    assert train_local(stopped).resumed_from_step == 5
    assert_same_weights(job, stopped)

    if not args.get("dropout"):  # each rank draws its own
        two = job_of(home, features, f"{key}-2", settings, model)
        for r in run_ranks(2, lambda collective: train(two, collective)):
            np.testing.assert_allclose([p["loss"] for p in r.curve], losses, rtol=1e-4)
        for tensor, value in weights(job).items():
            actual, expected = weights(two)[tensor], value
            if tensor.endswith("query_key_value.bias"):  # a softmax does not see what is added to all keys
                actual, expected = np.delete(actual, slice(4, 8)), np.delete(expected, slice(4, 8))
            np.testing.assert_allclose(actual, expected, atol=2e-3, err_msg=tensor)

    if name in _EXPORTED and find_spec("onnxruntime") is not None:
        _check_evaluation_by_onnx(job, report, home, features, tmp_path)

    table, history = _rows(100, np.random.default_rng(9))
    predictor = load_predictor(job.saved_model)
    predictions = predictor.predict(_columns(table))
    # A row alone has the answer that it has among others.
    longest = max(range(100), key=lambda row: len(history[row]))
    row_alone = predictor.predict(_columns(table.slice(longest, 1)))
    np.testing.assert_allclose(row_alone, predictions[longest : longest + 1], rtol=1e-5)


#: Whose evaluation is asked of an export, too.
_EXPORTED = ("sasrec", "hstu", "din")


class _Export:
    """An export in the place of the model that an evaluation asks."""

    def __init__(self, folder: Location) -> None:
        self.folder = folder

    def outputs_of(self, continuous: torch.Tensor, batch: CategoricalBatch) -> dict[str, torch.Tensor]:
        from bench.export_parity import by_onnxruntime

        (lists,) = batch.lists
        if not len(continuous):
            return {"logits": torch.zeros(0)}
        longest = max(1, int(lists.lengths.max()))
        inputs = {
            "age": continuous[:, :1].numpy(),
            "times": continuous[:, 1:].numpy(),
            "item": batch.codes[:, 0].numpy(),
            "history": lists.to_padded(longest).long().numpy(),
        }
        return {"logits": torch.from_numpy(by_onnxruntime(self.folder, inputs)["model"]["label"]).logit()}


def _check_evaluation_by_onnx(
    job: Job, report: TrainingReport, home: Workspace, features: Manifest, folder: Path
) -> None:
    """Check the metrics of the rows that training's evaluation looked at."""
    from headrace.export.onnx_model import write_onnx

    write_onnx(load_model(job.saved_model), read_card(job.saved_model), local(folder), "fp32")
    layout, schema = split_of(features, home, "valid")
    ask = partial(predict_split, layout=layout, schema=schema, collective=LocalCollective(), batch_size=64, streams=4)
    by_onnx, by_torch = ask(_Export(local(folder))), ask(load_model(job.saved_model))
    np.testing.assert_allclose(by_onnx.logits, by_torch.logits, rtol=1e-4, atol=1e-5)
    metrics = evaluate_basic(Ranks(), by_onnx).metrics
    for metric in ("auc", "log_loss"):
        assert metrics[metric] == pytest.approx(report.metrics[metric], rel=1e-5)


def _columns(table: pa.Table) -> dict[str, Any]:
    columns: dict[str, Any] = {c: table[c].to_numpy() for c in ("age", "item")}
    for c in ("times", "history"):
        lists = table[c].to_pylist()
        offsets = np.array([0, *(len(x) for x in lists)]).cumsum()
        columns[c] = JaggedArray(
            offsets, np.array([x for row in lists for x in row], np.float32 if c == "times" else np.int64)
        )
    return columns


@pytest.mark.parametrize("name", ["sasrec, shared items", "hstu"])
def test_a_full_ranking_is_that_of_the_predictions(name: str, home: Workspace, features: Manifest) -> None:
    kind, args = MODELS[name]
    model = Model.model_validate({"class": kind, "embedding_dim": 4, "args": args})
    settings = _train_of(args, "shared" in name)
    ranking = {"full_ranking": {"k": 3, "exclude": "history", "splits": ["valid"]}}
    settings = Train.model_validate(settings.model_dump(by_alias=True) | {"evaluation": ranking})
    job = job_of(home, features, f"ranked-{kind}", settings, model)
    report = train_local(job)

    table = pa.concat_tables([pq.read_table(p) for p in sorted(_split(home, features, "valid").glob("*.parquet"))])
    table = table.filter(pc.equal(table["click"], 1.0))
    pairs = [(row, item) for row in range(table.num_rows) for item in range(2, ITEMS)]
    requests = table.take([row for row, _ in pairs]).set_column(2, "item", pa.array([i for _, i in pairs], pa.int32()))
    scores = load_predictor(job.saved_model).predict(_columns(requests)).reshape(table.num_rows, ITEMS - 2)
    hits, gains = [], []
    for row in range(table.num_rows):
        seen, target = table["history"][row].as_py(), table["item"][row].as_py()
        if target in seen:
            continue
        other_scores = [scores[row, i - 2] for i in range(2, ITEMS) if i not in seen and i != target]
        place = sum(score >= scores[row, target - 2] for score in other_scores)
        hits.append(place < 3)
        gains.append(1 / np.log2(place + 2) if place < 3 else 0)
    metrics = report.evaluation["valid_full"]["metrics"]
    assert metrics["hr_at_3_full"] == pytest.approx(np.mean(hits), abs=1e-9)
    assert metrics["ndcg_at_3_full"] == pytest.approx(np.mean(gains), abs=1e-9)


def _split(home: Workspace, features: Manifest, split: str) -> Path:
    return Path(home.home) / features.output("dataset").name / split
