"""The train stage as it runs: Horovod ranks in Spark tasks. One stage run, with one rank killed on its way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from pyspark.sql import SparkSession

from headrace import registry
from headrace.config import Spec, build_spec
from headrace.manifest import Manifest
from headrace.models.predictor import load_predictor
from headrace.schema import DatasetSchema
from headrace.stage import run_stage
from headrace.train import stage as module
from headrace.train.job import Job
from headrace.train.loop import train_local
from headrace.train.progress import Tick
from headrace.workspace import Workspace

DS = "2026-01-10"


def spec_of(**train: Any) -> Spec:
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
            "features": {
                "label": "click", "workflow": [], "split": {"by": "position"}, "carried": ["row", "query"],
            },
            "model": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [16]},
            "train": {**settings, **train},
            "spark": {"driver_memory": "1g"},
        }
    )  # fmt: skip


def test_two_ranks_one_of_them_killed_equal_one_rank(
    spark: SparkSession, ws: Workspace, make_dataset: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    features = with_raw_ids(make_dataset(ws, train=4_000, valid=1_000, rank=30), "item")
    features.save(ws.manifest("clicks", DS, "features"))
    raw = {"kind": "adagrad", "dynamic": {"item": {"admit_after": 3}}}
    spec = spec_of(
        ranks=2, rank_group="query", rank_k=3, batch_size=80, epochs=8, checkpoint_steps=50, embeddings=raw
    )
    alone = train_local(
        Job(home=ws.home, pipeline="clicks", ds=DS, key="alone", features=features, model=spec.model, train=spec.train)
    )

    killed: list[int] = []

    def kill_rank_1(tick: Tick) -> None:
        # The first time that the ranks are heard of behind a checkpoint, rank 1 dies.
        if not killed and tick.step > 60:
            for p in psutil.Process().children(recursive=True):  # this session's ranks, nobody else's
                found = p.as_dict(["cmdline", "environ"], ad_value={})
                is_rank = "horovod.spark.task.gloo_exec_fn" in found["cmdline"]
                if is_rank and found["environ"].get("HOROVOD_RANK") == "1":
                    killed.append(p.pid)
                    p.kill()
                    return

    monkeypatch.setattr(module, "_preload_at_the_end", lambda: kill_rank_1)
    # A message each step, so that the driver hears of it in time.
    monkeypatch.setattr(module, "make_job", _impatient(module.make_job))
    caplog.set_level("INFO", "headrace")
    outcome = run_stage(module.Train(), spec, ws, DS)
    assert len(killed) == 1
    assert "try 2 of 2 goes on from step" in caplog.text
    assert "samples/s" in caplog.text

    facts = outcome.manifest.facts
    assert facts["resumed_from_step"] >= 50
    assert facts["ranks"] == 2
    assert len(facts["curve"]) == len(alone.curve) == 100
    np.testing.assert_allclose([p["loss"] for p in facts["curve"]], [p["loss"] for p in alone.curve], rtol=1e-3)
    np.testing.assert_allclose(
        [p["loss"] for p in facts["curve"][:20]], [p["loss"] for p in alone.curve[:20]], rtol=2e-5
    )
    told = ("rows", "waiting", "admitted", "evicted", "hit_share", "oov_share")
    assert {k: facts["dynamic"]["item"][k] for k in told} == {k: alone.dynamic["item"][k] for k in told}
    assert facts["dynamic"]["item"]["rows"] == 38
    for name, value in alone.metrics.items():
        assert facts["metrics"][name] == pytest.approx(value, abs=2e-3), name
    assert outcome.manifest.rows == {"train": 4_000, "valid": 1_000, "rank": 300}
    assert {"rank0", "rank1"} <= outcome.manifest.peak_memory_mib.keys()

    saved = ws.home / outcome.manifest.output("model").name
    assert json.loads((saved / "model.json").read_text())["key"] == outcome.manifest.key
    assert (saved / "workflow" / "workflow.json").is_file()
    assert load_predictor(saved).schema == features.dataset_schema
    found = registry.champion(ws, "clicks")
    assert found is not None
    assert (found.key, found.source, found.ds) == (outcome.manifest.key, saved, DS)
    assert found.metrics["auc"] == pytest.approx(facts["metrics"]["auc"])
    assert facts["registered"] == {"name": "clicks", "version": found.version}

    again = run_stage(module.Train(), spec, ws, DS)
    assert again.skipped
    # How many ranks is not part of what is made.
    other = spec.model_copy(update={"train": spec.train.model_copy(update={"ranks": 1})})
    assert run_stage(module.Train(), other, ws, DS).skipped


def with_raw_ids(features: Manifest, name: str) -> Manifest:
    """The same dataset, with a feature's codes taken for raw ids."""
    assert features.dataset_schema is not None
    as_raw = {"dynamic": True, "dtype": "int64", "cardinality": None, "vocabulary": None}
    made = tuple(f.model_copy(update=as_raw) if f.name == name else f for f in features.dataset_schema.features)
    return features.model_copy(update={"dataset_schema": DatasetSchema(features=made)})


def _impatient(original: Callable[..., Job]) -> Callable[..., Job]:
    def make(*args: Any) -> Job:
        return original(*args).model_copy(update={"progress_seconds": 0.0})

    return make


def test_what_a_rank_has_to_say_reaches_the_user(
    spark: SparkSession, ws: Workspace, make_dataset: Callable[..., Manifest]
) -> None:
    from headrace.errors import UserError

    make_dataset(ws, train=4_000, valid=1_000)
    hot = spec_of(ranks=1, dense={"kind": "sgd", "learning_rate": 1e30})
    with pytest.raises(UserError, match=r"training diverged: the loss is .* at step"):
        run_stage(module.Train(), hot, ws, DS)
    assert not Path(ws.manifest("clicks", DS, "train")).exists()
    with pytest.raises(UserError, match=r"train.ranks is 4, but the Spark session has 2 task slots"):
        run_stage(module.Train(), spec_of(ranks=4), ws, DS)
    with pytest.raises(UserError, match=r"fewer than train.streams .16.: set features.min_row_groups"):
        run_stage(module.Train(), spec_of(streams=16, batch_size=160), ws, DS)
