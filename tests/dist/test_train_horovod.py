"""The train stage as it runs: Horovod ranks in Spark tasks, with faults on its way."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from pyspark.sql import SparkSession

from headrace import config
from headrace.comm.base import run_ranks
from headrace.config import Spec, build_spec
from headrace.config.schema import DatasetSchema
from headrace.config.workspace import Workspace
from headrace.models import registry
from headrace.models.predictor import load_predictor
from headrace.models.registry.versions import numbered, versions
from headrace.models.saved import load_model
from headrace.stage import run_stage
from headrace.stage.manifest import Manifest
from headrace.storage import local
from headrace.train import stage as module
from headrace.train.callbacks.progress import ProgressEvent
from headrace.train.challenger import TrainChallenger
from headrace.train.comparison import Compare
from headrace.train.job import Job
from headrace.train.loop.run import train
from tests.users_package import model_of

DS = "2026-01-10"


def spec_of(model: dict[str, Any] | None = None, **train: Any) -> Spec:
    settings = {
        "batch_size": 200,
        "streams": 4,
        "epochs": 2,
        "seed": 3,
        "checkpoint_steps": 5,
        "retries": 1,
        "threads": 1,
    }
    return build_spec(
        {
            "pipeline": "clicks",
            "source": {"format": "clicks", "path": "{ds}"},
            "table": {"columns": [{"name": "click", "type": "int"}, {"name": "row"}, {"name": "query"}]},
            "features": {"label": "click", "workflow": [], "split": {"by": "position"}, "carried": ["row", "query"]},
            "model": model or {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [16]},
            "train": {**settings, **train},
            "spark": {"driver_memory": "1g"},
        }
    )


def test_ranks_killed_stopped_and_asked_to_stop_equal_undisturbed_ones(
    my_package: None,
    spark: SparkSession,
    ws: Workspace,
    make_dataset: Callable[..., Manifest],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a class of the user's, of an installed package: its lookups are of codes, a sequence and raw ids."""
    features = with_raw_ids(make_dataset(ws, train=4_000, valid=1_000, rank=30), "item")
    features.save(ws.manifest("clicks", DS, "features"))
    tables = {
        "kind": "adagrad",
        "dynamic": {"item": {"admit_after": 3}},
        "schedule": {"kind": "cosine", "warmup_steps": 60},
    }
    spec = spec_of(
        model_of("user", "item", "tags"),
        ranks=2,
        rank_group="query",
        rank_k=3,
        batch_size=80,
        epochs=8,
        checkpoint_steps=50,
        retries=2,
        deadline_seconds=8,
        embeddings=tables,
    )
    torch.set_num_threads(1)
    undisturbed = Job(
        home=ws.home, pipeline="clicks", ds=DS, key="whole", features=features, model=spec.model, train=spec.train
    )
    # Two threads: sums of two do not depend on the order, so that the bits are Horovod's.
    undisturbed_report = run_ranks(2, lambda collective: train(undisturbed, collective))[0]

    #: (behind this step, what happens): rank 1 dies, rank 1 hangs, the driver is asked to stop.
    faults: list[tuple[int, Callable[[], None]]] = [
        (60, lambda: rank_1().kill()),
        (120, lambda: rank_1().suspend()),
        (180, lambda: os.kill(os.getpid(), signal.SIGTERM)),
    ]

    def disturb(tick: ProgressEvent) -> None:
        # The first time that the ranks are heard of behind a checkpoint.
        if faults and tick.step > faults[0][0]:
            faults.pop(0)[1]()

    monkeypatch.setattr(module, "_preload_registry", lambda ws: disturb)
    # A message each step, so that the driver hears of it in time.
    monkeypatch.setattr(module, "make_job", _impatient(module.make_job))
    caplog.set_level("INFO", "headrace")
    with pytest.raises(SystemExit) as exit_error:
        run_stage(module.Train(), spec, ws, DS)
    assert exit_error.value.code == 128 + signal.SIGTERM
    assert faults == []
    assert re.search(r"rank 1 \(process \d+ on .*attempt 2 of 3 resumes from step", caplog.text)
    assert re.search(
        # Where it was when it was stopped, in a step, an evaluation or a checkpoint, is chance.
        r"rank 0 waited \d+ s at step \d+ in .*missing: rank 1 \(process \d+ on \S+\) was at step \d+ \(\w+\), and "
        r"has not reported for .*attempt 3 of 3 resumes from step",
        caplog.text,
    )
    stopped = re.search(r"asked to stop: training stopped after step (\d+) of 400 with a checkpoint", caplog.text)
    assert stopped is not None

    outcome = run_stage(module.Train(), spec, ws, DS)
    assert "samples/s" in caplog.text
    assert outcome.manifest.facts["resumed_from_step"] == int(stopped[1]) > 180

    facts = outcome.manifest.facts
    assert facts["ranks"] == 2
    assert len(facts["curve"]) == len(undisturbed_report.curve) == 100
    assert [p["loss"] for p in facts["curve"]] == [p["loss"] for p in undisturbed_report.curve]
    assert facts["metrics"] == undisturbed_report.metrics
    assert facts["dynamic"]["item"]["rows"] == 38
    counts = ("rows", "waiting", "admitted", "evicted", "hit_share", "oov_share")
    assert {k: facts["dynamic"]["item"][k] for k in counts} == {
        k: undisturbed_report.dynamic["item"][k] for k in counts
    }
    assert outcome.manifest.rows == {"train": 4_000, "valid": 1_000, "rank": 300}
    assert {"rank0", "rank1"} <= outcome.manifest.peak_memory_mib.keys()

    saved = ws.home / outcome.manifest.output("model").name
    left_model, right_model = load_model(local(saved)), load_model(undisturbed.saved_model)
    assert [t.name for t in left_model.embeddings.plan.tables] == ["user", "tags"]
    for left_rows, right_rows in zip(left_model.embeddings.weights, right_model.embeddings.weights, strict=True):
        assert torch.equal(left_rows, right_rows)
    for name, value in right_model.dense_state().items():
        assert torch.equal(left_model.dense_state()[name], value), name
    assert json.loads((saved / "model.json").read_text())["key"] == outcome.manifest.key
    assert (saved / "workflow" / "workflow.json").is_file()
    assert load_predictor(saved).schema == features.dataset_schema
    assert registry.champion(ws, "clicks") is None  # registering is not promoting
    registered = numbered(ws, "clicks", facts["registered"]["version"])
    assert registered is not None
    assert registered.tags["headrace.dataset"] == features.output("dataset").version
    assert (registered.key, registered.source.local_path(), registered.ds) == (outcome.manifest.key, saved, DS)
    assert registered.metrics["auc"] == pytest.approx(facts["metrics"]["auc"])
    assert facts["registered"] == {"name": "clicks", "version": registered.version}

    rerun = run_stage(module.Train(), spec, ws, DS)
    assert rerun.skipped
    # How many ranks is not part of what is made.
    one_rank_spec = spec.model_copy(update={"train": spec.train.model_copy(update={"ranks": 1})})
    assert run_stage(module.Train(), one_rank_spec, ws, DS).skipped

    # Beside it another network and trees, in the same session; the day's own is taken as it is.
    models = {"own": {}, "wide": {"model": {"class": "wide_deep"}, "train": {"epochs": 1}}}
    compare = {"models": {**models, "trees": {"baseline": {"rounds": 3, "workers": 2}}}}
    several = spec.model_copy(update={"compare": config.Compare.model_validate(compare)})
    compared = run_stage(Compare(), several, ws, DS).manifest
    compared_models = {m["name"]: m for m in compared.facts["models"]}
    assert compared_models["own"]["key"] == outcome.manifest.key
    assert [(m["class"], m["steps"]) for m in compared_models.values()] == [
        ("my_package.nets:MyNet", 400),
        ("wide_deep", 50),
        ("xgboost", 3),
    ]
    assert {"rank0", "rank1"} <= compared_models["wide"]["peak_memory_mib"].keys()
    trees = load_predictor(ws.home / compared.outputs[2].name)
    assert trees.schema == features.dataset_schema
    assert [v.key for v in versions(ws, "clicks")] == [registered.key]
    assert versions(ws, "clicks-baseline") == []

    # A challenger, had the day's model gone on from an earlier one.
    warm = outcome.manifest.model_copy(update={"facts": {**facts, "warm_start": "models/clicks/before"}})
    warm.save(ws.manifest("clicks", DS, "train"))
    challenged = spec.model_copy(update={"challenger": config.Challenger(train={"epochs": 1})})
    challenger_manifest = run_stage(TrainChallenger(), challenged, ws, DS).manifest
    assert challenger_manifest.facts["due"] == "no model of the 7 days before was trained from nothing"
    assert (challenger_manifest.facts["steps"], challenger_manifest.facts["warm_start"]) == (50, None)
    losses = [manifest_facts["metrics"]["log_loss"] for manifest_facts in (facts, challenger_manifest.facts)]
    assert challenger_manifest.facts["behind"] == pytest.approx(losses[0] - losses[1])
    challenger = registry.champion(ws, "clicks", "challenger")
    assert challenger is not None
    assert (challenger.key, challenger.version) == (
        challenger_manifest.key,
        challenger_manifest.facts["registered"]["version"],
    )
    assert registry.champion(ws, "clicks") is None
    assert run_stage(TrainChallenger(), challenged, ws, DS).skipped


def with_raw_ids(features: Manifest, name: str) -> Manifest:
    """The same dataset, with a feature's codes taken for raw ids."""
    assert features.dataset_schema is not None
    as_raw = {"dynamic": True, "dtype": "int64", "cardinality": None, "vocabulary": None}
    changed = tuple(f.model_copy(update=as_raw) if f.name == name else f for f in features.dataset_schema.features)
    return features.model_copy(update={"dataset_schema": DatasetSchema(features=changed)})


def rank_1() -> psutil.Process:
    for p in psutil.Process().children(recursive=True):  # this session's ranks, nobody else's
        info = p.as_dict(["cmdline", "environ"], ad_value={})
        if "horovod.spark.task.gloo_exec_fn" in info["cmdline"] and info["environ"].get("HOROVOD_RANK") == "1":
            return p
    raise AssertionError("rank 1 is not there")


def _impatient(original: Callable[..., Job]) -> Callable[..., Job]:
    def make(*args: Any) -> Job:
        return original(*args).model_copy(update={"progress_seconds": 0.0})

    return make


def test_what_a_rank_has_to_say_reaches_the_user(
    spark: SparkSession, ws: Workspace, make_dataset: Callable[..., Manifest]
) -> None:
    from headrace.errors import UserError

    make_dataset(ws, train=4_000, valid=1_000)
    hot = spec_of(ranks=1, retries=0, dense={"kind": "sgd", "learning_rate": 1e30})
    with pytest.raises(UserError, match=r"training diverged: the loss is .* at step"):
        run_stage(module.Train(), hot, ws, DS)
    assert not Path(ws.manifest("clicks", DS, "train")).exists()
    with pytest.raises(UserError, match=r"train.ranks is 4, but the Spark session has 2 task slots"):
        run_stage(module.Train(), spec_of(ranks=4), ws, DS)
    with pytest.raises(UserError, match=r"fewer than train.streams .16.: set features.min_row_groups"):
        run_stage(module.Train(), spec_of(streams=16, batch_size=160), ws, DS)
