"""The loop in one process: any number of ranks, warm starts, early stops, and what it says to the user."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.comm.base import LocalCollective, run_ranks
from headrace.config import EmbeddingOptimizer, Negatives, Optimizer, Sharding, TableSharding
from headrace.config.schema import Kind
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models.predictor import load_predictor
from headrace.models.saved import load_model, read_card, restore
from headrace.models.sharded_model import ShardedModel
from headrace.stage.manifest import Manifest
from headrace.storage import local
from headrace.train.checkpoint.read import list_steps
from headrace.train.job import Diverged, Job, TrainingReport
from headrace.train.loop.run import train, train_local
from headrace.train.setup import state as setup
from tests.train_support import TRAIN, assert_same_weights, first_of, job_of, read_padded, weights


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


def test_it_learns(undisturbed: tuple[Job, TrainingReport], features: Manifest) -> None:
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
    assert report.core_seconds["rank0"] > 0


def test_half_precision_of_the_dense_part_learns_as_much(
    home: Workspace, features: Manifest, undisturbed: tuple[Job, TrainingReport]
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
    home: Workspace, features: Manifest, undisturbed: tuple[Job, TrainingReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU stands for the GPU: most rows are elsewhere, through evaluations, checkpoints and a resume."""
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
    for cache_figures in report.cached.values():
        assert cache_figures["share"] == 0.3
        assert 0 < float(cache_figures["hit_share"] or 0) < 1
    shutil.rmtree(job.saved_model)
    assert train_local(job).resumed_from_step == 40
    assert_same_weights(job, undisturbed[0])


def assert_reported(job: Job, report: TrainingReport) -> None:
    """The saved model's answers have the metrics that were reported."""
    from sklearn.metrics import log_loss, roc_auc_score

    dataset = job.ws.home / job.features.output("dataset").name
    assert job.features.dataset_schema is not None
    table = read_padded(sorted((dataset / "valid").glob("*.parquet")), job.features.dataset_schema)
    columns = {name: table[name].to_numpy() for name in table.columns}
    p = load_predictor(job.saved_model).predict(columns)
    assert roc_auc_score(columns["click"], p) == pytest.approx(report.metrics["auc"], abs=1e-6)
    assert log_loss(columns["click"], p.astype(float)) == pytest.approx(report.metrics["log_loss"], abs=1e-6)


def test_reported_metrics_are_the_saved_models(undisturbed: tuple[Job, TrainingReport]) -> None:
    job, report = undisturbed
    assert_reported(job, report)
    meta = json.loads((job.saved_model / "model.json").read_text())
    assert (meta["pipeline"], meta["ds"], meta["key"]) == ("clicks", "2026-01-10", "undisturbed")
    assert meta["metrics"]["auc"] == report.metrics["auc"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_take_the_same_steps(
    home: Workspace, features: Manifest, undisturbed: tuple[Job, TrainingReport], ranks: int
) -> None:
    job = job_of(home, features, f"ranks-{ranks}")
    reports = run_ranks(ranks, lambda collective: train(job, collective))
    expected = [p["loss"] for p in undisturbed[1].curve]
    for report in reports:
        losses = [p["loss"] for p in report.curve]
        # Sums in another order differ in the last bits, and training magnifies that.
        np.testing.assert_allclose(losses[:10], expected[:10], rtol=1e-5)
        np.testing.assert_allclose(losses, expected, rtol=2e-4)
        assert report.metrics["auc"] == pytest.approx(undisturbed[1].metrics["auc"], abs=2e-3)
    for name, value in weights(undisturbed[0]).items():
        np.testing.assert_allclose(weights(job)[name], value, atol=2e-3, err_msg=name)


def test_a_plan_by_the_cost_model_takes_the_same_steps(
    home: Workspace, features: Manifest, undisturbed: tuple[Job, TrainingReport]
) -> None:
    settings = Sharding(kind="auto")
    job = job_of(home, features, "auto", TRAIN.model_copy(update={"sharding": settings}))
    expected = [p["loss"] for p in undisturbed[1].curve]
    for report in run_ranks(2, lambda collective: train(job, collective)):
        np.testing.assert_allclose([p["loss"] for p in report.curve], expected, rtol=2e-4)


def test_divergence_names_the_step_and_what_to_do(home: Workspace, features: Manifest) -> None:
    hot = TRAIN.model_copy(update={"dense": Optimizer(kind="sgd", learning_rate=1e30)})
    with pytest.raises(Diverged, match=r"at step [2-9]\. Lower .* train.dense.learning_rate .1e\+30."):
        train_local(job_of(home, features, "hot", hot))


def test_negatives_and_ranking(home: Workspace, features: Manifest) -> None:
    conf = TRAIN.model_copy(
        update={"negatives": Negatives(column="item", per_positive=2), "rank_group": "query", "rank_k": 3, "epochs": 1}
    )
    one_rank_job = job_of(home, features, "negatives-1", conf)
    report = train_local(one_rank_job)
    positives = (report.rows["train"] - 4_000) / 2
    assert 500 < positives < 3_000
    assert report.steps == report.rows["train"] // 200
    two = run_ranks(2, lambda collective: train(job_of(home, features, "negatives-2", conf), collective))[0]
    np.testing.assert_allclose([p["loss"] for p in two.curve], [p["loss"] for p in report.curve], rtol=2e-4)
    # Ranking again, from the saved model and the definition.

    dataset = home.home / features.output("dataset").name
    assert features.dataset_schema is not None
    table = read_padded(sorted((dataset / "rank").glob("*.parquet")), features.dataset_schema)
    table["p"] = load_predictor(one_rank_job.saved_model).predict({c: table[c].to_numpy() for c in table.columns})
    places = [int((g["p"] > g.loc[g["click"] == 1, "p"].item()).sum()) for _, g in table.groupby("query")]
    assert report.rows["rank"] == 300
    assert report.metrics["hr_at_k"] == pytest.approx(np.mean([p < 3 for p in places]))
    assert report.metrics["ndcg_at_k"] == pytest.approx(np.mean([1 / np.log2(p + 2) if p < 3 else 0 for p in places]))


def test_warm_start_keeps_what_was_learned(
    home: Workspace, undisturbed: tuple[Job, TrainingReport], make_dataset: Callable[..., Manifest]
) -> None:
    tomorrow = make_dataset(home, train=2_000, valid=500, users=80, items=45, ds="2026-01-11", seed=1)
    conf = TRAIN.model_copy(update={"epochs": 1, "max_steps": 1})
    kinds = {"dense": Optimizer, "embeddings": EmbeddingOptimizer}
    tiny = conf.model_copy(update={k: optimizer(kind="sgd", learning_rate=1e-12) for k, optimizer in kinds.items()})
    cold = train_local(job_of(home, tomorrow, "cold", conf))
    job = job_of(home, tomorrow, "warm", tiny, warm_start=str(undisturbed[0].saved_model))
    warm = train_local(job)
    assert warm.warm_start == str(undisturbed[0].saved_model)
    assert warm.curve[0]["loss"] < cold.curve[0]["loss"] - 0.02
    # Row by row, after a step too small to see: old users as they were, new ones at their own start.
    old, new = load_model(undisturbed[0].saved_model).embeddings, load_model(job.saved_model).embeddings
    fresh = load_model(local(job_of(home, tomorrow, "cold", conf).saved_model)).embeddings

    def rows(embeddings: Any, n: int) -> torch.Tensor:
        return embeddings.weight[first_of(embeddings, "user") :][:n]

    torch.testing.assert_close(rows(new, 60), rows(old, 60), rtol=0, atol=1e-9)
    assert not torch.allclose(rows(old, 60), rows(fresh, 60), atol=1e-3)
    bound = float(rows(new, 80)[60:].abs().max())
    assert 0 < bound <= 0.05 + 1e-6
    # The run is continued, not started warm again.
    assert train_local(job).resumed_from_step == 1


def test_warm_start_keeps_a_share_of_adagrads_sums(
    home: Workspace, undisturbed: tuple[Job, TrainingReport], make_dataset: Callable[..., Manifest]
) -> None:
    tomorrow = make_dataset(home, train=2_000, valid=500, users=80, items=45, ds="2026-01-12", seed=1)
    still = EmbeddingOptimizer(kind="adagrad", learning_rate=1e-12)
    conf = TRAIN.model_copy(update={"max_steps": 1, "embeddings": still, "warm_decay": 0.25})
    job = job_of(home, tomorrow, "decayed", conf, warm_start=str(undisturbed[0].saved_model))
    train_local(job)

    def sums(folder: Path) -> torch.Tensor:
        card = read_card(local(folder))
        model = ShardedModel(card.dataset_schema, card.model, LocalCollective(), card.seed)
        model.embeddings.configure_optimizer(still)
        restore(model, folder, with_optimizer=True)
        return model.embeddings.state["sum"][first_of(model.embeddings, "user") :][:60]

    sums_before, sums_after = sums(undisturbed[0].saved_model), sums(job.saved_model)
    grown = (sums_after - 0.25 * sums_before).numpy()
    assert grown.min() >= -1e-7
    # A step of 200 rows leaves some users out: theirs is the share alone.
    untouched = np.abs(grown).max(axis=1) < 1e-9
    assert 0 < untouched.sum() < 60
    assert float(sums_before[torch.from_numpy(untouched)].max()) > 0


def test_it_stops_when_valid_gets_worse_and_takes_the_best_epoch(home: Workspace, features: Manifest) -> None:
    # Steps so large that it learns the training rows by heart.
    fast_learning = TRAIN.model_copy(
        update={"embeddings": EmbeddingOptimizer(kind="adagrad", learning_rate=0.5), "epochs": 12}
    )
    job = job_of(home, features, "hasty", fast_learning)
    report = train_local(job)
    losses = [e["log_loss"] for e in report.evals]
    best = int(np.argmin(losses))
    assert best < 10
    assert len(losses) == best + 2
    assert (report.best_step, report.steps) == (20 * (best + 1), 20 * (best + 2))
    assert report.metrics["log_loss"] == losses[best]
    # The same weights as a run that ends there.
    plain = job_of(home, features, "plain", fast_learning.model_copy(update={"epochs": best + 1, "patience": None}))
    assert train_local(plain).best_step == report.best_step
    assert_same_weights(job, plain)
    # A run that was killed between its last step and its end.
    shutil.rmtree(job.saved_model)
    rerun = train_local(job)
    assert (rerun.resumed_from_step, rerun.best_step, rerun.metrics) == (report.steps, report.best_step, report.metrics)
    assert_same_weights(job, plain)
    patient = job_of(home, features, "patient", fast_learning.model_copy(update={"patience": 2}))
    assert len(train_local(patient).evals) == best + 3


def test_a_damaged_best_checkpoint_is_named(home: Workspace, features: Manifest) -> None:
    fast_learning = TRAIN.model_copy(
        update={"embeddings": EmbeddingOptimizer(kind="adagrad", learning_rate=0.5), "epochs": 12}
    )
    job = job_of(home, features, "torn", fast_learning)
    report = train_local(job)
    shutil.rmtree(job.saved_model)
    torn = (job.checkpoints / f"step-{report.best_step:08d}" / "dense.safetensors").local_path()
    torn.write_bytes(torn.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"step-{report.best_step:08d}"):
        train_local(job)


def test_a_rank_leaves_its_complaint(home: Workspace, features: Manifest) -> None:
    """The rank's whole body, as a Horovod job of one process."""
    hot = TRAIN.model_copy(update={"dense": Optimizer(kind="sgd", learning_rate=1e30)})
    job = job_of(home, features, "complaint", hot)
    job.folder.local_path().mkdir(parents=True)
    code = "import sys; from headrace.train.launch.worker import rank_main; rank_main(sys.argv[1])"
    completed = subprocess.run(
        [sys.executable, "-c", code, job.model_dump_json()], capture_output=True, text=True, check=False, env=os.environ
    )
    assert completed.returncode == 0, completed.stderr
    assert "Traceback" not in completed.stderr
    assert "training diverged" in json.loads(job.error_file.read_text())["message"]
    assert '"phase": "train"' in job.progress_file.read_text()


def test_evaluation_does_not_depend_on_ranks(
    home: Workspace, features: Manifest, undisturbed: tuple[Job, TrainingReport]
) -> None:
    from headrace.dataset.layout import split_of
    from headrace.train.evaluation.predict import predict_split

    layout, schema = split_of(features, home, "valid")

    def ask(collective: Any) -> np.ndarray:
        model = load_model(undisturbed[0].saved_model, collective)
        model.eval()
        return predict_split(model, layout, schema, collective, batch_size=64, streams=8).logits

    one_rank_scores = np.sort(ask(LocalCollective()))
    assert len(one_rank_scores) == 1_000
    for ranks in (2, 4):
        # Each keeps its own.
        parts = run_ranks(ranks, ask)
        assert max(len(part) for part in parts) < 1_000
        np.testing.assert_allclose(np.sort(np.concatenate(parts)), one_rank_scores, atol=1e-6)
