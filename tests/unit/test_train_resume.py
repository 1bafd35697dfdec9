"""Training that resumes from checkpoints, and which of them are removed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from headrace.comm.base import LocalCollective, run_ranks
from headrace.config import EmbeddingOptimizer, Optimizer
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.stage.manifest import Manifest
from headrace.storage import LeaseLost, local
from headrace.train.callbacks.progress import LoopProgress, ProgressEvent
from headrace.train.checkpoint import write as checkpoint
from headrace.train.checkpoint.read import RECORD, list_steps, restore, step_name
from headrace.train.checkpoint.write import CheckpointWriter
from headrace.train.job import Job, TrainingReport
from headrace.train.loop.run import train, train_local
from tests.train_support import TRAIN, Stopped, assert_same_weights, job_of, stop_at


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def features(home: Workspace, make_dataset: Callable[..., Manifest]) -> Manifest:
    # 20 steps an epoch, 40 in all.
    return make_dataset(home, train=4_000, valid=1_000, rank=30)


@pytest.fixture(scope="module")
def undisturbed(home: Workspace, features: Manifest) -> tuple[Job, TrainingReport]:
    torch.set_num_threads(1)
    job = job_of(home, features, "undisturbed")
    return job, train_local(job)


KILLED = """
import os, signal, sys
import torch
from pathlib import Path
from headrace.train.checkpoint import write as checkpoint
from headrace.train.job import Job
from headrace.storage import Location
from headrace.train.loop.run import train_local

job = Job.model_validate_json(Path(sys.argv[1]).read_text())
moment = sys.argv[2]
torch.set_num_threads(1)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def say(tick):
    if moment == "between" and tick.step == 13:
        die()

if moment == "writing":  # the second checkpoint: all but its record is written
    real, calls = Location.put_text, []
    def put_text(file, text):
        calls.append(file) if file.name == checkpoint.RECORD else None
        if len(calls) == 2:
            die()
        real(file, text)
    Location.put_text = put_text
if moment == "saving":  # the last step is checkpointed, the model is not yet saved
    from headrace.models import saved
    saved.save_model = lambda *args, **kwargs: die()
train_local(job, say)
"""


@pytest.mark.parametrize(("moment", "resumed"), [("between", 10), ("writing", 5), ("saving", 40)])
def test_killed_and_run_again_equals_undisturbed(
    home: Workspace,
    features: Manifest,
    undisturbed: tuple[Job, TrainingReport],
    tmp_path: Path,
    moment: str,
    resumed: int,
) -> None:
    job = job_of(home, features, f"killed-{moment}")
    (tmp_path / "job.json").write_text(job.model_dump_json())
    command = [sys.executable, "-c", KILLED, str(tmp_path / "job.json"), moment]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert "Warning" not in process.stderr
    assert not job.saved_model.exists()
    report = train_local(job)
    assert report.resumed_from_step == resumed
    assert_same_weights(job, undisturbed[0])
    expected = undisturbed[1]
    assert report.metrics == expected.metrics
    assert report.evals == expected.evals
    assert [(p["step"], p["loss"]) for p in report.curve] == [(p["step"], p["loss"]) for p in expected.curve]
    assert [p.name for p in job.checkpoints.local_path().iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("part", ["checkpoint.json", "dense.safetensors", "embeddings"])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(
    home: Workspace,
    features: Manifest,
    undisturbed: tuple[Job, TrainingReport],
    part: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = job_of(home, features, f"damaged-{part}")
    shutil.copytree(undisturbed[0].checkpoints, job.checkpoints)
    path = (job.checkpoints / "step-00000040" / part).local_path()
    path = path if path.is_file() else max(path.rglob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    report = train_local(job)
    assert report.resumed_from_step == 35
    assert "step-00000040 is refused" in caplog.text
    assert path.name in caplog.text
    assert_same_weights(job, undisturbed[0])


def test_a_damaged_newer_checkpoint_costs_no_good_one(
    home: Workspace, features: Manifest, undisturbed: tuple[Job, TrainingReport]
) -> None:
    """One checkpoint is kept: the newest whole one, not a damaged one of a later step."""
    job = job_of(home, features, "damaged-newer", TRAIN.model_copy(update={"keep": 1, "max_steps": 35}))
    shutil.copytree(undisturbed[0].checkpoints, job.checkpoints)
    shutil.rmtree(job.checkpoints / "step-00000035")
    damaged = (job.checkpoints / "step-00000040" / "checkpoint.json").local_path()
    damaged.write_text(damaged.read_text()[:-2])
    with pytest.raises(Stopped):
        train_local(job, stop_at(12))
    assert list_steps(job.checkpoints) == [10]
    assert train_local(job).resumed_from_step == 10


def test_without_any_whole_checkpoint_it_starts_anew(
    home: Workspace, features: Manifest, undisturbed: tuple[Job, TrainingReport]
) -> None:
    job = job_of(home, features, "all-damaged")
    shutil.copytree(undisturbed[0].checkpoints, job.checkpoints)
    for path in job.checkpoints.local_path().glob("step-*/dense.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    report = train_local(job)
    assert report.resumed_from_step == 0
    assert_same_weights(job, undisturbed[0])


def test_a_run_goes_on_with_another_number_of_ranks(
    home: Workspace, features: Manifest, undisturbed: tuple[Job, TrainingReport]
) -> None:
    job = job_of(home, features, "other-world")
    with pytest.raises(Stopped):
        run_ranks(4, lambda collective: train(job, collective, stop_at(23)))
    report = run_ranks(2, lambda collective: train(job, collective))[0]
    assert report.resumed_from_step == 20
    np.testing.assert_allclose([p["loss"] for p in report.curve], [p["loss"] for p in undisturbed[1].curve], rtol=2e-4)


def test_checkpoints_of_another_configuration_are_refused(
    home: Workspace, features: Manifest, undisturbed: tuple[Job, TrainingReport]
) -> None:
    faster = TRAIN.model_copy(update={"dense": Optimizer(kind="adam", learning_rate=0.5)})
    job = job_of(home, features, "other-config", faster)
    shutil.copytree(undisturbed[0].checkpoints, job.checkpoints)
    with pytest.raises(UserError, match="written with another model, training or dataset"):
        train_local(job)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_each_optimizer_resumes_exactly(home: Workspace, features: Manifest, kind: Any) -> None:
    optimizer = Optimizer(kind=kind, learning_rate=0.01, weight_decay=0.001)
    of_rows = EmbeddingOptimizer.model_validate(optimizer.model_dump())
    conf = TRAIN.model_copy(update={"dense": optimizer, "embeddings": of_rows, "max_steps": 12})
    complete, stopped = job_of(home, features, f"whole-{kind}", conf), job_of(home, features, f"stopped-{kind}", conf)
    train_local(complete)
    with pytest.raises(Stopped):
        train_local(stopped, stop_at(8))
    assert train_local(stopped).resumed_from_step == 5
    assert_same_weights(complete, stopped)


def test_checkpoints_in_the_background_change_nothing(
    home: Workspace, features: Manifest, undisturbed: tuple[Job, TrainingReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    background = TRAIN.model_copy(update={"background_checkpoints": True})
    job = job_of(home, features, "background", background)
    # The writers wait until training has gone on for a step: what they write must be what was then.
    may_go_on = threading.Event()
    threads = []
    real = checkpoint.save_tensors

    def late(path: Path, tensors: Any) -> Any:
        threads.append(threading.current_thread().name)
        assert may_go_on.wait(60)
        return real(path, tensors)

    def say(tick: ProgressEvent) -> None:
        (may_go_on.set if tick.step % 5 == 1 or tick.step == 40 else may_go_on.clear)()
        if tick.step == 28:
            assert list_steps(job.checkpoints) == [25, 20]
            raise Stopped

    monkeypatch.setattr(checkpoint, "save_tensors", late)
    with pytest.raises(Stopped):
        train_local(job, say)
    assert set(threads) == {"checkpoint"}
    monkeypatch.setattr(checkpoint, "save_tensors", real)
    report = train_local(job)
    assert report.resumed_from_step == 25
    assert list_steps(job.checkpoints) == [40, 35]
    assert_same_weights(job, undisturbed[0])


def test_a_checkpoint_that_cannot_be_written_in_the_background_stops_the_run(
    home: Workspace, features: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, tensors: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    job = job_of(home, features, "full", TRAIN.model_copy(update={"background_checkpoints": True}))
    with pytest.raises(OSError, match="No space left"):
        train_local(job)
    assert list_steps(job.checkpoints) == []


def test_a_superseded_rank_does_not_commit(
    home: Workspace, features: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver was killed and a second launch has begun before it noticed."""

    def leave(code: int) -> None:
        raise Stopped

    monkeypatch.setattr(os, "_exit", leave)
    job = job_of(home, features, "superseded", token="old")
    job.folder.local_path().mkdir(parents=True)
    job.fence.local_path().write_text("old")
    with pytest.raises(Stopped):
        train_local(job, stop_at(8))
    job.fence.local_path().write_text("new")
    with pytest.raises(Stopped):
        train_local(job)
    assert list_steps(job.checkpoints) == [5]
    assert not job.saved_model.exists()


def test_an_overtaken_launch_removes_none_of_a_later_one(tmp_path: Path) -> None:
    folder = local(tmp_path)
    for step in (10, 20, 30):
        (folder / step_name(step)).make_dir()
        (folder / step_name(step) / RECORD).put_text("{}")

    def overtaken() -> None:
        raise LeaseLost("another launch")

    of_step_20: Any = SimpleNamespace(progress=LoopProgress(step=20), keep_step=None)
    writer = CheckpointWriter(folder, LocalCollective(), config="", keep=1, check_fence=overtaken)
    with pytest.raises(LeaseLost):
        writer._remove_older(of_step_20)
    assert sorted(list_steps(folder)) == [10, 20, 30]
    # The holder's own launch: older ones, and later ones, which were found damaged when it resumed.
    CheckpointWriter(folder, LocalCollective(), config="", keep=1, check_fence=lambda: None)._remove_older(of_step_20)
    assert list_steps(folder) == [20]


def test_an_overtaken_launch_that_resumes_removes_nothing_of_a_later_one(tmp_path: Path) -> None:
    folder, no_model = local(tmp_path), cast(Any, None)
    later_launch = (folder / step_name(40)).begin("another")
    (later_launch / "part").put_text("x")

    def overtaken() -> None:
        raise LeaseLost("another launch")

    with pytest.raises(LeaseLost):
        restore(folder, no_model, no_model, LocalCollective(), config="", check_fence=overtaken)
    assert (later_launch / "part").exists()
    assert restore(folder, no_model, no_model, LocalCollective(), config="", check_fence=lambda: None) is None
    assert not later_launch.exists()
