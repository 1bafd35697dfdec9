"""Steps of training and learning rates, beside torch's own."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from headrace.comm.base import LocalCollective, run_ranks
from headrace.config import EmbeddingOptimizer, Optimizer, Schedule, Train, build_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models import objective as losses
from headrace.models.saved import load_model
from headrace.stage.manifest import Manifest
from headrace.storage import local
from headrace.train.callbacks.metrics_log import MetricsFile, lines_before, read_metrics
from headrace.train.callbacks.progress import LoopProgress, ProgressEvent
from headrace.train.callbacks.tracing import PARTS
from headrace.train.callbacks.watchdog import Watchdog
from headrace.train.checkpoint.read import list_steps
from headrace.train.job import Diverged, Job, Stopped, TrainingReport
from headrace.train.launch import horovod_spark as launching
from headrace.train.loop.run import train, train_local
from headrace.train.optim import CURVES, schedule_factor
from tests.train_support import job_of

COSINE = Schedule(kind="cosine", warmup_steps=5, final=0.1)
TRAIN = Train(
    batch_size=200,
    streams=4,
    epochs=2,
    seed=3,
    checkpoint_steps=5,
    keep=2,
    patience=None,
    dense=Optimizer(kind="adam", learning_rate=0.01, schedule=COSINE),
    embeddings=EmbeddingOptimizer(kind="adagrad", learning_rate=0.1, schedule=Schedule(kind="step", every_steps=10)),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("steps"))


@pytest.fixture(scope="module")
def features(home: Workspace, make_dataset: Callable[..., Manifest]) -> Manifest:
    return make_dataset(home, train=4_000, valid=1_000)  # 20 steps an epoch, 40 in all


@pytest.fixture(scope="module")
def make_job(home: Workspace, features: Manifest) -> Callable[..., Job]:
    def make(key: str, train: Train = TRAIN, **more: Any) -> Job:
        return job_of(home, features, key, train, **more)

    return make


@pytest.fixture(scope="module")
def undisturbed(make_job: Callable[..., Job]) -> tuple[Job, TrainingReport]:
    torch.set_num_threads(1)
    job = make_job("undisturbed")
    return job, train_local(job)


def weights(job: Job) -> dict[str, np.ndarray]:
    model = load_model(job.saved_model)
    return {k: v.numpy() for k, v in model.dense_state().items()} | {"embeddings": model.embeddings.weight.numpy()}


def assert_same(a: Job, b: Job) -> None:
    for name, value in weights(a).items():
        np.testing.assert_array_equal(value, weights(b)[name], err_msg=name)


def journal_of(job: Job, *kinds: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(job.metrics_file) if not kinds or line["kind"] in kinds]


def test_the_journal_has_rates_losses_and_evaluations(undisturbed: tuple[Job, TrainingReport]) -> None:
    job, report = undisturbed
    lines = journal_of(job, "train")
    assert [(f["step"], f["loss"]) for f in lines] == [(p["step"], p["loss"]) for p in report.curve]
    assert [f["dense_rate"] for f in lines] == pytest.approx(
        [0.01 * schedule_factor(COSINE, step, 40) for step in range(1, 41)]
    )
    assert [f["embeddings_rate"] for f in lines] == pytest.approx([0.1] * 10 + [0.01] * 10 + [1e-3] * 10 + [1e-4] * 10)
    assert [f["auc"] for f in journal_of(job, "eval")] == [e["auc"] for e in report.evals]


def test_each_evaluation_is_reported_once(make_job: Callable[..., Job]) -> None:
    events: list[ProgressEvent] = []
    report = train_local(make_job("events", TRAIN.model_copy(update={"eval_steps": 15})), events.append)
    evaluated = [e for e in events if e.phase == "evaluated"]
    assert [e.step for e in evaluated] == [e["step"] for e in report.evals] == [15, 20, 30, 40]
    assert [(e.metrics or {})["auc"] for e in evaluated] == [e["auc"] for e in report.evals]


def test_small_rates_change_little(make_job: Callable[..., Job]) -> None:
    """The rates of the schedule are those that are used: with a warm-up that does not end, nothing moves."""
    still = Schedule(warmup_steps=10**9)
    slow = TRAIN.model_copy(
        update={
            "dense": TRAIN.dense.model_copy(update={"schedule": still}),
            "max_steps": 20,
            "embeddings": TRAIN.embeddings.model_copy(update={"schedule": still}),
        }
    )
    losses = [p["loss"] for p in train_local(make_job("still", slow)).curve]
    free = [p["loss"] for p in train_local(make_job("moving", TRAIN.model_copy(update={"max_steps": 20}))).curve]
    assert np.ptp(losses) < 0.3
    assert np.mean(free[-5:]) < np.mean(losses[-5:]) - 0.02


@pytest.mark.parametrize("parts", [3, 4])
def test_a_step_in_parts_is_the_same_step(
    make_job: Callable[..., Job], undisturbed: tuple[Job, TrainingReport], parts: int
) -> None:
    job = make_job(f"parts-{parts}", TRAIN.model_copy(update={"accumulate": parts}))
    report = run_ranks(2, lambda collective: train(job, collective))[0]
    expected = undisturbed[1]
    np.testing.assert_allclose([p["loss"] for p in report.curve], [p["loss"] for p in expected.curve], rtol=2e-4)
    assert report.metrics["auc"] == pytest.approx(expected.metrics["auc"], abs=2e-3)


def test_evaluations_every_n_steps_are_of_all_rows_and_decide_when_to_stop(
    make_job: Callable[..., Job], undisturbed: tuple[Job, TrainingReport]
) -> None:
    often = make_job("often", TRAIN.model_copy(update={"eval_steps": 8}))
    report = train_local(often)
    assert [e["step"] for e in report.evals] == [8, 16, 20, 24, 32, 40]
    assert_same(often, undisturbed[0])  # looking changes nothing
    assert report.evals[2]["auc"] == undisturbed[1].evals[0]["auc"]
    two = run_ranks(2, lambda c: train(make_job("often-2", TRAIN.model_copy(update={"eval_steps": 8})), c))
    assert [e["auc"] for e in two[0].evals] == pytest.approx([e["auc"] for e in report.evals], abs=2e-3)
    assert two[0].evals == two[1].evals
    # So hot that it gets worse: the model is that of the best evaluation, which was not an epoch's end.
    hot = Train.model_validate(
        {
            **TRAIN.model_dump(),
            "eval_steps": 3,
            "patience": 2,
            "epochs": 6,
            "embeddings": {"kind": "adagrad", "learning_rate": 0.8},
            "dense": {"kind": "adam", "learning_rate": 0.1},
        }
    )
    stopped = train_local(make_job("hot", hot))
    losses = [e["log_loss"] for e in stopped.evals]
    assert stopped.steps < 120
    assert stopped.best_step == stopped.evals[int(np.argmin(losses))]["step"]
    assert len(losses) - 1 - int(np.argmin(losses)) == 2
    assert stopped.metrics["log_loss"] == min(losses)


@pytest.mark.parametrize("asked_rank", [0, 1])
def test_a_stop_asked_of_one_rank_stops_all_after_the_same_step(
    make_job: Callable[..., Job], asked_rank: int, tmp_path: Path
) -> None:
    unstopped, job = make_job(f"unstopped-{asked_rank}"), make_job(f"stopped-{asked_rank}")
    run_ranks(2, lambda collective: train(unstopped, collective))
    watches = [Watchdog(), Watchdog()]

    def say(tick: ProgressEvent) -> None:
        if tick.step == 13:
            watches[asked_rank].stop_requested = True

    stopped: list[int] = []

    def rank(collective: Any) -> None:
        with pytest.raises(Stopped) as e:
            train(job, collective, say, watches[collective.world.rank])
        stopped.append(e.value.step)

    run_ranks(2, rank)
    assert len(stopped) == 2
    assert stopped[0] == stopped[1] in (13, 14)
    assert list_steps(job.checkpoints)[0] == stopped[0]
    assert not job.saved_model.exists()
    reports = run_ranks(2, lambda collective: train(job, collective))
    assert reports[0].resumed_from_step == stopped[0]
    assert_same(job, unstopped)
    assert [x["step"] for x in read_metrics(job.metrics_file)] == [
        x["step"] for x in read_metrics(unstopped.metrics_file)
    ]


def test_a_loss_that_is_nan_once_costs_the_steps_since_the_checkpoint(
    make_job: Callable[..., Job], undisturbed: tuple[Job, TrainingReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("nan")
    real, calls = losses.binary_cross_entropy, []

    def once(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return real(*args, **kwargs) * (float("nan") if len(calls) == 13 else 1.0)

    monkeypatch.setattr(losses, "binary_cross_entropy", once)
    tries: list[TrainingReport] = []

    def try_it(job: Job, *args: Any) -> TrainingReport:
        tries.append(train_local(job))
        return tries[-1]

    # The launch's own loop, over this process instead of Horovod's.
    monkeypatch.setattr(launching, "_launch", try_it)
    monkeypatch.setattr(launching, "_check_cores", lambda *args: None)
    report = launching.launch(job, None, ranks=1, retries=1)  # type: ignore[arg-type]
    assert report.resumed_from_step == 10
    assert_same(job, undisturbed[0])
    # One that comes again at the same step is the data's or the settings', and is told.
    monkeypatch.setattr(losses, "binary_cross_entropy", lambda *a, **k: real(*a, **k) * float("nan"))
    with pytest.raises(Diverged, match="the loss is nan at step 1"):
        launching.launch(make_job("always-nan"), None, ranks=1, retries=5)  # type: ignore[arg-type]


FULL = """
import resource, sys
from pathlib import Path
import torch
from headrace.train.job import Job
from headrace.train.loop.run import train_local
job = Job.model_validate_json(Path(sys.argv[1]).read_text())
torch.set_num_threads(1)
def say(tick):
    if tick.step == 12:  # from here on no file may grow: the system's own error, as of a full disk
        limit = job.metrics_file.local_path().stat().st_size + 1024
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
train_local(job, say)
"""


def test_a_disk_that_is_full_ends_the_try_and_the_next_goes_on(
    make_job: Callable[..., Job], undisturbed: tuple[Job, TrainingReport], tmp_path: Path
) -> None:
    job = make_job("full")
    (tmp_path / "job.json").write_text(job.model_dump_json())
    command = [sys.executable, "-c", FULL, str(tmp_path / "job.json")]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert "checkpoint of step 15 could not be written" in process.stderr
    assert "File too large" in process.stderr
    assert list_steps(job.checkpoints) == [10, 5]
    assert train_local(job).resumed_from_step == 10
    assert_same(job, undisturbed[0])
    assert not list(job.checkpoints.local_path().glob(".*"))


def test_the_profiles_parts_add_up_to_the_step_and_the_trace_holds_them(
    make_job: Callable[..., Job], undisturbed: tuple[Job, TrainingReport]
) -> None:
    job = make_job("profile", TRAIN.model_copy(update={"profile": True}))
    report = train(job, LocalCollective())
    assert_same(job, undisturbed[0])  # measuring changes nothing
    parts = {k: v for k, v in report.profile.items() if k != "step"}
    assert tuple(parts) == PARTS
    assert sum(parts.values()) == pytest.approx(report.profile["step"], abs=0.01)
    assert all(ms > 0 for ms in parts.values())
    events = json.loads(job.trace.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    step_spans = [e for e in spans if e["name"] == "step"]
    assert len(step_spans) == 20
    for step in step_spans:
        inside = [e for e in spans if e["args"]["step"] == step["args"]["step"] and e["tid"] == step["tid"]]
        names = [e["name"] for e in inside]
        assert names.count("dense forward") == names.count("dense backward") == names.count("optimizer") == 1
        # The next batch's ids, this one's rows, the next one's, this one's gradients.
        assert names.count("lookup") == 4
        assert all(e["ts"] >= step["ts"] - 1 and e["ts"] + e["dur"] <= step["ts"] + step["dur"] + 1 for e in inside)
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} >= {"rank 0", "loop", "stream 0"}
    assert any(e["name"] == "decode" for e in spans)


def test_a_journal_has_the_lines_that_lead_to_the_checkpoint(tmp_path: Path) -> None:
    first, second = local(tmp_path / "metrics-a.jsonl"), local(tmp_path / "metrics-b.jsonl")
    for path, loss in ((first, 0.5), (second, 0.25)):
        journal = MetricsFile(path)
        for step in range(1, 5):
            # Both have measured steps 2 to 4: the first was overtaken after the checkpoint of step 1.
            journal.write("train", {"step": step, "epoch": 1, "loss": 0.5 if step == 1 else loss, "rate": 0.1})
            journal.write("eval", {"step": step, "epoch": 1, "auc": None, "log_loss": loss})
        path.append(b'{"kind": "train", "st')  # killed while it wrote
    at_3 = LoopProgress(
        step=3,
        curve=[{"step": s, "epoch": 1, "loss": loss} for s, loss in ((1, 0.5), (2, 0.25), (3, 0.125))],
        evals=[{"step": 2, "epoch": 1, "auc": None}],
    )
    # As a checkpoint has it, where each number may be one with a fraction.
    lines = lines_before(LoopProgress.model_validate_json(at_3.model_dump_json()), [first, second])
    assert [(x["kind"], x["step"], x.get("loss"), x.get("rate")) for x in lines] == [
        ("train", 1, 0.5, 0.1),
        ("train", 2, 0.25, 0.1),
        ("eval", 2, None, None),
        ("train", 3, 0.125, None),  # in no file: what the checkpoint remembers
    ]
    assert lines_before(LoopProgress(), [first, second]) == []


def test_launches_at_the_same_time_have_a_journal_each(
    make_job: Callable[..., Job], undisturbed: tuple[Job, TrainingReport]
) -> None:
    """The first is overtaken, and writes on."""
    first, second = make_job("overtaken", token="a"), make_job("overtaken", token="b")
    first.fence.put_text("a")
    watch = Watchdog()

    def say(tick: ProgressEvent) -> None:
        watch.stop_requested = tick.step == 13

    with pytest.raises(Stopped):
        train(first, LocalCollective(), say, watch)
    assert not first.metrics_file.exists()
    second.fence.put_text("b")
    left = MetricsFile(first.launch_metrics_file, read_metrics(first.launch_metrics_file))

    def meanwhile(tick: ProgressEvent) -> None:
        left.write("train", {"step": tick.step, "epoch": 9, "loss": 9.0})

    train_local(second, meanwhile)

    def journal_lines(job: Job) -> list[dict[str, Any]]:
        return [{k: v for k, v in x.items() if "second" not in k and k != "samples_per_s"} for x in journal_of(job)]

    assert journal_lines(second) == journal_lines(undisturbed[0])
    assert [f.name for f in second.earlier_metrics_files()] == ["metrics-a.jsonl", "metrics-b.jsonl", "metrics.jsonl"]


BASE = 0.4


def torchs(make: object, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    scheduler = make(optimizer)  # type: ignore[operator]
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the order of calls is of no matter without gradients
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
    return rates


def rates_of(schedule: Schedule, total: int) -> list[float]:
    return [BASE * schedule_factor(schedule, step, total) for step in range(1, total + 1)]


def test_curves_are_torchs() -> None:
    total = 50
    expected = torchs(lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=total - 1, eta_min=0.1 * BASE), total)
    assert rates_of(Schedule(kind="cosine", final=0.1), total) == pytest.approx(expected)
    expected = torchs(lambda o: lr_scheduler.LinearLR(o, 1.0, 0.2, total_iters=total - 1), total)
    assert rates_of(Schedule(kind="linear", final=0.2), total) == pytest.approx(expected)
    expected = torchs(lambda o: lr_scheduler.StepLR(o, step_size=7, gamma=0.5), total)
    assert rates_of(Schedule(kind="step", every_steps=7, factor=0.5), total) == pytest.approx(expected)


def test_a_warm_up_comes_before_the_curve() -> None:
    warmed = rates_of(Schedule(kind="cosine", warmup_steps=10), 50)
    assert warmed[:10] == pytest.approx([BASE * (i + 1) / 10 for i in range(10)])
    assert warmed[10:] == pytest.approx(rates_of(Schedule(kind="cosine"), 40))


@given(st.sampled_from(sorted(CURVES)), st.integers(1, 300), st.integers(0, 400), st.floats(0, 1), st.integers(1, 50))
def test_rates_stay_within_bounds(kind: str, total: int, warmup: int, final: float, every_steps: int) -> None:
    schedule = Schedule.model_validate(
        {"kind": kind, "warmup_steps": warmup, "final": final, "every_steps": every_steps if kind == "step" else None}
    )
    shares = [schedule_factor(schedule, step, total) for step in range(1, total + 1)]
    assert all(0 <= s <= 1 + 1e-12 for s in shares)
    assert all(a >= b - 1e-12 for a, b in zip(shares[warmup:], shares[warmup + 1 :], strict=False))
    if kind in ("linear", "cosine") and total - warmup > 1:
        assert shares[-1] == pytest.approx(final)


def test_a_step_schedule_without_a_length_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.dense.schedule: `every_steps` is needed with `kind: step`"):
        build_spec(
            {
                "pipeline": "x",
                "source": {"format": "clicks", "path": "x"},
                "table": {"columns": [{"name": "y", "type": "int"}]},
                "features": {"label": "y", "workflow": [], "split": {"by": "position"}},
                "train": {"dense": {"schedule": {"kind": "step"}}},
            }
        )
