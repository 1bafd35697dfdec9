"""The loop in one process: any number of ranks, kills, damage, and what it says to the user."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.comm.base import LocalCollective
from headrace.comm.threads import run_ranks
from headrace.config import EmbeddingOptimizer, Model, Negatives, Optimizer, Sharding, TableSharding, Train
from headrace.errors import UserError
from headrace.manifest import Manifest
from headrace.models.dlrm import DLRM
from headrace.models.predictor import load_predictor
from headrace.models.saved import load_dlrm, read_card, restore
from headrace.schema import Kind
from headrace.storage import local
from headrace.train.callbacks.progress import ProgressEvent
from headrace.train.checkpoint import write as checkpoint
from headrace.train.checkpoint.folders import list_steps
from headrace.train.job import Job
from headrace.train.loop.run import train, train_local
from headrace.train.result import Diverged, Report
from headrace.train.setup import state as setup
from headrace.workspace import Workspace
from tests.dataset_support import read_padded

TRAIN = Train(
    batch_size=200,
    streams=4,
    epochs=2,
    seed=3,
    checkpoint_steps=5,
    keep=2,
    dense=Optimizer(kind="adam", learning_rate=0.01),
    embeddings=EmbeddingOptimizer(kind="adagrad", learning_rate=0.1),
)
MODEL = Model(embedding_dim=4, bottom_mlp=(8,), top_mlp=(16,))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def features(home: Workspace, make_dataset: Callable[..., Manifest]) -> Manifest:
    # 20 steps an epoch, 40 in all.
    return make_dataset(home, train=4_000, valid=1_000, rank=30)


def job_of(home: Workspace, features: Manifest, key: str, train: Train = TRAIN, **more: Any) -> Job:
    return Job(
        home=home.home,
        pipeline="clicks",
        ds="2026-01-10",
        key=key,
        features=features,
        model=MODEL,
        train=train,
        progress_seconds=0.0,
        **more,
    )


@pytest.fixture(scope="module")
def undisturbed(home: Workspace, features: Manifest) -> tuple[Job, Report]:
    torch.set_num_threads(1)
    job = job_of(home, features, "undisturbed")
    return job, train_local(job)


def weights(job: Job) -> dict[str, np.ndarray]:
    model = load_dlrm(job.saved_model)
    return {k: v.numpy() for k, v in model.state_dict().items()} | {"embeddings": model.embeddings.weight.numpy()}


def assert_same_weights(a: Job, b: Job) -> None:
    left, right = weights(a), weights(b)
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def test_it_learns(undisturbed: tuple[Job, Report], features: Manifest) -> None:
    job, report = undisturbed
    losses = [p["loss"] for p in report.curve]
    assert len(losses) == 40
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.02
    assert report.metrics["auc"] is not None
    assert report.metrics["auc"] > 0.65
    assert report.metrics["auc"] == report.evals[-1]["auc"]
    assert [(e["epoch"], e["step"]) for e in report.evals] == [(1, 20), (2, 40)]
    assert report.rows == {"train": 4_000, "valid": 1_000}
    assert sum(b["rows"] for b in report.calibration_bins) == 1_000
    assert list_steps(job.checkpoints) == [40, 35]
    assert report.peak_memory_mib["rank0"] > 50


def test_half_precision_of_the_dense_part_learns_as_much(
    home: Workspace, features: Manifest, undisturbed: tuple[Job, Report]
) -> None:
    job = job_of(home, features, "bf16", TRAIN.model_copy(update={"precision": "bf16"}))
    report = train_local(job)
    losses, exact = ([p["loss"] for p in r.curve] for r in (report, undisturbed[1]))
    assert losses != exact
    np.testing.assert_allclose(losses, exact, atol=5e-3)
    assert report.metrics["auc"] == pytest.approx(undisturbed[1].metrics["auc"], abs=0.01)
    assert all(w.dtype == np.float32 for w in weights(job).values())
    # Evaluation is exact: what was reported is what the saved model, which knows nothing of this, answers.
    assert_reported(job, report)


def test_tables_larger_than_a_gpu_learn_the_same_to_the_bit(
    home: Workspace, features: Manifest, undisturbed: tuple[Job, Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the CPU in the place of the GPU: most rows are elsewhere, through evaluations, checkpoints and a resume."""
    schema, plan_tables = features.dataset_schema, setup.plan_tables
    assert schema is not None
    tables = {f.vocabulary or f.name for f in schema.of(Kind.CATEGORICAL)}
    sharding = Sharding(tables={name: TableSharding(cached=0.3) for name in tables})
    monkeypatch.setattr(setup, "plan_tables", lambda *args, **more: plan_tables(*args, **(more | {"card": True})))
    job = job_of(home, features, "cached", TRAIN.model_copy(update={"sharding": sharding}))
    report = train_local(job)
    assert report.metrics == undisturbed[1].metrics
    assert_same_weights(job, undisturbed[0])
    assert report.cached.keys() == tables
    for told in report.cached.values():
        assert told["share"] == 0.3
        assert 0 < float(told["hit_share"] or 0) < 1
    shutil.rmtree(job.saved_model)
    assert train_local(job).resumed_from_step == 40
    assert_same_weights(job, undisturbed[0])


def assert_reported(job: Job, report: Report) -> None:
    """The saved model's answers have the metrics that were reported."""
    from sklearn.metrics import log_loss, roc_auc_score

    dataset = job.ws.home / job.features.output("dataset").name
    assert job.features.dataset_schema is not None
    table = read_padded(sorted((dataset / "valid").glob("*.parquet")), job.features.dataset_schema)
    columns = {name: table[name].to_numpy() for name in table.columns}
    p = load_predictor(job.saved_model).predict(columns)
    assert roc_auc_score(columns["click"], p) == pytest.approx(report.metrics["auc"], abs=1e-6)
    assert log_loss(columns["click"], p.astype(float)) == pytest.approx(report.metrics["log_loss"], abs=1e-6)


def test_reported_metrics_are_the_saved_models(undisturbed: tuple[Job, Report]) -> None:
    job, report = undisturbed
    assert_reported(job, report)
    meta = json.loads((job.saved_model / "model.json").read_text())
    assert (meta["pipeline"], meta["ds"], meta["key"]) == ("clicks", "2026-01-10", "undisturbed")
    assert meta["metrics"]["auc"] == report.metrics["auc"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_take_the_same_steps(
    home: Workspace, features: Manifest, undisturbed: tuple[Job, Report], ranks: int
) -> None:
    job = job_of(home, features, f"ranks-{ranks}")
    reports = run_ranks(ranks, lambda collective: train(job, collective))
    expected = [p["loss"] for p in undisturbed[1].curve]
    for report in reports:
        found = [p["loss"] for p in report.curve]
        # Sums in another order differ in the last bits, and training magnifies that.
        np.testing.assert_allclose(found[:10], expected[:10], rtol=1e-5)
        np.testing.assert_allclose(found, expected, rtol=2e-4)
        assert report.metrics["auc"] == pytest.approx(undisturbed[1].metrics["auc"], abs=2e-3)
    for name, value in weights(undisturbed[0]).items():
        np.testing.assert_allclose(weights(job)[name], value, atol=2e-3, err_msg=name)


def test_a_plan_by_the_cost_model_takes_the_same_steps(
    home: Workspace, features: Manifest, undisturbed: tuple[Job, Report]
) -> None:
    settings = Sharding(kind="auto")
    job = job_of(home, features, "auto", TRAIN.model_copy(update={"sharding": settings}))
    expected = [p["loss"] for p in undisturbed[1].curve]
    for report in run_ranks(2, lambda collective: train(job, collective)):
        np.testing.assert_allclose([p["loss"] for p in report.curve], expected, rtol=2e-4)


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
    home: Workspace, features: Manifest, undisturbed: tuple[Job, Report], tmp_path: Path, moment: str, resumed: int
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
    home: Workspace, features: Manifest, undisturbed: tuple[Job, Report], part: str, caplog: pytest.LogCaptureFixture
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
    home: Workspace, features: Manifest, undisturbed: tuple[Job, Report]
) -> None:
    """One checkpoint is kept: the newest whole one, not a damaged one of a later step."""
    job = job_of(home, features, "damaged-newer", TRAIN.model_copy(update={"keep": 1, "max_steps": 35}))
    shutil.copytree(undisturbed[0].checkpoints, job.checkpoints)
    shutil.rmtree(job.checkpoints / "step-00000035")
    damaged = (job.checkpoints / "step-00000040" / "checkpoint.json").local_path()
    damaged.write_text(damaged.read_text()[:-2])
    with pytest.raises(_Stopped):
        train_local(job, _stop_at(12))
    assert list_steps(job.checkpoints) == [10]
    assert train_local(job).resumed_from_step == 10


def test_without_any_whole_checkpoint_it_starts_anew(
    home: Workspace, features: Manifest, undisturbed: tuple[Job, Report]
) -> None:
    job = job_of(home, features, "all-damaged")
    shutil.copytree(undisturbed[0].checkpoints, job.checkpoints)
    for path in job.checkpoints.local_path().glob("step-*/dense.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    report = train_local(job)
    assert report.resumed_from_step == 0
    assert_same_weights(job, undisturbed[0])


class _Stopped(Exception):
    pass


def _stop_at(step: int) -> Callable[[ProgressEvent], None]:
    def say(tick: ProgressEvent) -> None:
        if tick.step == step:
            raise _Stopped

    return say


def test_a_run_goes_on_with_another_number_of_ranks(
    home: Workspace, features: Manifest, undisturbed: tuple[Job, Report]
) -> None:
    job = job_of(home, features, "other-world")
    with pytest.raises(_Stopped):
        run_ranks(4, lambda collective: train(job, collective, _stop_at(23)))
    report = run_ranks(2, lambda collective: train(job, collective))[0]
    assert report.resumed_from_step == 20
    np.testing.assert_allclose([p["loss"] for p in report.curve], [p["loss"] for p in undisturbed[1].curve], rtol=2e-4)


def test_checkpoints_of_another_configuration_are_refused(
    home: Workspace, features: Manifest, undisturbed: tuple[Job, Report]
) -> None:
    faster = TRAIN.model_copy(update={"dense": Optimizer(kind="adam", learning_rate=0.5)})
    job = job_of(home, features, "other-config", faster)
    shutil.copytree(undisturbed[0].checkpoints, job.checkpoints)
    with pytest.raises(UserError, match="written with another model, training or dataset"):
        train_local(job)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_each_optimizer_resumes_exactly(home: Workspace, features: Manifest, kind: Any) -> None:
    optimizer = Optimizer(kind=kind, learning_rate=0.01, weight_decay=0.001)
    conf = TRAIN.model_copy(update={"dense": optimizer, "embeddings": optimizer, "max_steps": 12})
    whole, stopped = job_of(home, features, f"whole-{kind}", conf), job_of(home, features, f"stopped-{kind}", conf)
    train_local(whole)
    with pytest.raises(_Stopped):
        train_local(stopped, _stop_at(8))
    assert train_local(stopped).resumed_from_step == 5
    assert_same_weights(whole, stopped)


def test_divergence_names_the_step_and_what_to_do(home: Workspace, features: Manifest) -> None:
    hot = TRAIN.model_copy(update={"dense": Optimizer(kind="sgd", learning_rate=1e30)})
    with pytest.raises(Diverged, match=r"at step [2-9]\. Lower .* train.dense.learning_rate .1e\+30."):
        train_local(job_of(home, features, "hot", hot))


def test_negatives_and_ranking(home: Workspace, features: Manifest) -> None:
    conf = TRAIN.model_copy(
        update={"negatives": Negatives(column="item", per_positive=2), "rank_group": "query", "rank_k": 3, "epochs": 1}
    )
    one = job_of(home, features, "negatives-1", conf)
    report = train_local(one)
    positives = (report.rows["train"] - 4_000) / 2
    assert 500 < positives < 3_000
    assert report.steps == report.rows["train"] // 200
    two = run_ranks(2, lambda collective: train(job_of(home, features, "negatives-2", conf), collective))[0]
    np.testing.assert_allclose([p["loss"] for p in two.curve], [p["loss"] for p in report.curve], rtol=2e-4)
    # Ranking again, from the saved model and the definition.

    dataset = home.home / features.output("dataset").name
    assert features.dataset_schema is not None
    table = read_padded(sorted((dataset / "rank").glob("*.parquet")), features.dataset_schema)
    table["p"] = load_predictor(one.saved_model).predict({c: table[c].to_numpy() for c in table.columns})
    places = [int((g["p"] > g.loc[g["click"] == 1, "p"].item()).sum()) for _, g in table.groupby("query")]
    assert report.rows["rank"] == 300
    assert report.metrics["hr_at_k"] == pytest.approx(np.mean([p < 3 for p in places]))
    assert report.metrics["ndcg_at_k"] == pytest.approx(np.mean([1 / np.log2(p + 2) if p < 3 else 0 for p in places]))


def first_of(embeddings: Any, table: str) -> int:
    """Where a table begins in the one matrix of one rank."""
    return next(first for block, _, first in embeddings.layout.fused_tables[0].local_blocks if block.table == table)


def test_warm_start_keeps_what_was_learned(
    home: Workspace, undisturbed: tuple[Job, Report], make_dataset: Callable[..., Manifest]
) -> None:
    tomorrow = make_dataset(home, train=2_000, valid=500, users=80, items=45, ds="2026-01-11", seed=1)
    conf = TRAIN.model_copy(update={"epochs": 1, "max_steps": 1})
    tiny = conf.model_copy(update={k: Optimizer(kind="sgd", learning_rate=1e-12) for k in ("dense", "embeddings")})
    cold = train_local(job_of(home, tomorrow, "cold", conf))
    job = job_of(home, tomorrow, "warm", tiny, warm_start=str(undisturbed[0].saved_model))
    warm = train_local(job)
    assert warm.warm_start == str(undisturbed[0].saved_model)
    assert warm.curve[0]["loss"] < cold.curve[0]["loss"] - 0.02
    # Row by row, after a step too small to see: old users as they were, new ones at their own start.
    old, new = load_dlrm(undisturbed[0].saved_model).embeddings, load_dlrm(job.saved_model).embeddings
    fresh = load_dlrm(local(job_of(home, tomorrow, "cold", conf).saved_model)).embeddings

    def rows(of: Any, n: int) -> torch.Tensor:
        return of.weight[first_of(of, "user") :][:n]

    torch.testing.assert_close(rows(new, 60), rows(old, 60), rtol=0, atol=1e-9)
    assert not torch.allclose(rows(old, 60), rows(fresh, 60), atol=1e-3)
    bound = float(rows(new, 80)[60:].abs().max())
    assert 0 < bound <= 0.05 + 1e-6
    # The run is continued, not started warm again.
    assert train_local(job).resumed_from_step == 1


def test_warm_start_keeps_a_share_of_adagrads_sums(
    home: Workspace, undisturbed: tuple[Job, Report], make_dataset: Callable[..., Manifest]
) -> None:
    tomorrow = make_dataset(home, train=2_000, valid=500, users=80, items=45, ds="2026-01-12", seed=1)
    still = Optimizer(kind="adagrad", learning_rate=1e-12)
    conf = TRAIN.model_copy(update={"max_steps": 1, "embeddings": still, "warm_decay": 0.25})
    job = job_of(home, tomorrow, "decayed", conf, warm_start=str(undisturbed[0].saved_model))
    train_local(job)

    def sums(folder: Path) -> torch.Tensor:
        card = read_card(local(folder))
        model = DLRM(card.dataset_schema, card.model, LocalCollective(), card.seed)
        model.embeddings.configure_optimizer(still)
        restore(model, folder, with_optimizer=True)
        return model.embeddings.state["sum"][first_of(model.embeddings, "user") :][:60]

    before, after = sums(undisturbed[0].saved_model), sums(job.saved_model)
    grown = (after - 0.25 * before).numpy()
    assert grown.min() >= -1e-7
    # A step of 200 rows leaves some users out: theirs is the share alone.
    untouched = np.abs(grown).max(axis=1) < 1e-9
    assert 0 < untouched.sum() < 60
    assert float(before[torch.from_numpy(untouched)].max()) > 0


def test_it_stops_when_valid_gets_worse_and_takes_the_best_epoch(home: Workspace, features: Manifest) -> None:
    # Steps so large that it learns the training rows by heart.
    hasty = TRAIN.model_copy(update={"embeddings": EmbeddingOptimizer(kind="adagrad", learning_rate=0.5), "epochs": 12})
    job = job_of(home, features, "hasty", hasty)
    report = train_local(job)
    losses = [e["log_loss"] for e in report.evals]
    best = int(np.argmin(losses))
    assert best < 10
    assert len(losses) == best + 2
    assert (report.best_step, report.steps) == (20 * (best + 1), 20 * (best + 2))
    assert report.metrics["log_loss"] == losses[best]
    # The same weights as a run that ends there.
    plain = job_of(home, features, "plain", hasty.model_copy(update={"epochs": best + 1, "patience": None}))
    assert train_local(plain).best_step == report.best_step
    assert_same_weights(job, plain)
    # A run that was killed between its last step and its end.
    shutil.rmtree(job.saved_model)
    again = train_local(job)
    assert (again.resumed_from_step, again.best_step, again.metrics) == (report.steps, report.best_step, report.metrics)
    assert_same_weights(job, plain)
    patient = job_of(home, features, "patient", hasty.model_copy(update={"patience": 2}))
    assert len(train_local(patient).evals) == best + 3


def test_a_damaged_best_checkpoint_is_named(home: Workspace, features: Manifest) -> None:
    hasty = TRAIN.model_copy(update={"embeddings": EmbeddingOptimizer(kind="adagrad", learning_rate=0.5), "epochs": 12})
    job = job_of(home, features, "torn", hasty)
    report = train_local(job)
    shutil.rmtree(job.saved_model)
    torn = (job.checkpoints / f"step-{report.best_step:08d}" / "dense.safetensors").local_path()
    torn.write_bytes(torn.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"step-{report.best_step:08d}"):
        train_local(job)


def test_checkpoints_in_the_background_change_nothing(
    home: Workspace, features: Manifest, undisturbed: tuple[Job, Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    background = TRAIN.model_copy(update={"background_checkpoints": True})
    job = job_of(home, features, "background", background)
    # The writers wait until training has gone on for a step: what they write must be what was then.
    gone_on = threading.Event()
    threads = []
    real = checkpoint.save_tensors

    def late(path: Path, tensors: Any) -> Any:
        threads.append(threading.current_thread().name)
        assert gone_on.wait(60)
        return real(path, tensors)

    def say(tick: ProgressEvent) -> None:
        (gone_on.set if tick.step % 5 == 1 or tick.step == 40 else gone_on.clear)()
        if tick.step == 28:
            assert list_steps(job.checkpoints) == [25, 20]
            raise _Stopped

    monkeypatch.setattr(checkpoint, "save_tensors", late)
    with pytest.raises(_Stopped):
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
        raise _Stopped

    monkeypatch.setattr(os, "_exit", leave)
    job = job_of(home, features, "superseded", token="old")
    job.folder.local_path().mkdir(parents=True)
    job.fence.local_path().write_text("old")
    with pytest.raises(_Stopped):
        train_local(job, _stop_at(8))
    job.fence.local_path().write_text("new")
    with pytest.raises(_Stopped):
        train_local(job)
    assert list_steps(job.checkpoints) == [5]
    assert not job.saved_model.exists()


def test_a_rank_leaves_its_complaint(home: Workspace, features: Manifest) -> None:
    """The rank's whole body, as a Horovod job of one process."""
    hot = TRAIN.model_copy(update={"dense": Optimizer(kind="sgd", learning_rate=1e30)})
    job = job_of(home, features, "complaint", hot)
    job.folder.local_path().mkdir(parents=True)
    code = "import sys; from headrace.train.launch.worker import rank_main; rank_main(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, job.model_dump_json()], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "training diverged" in json.loads(job.error_file.read_text())["message"]
    assert '"phase": "train"' in job.progress_file.read_text()


def test_evaluation_does_not_depend_on_ranks(
    home: Workspace, features: Manifest, undisturbed: tuple[Job, Report]
) -> None:
    from headrace.dataset.parquet.layout import split_of
    from headrace.train.evaluation.predict import predict_split

    layout, schema = split_of(features, home, "valid")

    def ask(collective: Any) -> np.ndarray:
        model = load_dlrm(undisturbed[0].saved_model, collective)
        model.eval()
        found = predict_split(model, layout, schema, collective, batch_size=64, streams=16, group=None)
        return np.sort(found.logits)

    alone = ask(LocalCollective())
    assert len(alone) == 1_000
    for ranks in (2, 4):
        for logits in run_ranks(ranks, ask):
            np.testing.assert_allclose(logits, alone, atol=1e-6)
