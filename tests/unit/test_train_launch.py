"""The launcher without a cluster: what it makes of the ranks' answers, of slots that are missing, of a full disk."""

from __future__ import annotations

import errno
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import horovod.runner.gloo_run
import pytest
from horovod.runner.common.util.timeout import TimeoutException
from horovod.spark.task.task_service import SparkTaskService
from pyspark.sql import SparkSession

from headrace.comm.base import LocalCollective
from headrace.config import Model, Train
from headrace.config.workspace import Workspace
from headrace.errors import EXIT_BUSY, EXIT_FAILURE, EXIT_INCOMPLETE, EXIT_USER_ERROR, UserError
from headrace.errors.stores import StoreAway, StoreError
from headrace.stage.manifest import Manifest
from headrace.storage import LeaseLost, Location
from headrace.storage.objects import copies
from headrace.train.checkpoint.write import CheckpointWriter
from headrace.train.job import (
    PHASES,
    DiskFull,
    Diverged,
    Job,
    RankError,
    RankResult,
    StoreFailed,
    StoreWasAway,
    TrainingReport,
    driver_phase_ends,
    end_phase,
    phase_seconds,
    show_startup,
)
from headrace.train.launch import horovod_spark as module
from headrace.train.launch import hosts, worker
from headrace.train.launch.horovod_spark import launch
from headrace.train.launch.hosts import count_from_start, count_slots, counting_from_start, watch_slots

SPARK: Any = SimpleNamespace(
    sparkContext=SimpleNamespace(master="local[4]", defaultParallelism=4, pythonExec=sys.executable)
)
REPORT = TrainingReport(
    rows={"train": 10, "valid": 2},
    steps=7,
    steps_per_epoch=7,
    resumed_from_step=0,
    warm_start=None,
    metrics={},
    curve=[],
    evals=[],
    best_step=7,
    calibration_bins=[],
    data_wait_seconds=0.0,
    peak_memory_mib={"rank0": 1.0},
)


@pytest.fixture
def job(ws: Workspace, make_dataset: Callable[..., Manifest]) -> Job:
    features = make_dataset(ws, train=400, valid=40)
    train = Train(batch_size=40, epochs=50, checkpoint_steps=5, seed=3)
    new_job = Job(
        home=ws.home, pipeline="clicks", ds="2026-01-10", key="k", features=features, model=Model(), train=train
    )
    new_job.folder.make_dir()
    return new_job


class Ranks:
    """Stands for horovod.spark.run: each launch gives the next of these, or raises it."""

    def __init__(self, job: Job, *scripts: Exception | list[RankResult]) -> None:
        self.job, self.scripts, self.launches = job, list(scripts), 0

    def __call__(self, *args: Any, **kwargs: Any) -> list[str]:
        self.launches += 1
        # What was half written when the ranks ended.
        assert list(self.job.checkpoints.local_path().glob(".*")) == []
        (self.job.checkpoints / ".step-00000005.shared.partial").local_path().mkdir(parents=True)
        (self.job.folder / ".model.shared.partial").local_path().mkdir(exist_ok=True)
        script = self.scripts.pop(0)
        if isinstance(script, Exception):
            raise script
        return [a.model_dump_json() for a in script]


@pytest.fixture
def run(job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[..., Ranks]:
    caplog.set_level(logging.INFO, "headrace")
    monkeypatch.setattr(module, "count_slots", lambda spark: 1)

    def make(*scripts: Exception | list[RankResult]) -> Ranks:
        ranks = Ranks(job, *scripts)
        monkeypatch.setattr("horovod.spark.run", ranks)
        return ranks

    return make


FULL = RankResult(error=RankError(rank=1, message="the checkpoint of step 5 could not be written", full_disk=True))
LOST = RankResult(lost="Horovod has been shut down")


def test_a_full_disk_is_tried_again_with_the_room_that_the_half_checkpoint_took(
    job: Job, run: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    ranks = run([LOST, FULL], [RankResult(report=REPORT, phase_ends={"ranks": time.time()}), RankResult(report=REPORT)])
    for name in ("metrics.jsonl", "metrics-of_a_launch.jsonl"):
        (job.folder / name).put_text("")
    report = launch(job, SPARK, ranks=2, retries=1)
    assert ranks.launches == 2
    assert [f.name for f in job.folder.entries() if f.name.startswith("metrics")] == ["metrics.jsonl"]
    assert "the checkpoint of step 5 could not be written; attempt 2 of 2 resumes from the start" in caplog.text
    assert report.startup_seconds.keys() == {"ranks", "total"}


def test_a_disk_that_stays_full_is_the_users_to_mend(job: Job, run: Callable[..., Ranks]) -> None:
    ranks = run([FULL, LOST], [FULL, LOST], [FULL, LOST])
    with pytest.raises(DiskFull, match="the checkpoint of step 5"):
        launch(job, SPARK, ranks=2, retries=2)
    assert ranks.launches == 3
    assert list(job.folder.local_path().rglob(".*.partial")) == []


def test_a_store_that_does_not_answer_is_asked_again(
    job: Job, run: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    """A store that never answers is no mistake of the user's: whoever runs the stage may try it again."""
    message = "the store does not answer as it should: store/part-0001.parquet: 503"
    failed = RankResult(error=RankError(rank=1, message=message, store_failed=True))
    ranks = run([LOST, failed], [failed, LOST])
    with pytest.raises(StoreFailed, match=r"store/part-0001\.parquet: 503") as raised:
        launch(job, SPARK, ranks=2, retries=1)
    assert ranks.launches == 2
    assert "part-0001.parquet: 503; attempt 2 of 2 resumes from the start" in caplog.text
    assert raised.value.exit_code == EXIT_FAILURE
    away = RankResult(error=RankError(rank=1, message="s3://b/x: away", store_failed=True, store_away=True))
    run([away, LOST])
    with pytest.raises(StoreFailed, match=r"^s3://b/x: away$") as raised:
        launch(job, SPARK, ranks=2, retries=0)
    assert raised.value.exit_code == EXIT_INCOMPLETE


def test_a_loss_that_is_no_number_twice_at_one_step_is_not_tried_a_third_time(
    job: Job, run: Callable[..., Ranks]
) -> None:
    def diverged_at(step: int) -> list[RankResult]:
        return [RankResult(error=RankError(rank=0, message="the loss is nan", diverged_at=step)), LOST]

    ranks = run(diverged_at(5), diverged_at(5), diverged_at(5))
    with pytest.raises(Diverged, match="the loss is nan"):
        launch(job, SPARK, ranks=2, retries=9)
    assert ranks.launches == 2
    # Elsewhere: not the same fault.
    ranks = run(diverged_at(5), diverged_at(6), [RankResult(report=REPORT), RankResult(report=REPORT)])
    assert launch(job, SPARK, ranks=2, retries=9).steps == 7
    assert ranks.launches == 3


def test_a_driver_that_lost_its_lease_lets_the_ranks_of_its_successor_be(job: Job, run: Callable[..., Ranks]) -> None:
    """The driver was paused: its ranks have ended, and a further attempt would end those of its successor."""
    launches = list[str]()

    def check_lease() -> None:
        launches.append(job.fence.read_text() if job.fence.is_file() else "")
        if len(launches) == 2:
            job.fence.put_text("the successor's")
            raise LeaseLost("taken")

    ranks = run([LOST, LOST], [RankResult(report=REPORT), RankResult(report=REPORT)])
    with pytest.raises(LeaseLost, match="taken"):
        launch(job, SPARK, ranks=2, retries=3, check_lease=check_lease)
    assert ranks.launches == 1
    assert job.fence.read_text() == "the successor's"


def test_what_a_user_did_wrong_is_not_tried_again(job: Job, run: Callable[..., Ranks]) -> None:
    ranks = run([LOST, RankResult(error=RankError(rank=1, message="part-0001.parquet is damaged"))])
    with pytest.raises(UserError, match=r"part-0001\.parquet is damaged"):
        launch(job, SPARK, ranks=2, retries=3)
    assert ranks.launches == 1


def test_a_rank_that_found_another_run_at_work_has_nothing_to_mend(job: Job, run: Callable[..., Ranks]) -> None:
    """A further attempt would end that one's ranks; whoever runs the stage may try it again later."""
    rank_error = worker._rank_error(0, LeaseLost("step-00000005: another run has removed what this one wrote there"))
    ranks = run([RankResult(error=rank_error), LOST])
    with pytest.raises(LeaseLost, match="step-00000005: another run has removed") as raised:
        launch(job, SPARK, ranks=2, retries=3)
    assert ranks.launches == 1
    assert raised.value.exit_code == EXIT_BUSY


def test_a_driver_that_was_overtaken_removes_nothing_that_the_other_launch_writes(
    job: Job, run: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    other_folder = (job.checkpoints / ".step-00000005.shared.partial").local_path()

    def overtaken(*args: Any, **kwargs: Any) -> list[str]:
        job.fence.put_text("another")
        other_folder.mkdir(parents=True)
        raise RuntimeError("Exit code: 1")

    monkeypatch.setattr("horovod.spark.run", overtaken)
    with pytest.raises(RuntimeError, match="Exit code: 1"):
        launch(job, SPARK, ranks=2, retries=0)
    assert other_folder.is_dir()


def test_ranks_that_all_lost_another_are_a_failure(job: Job, run: Callable[..., Ranks]) -> None:
    ranks = run([LOST, LOST], RuntimeError("Exit code: 137"))
    with pytest.raises(RuntimeError, match="Exit code: 137"):
        launch(job, SPARK, ranks=2, retries=1)
    assert ranks.launches == 2


def test_a_start_without_enough_slots_is_explained(job: Job, run: Callable[..., Ranks]) -> None:
    run(TimeoutException("Timed out waiting for Spark tasks to start."))
    with pytest.raises(
        UserError,
        match=r"train\.ranks is 2, but after 600 s \(train\.start_seconds\) Spark "
        r"\(local\[4\]\) has 1 task slots",
    ):
        launch(job, SPARK, ranks=2, retries=3)


def test_waiting_for_slots_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "headrace")
    monkeypatch.setattr(hosts, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(hosts, "_PATIENCE_SECONDS", 0.05)
    polls: list[int] = []

    def count() -> int:
        polls.append(1)
        return 2 if "waiting" not in caplog.text else 4

    with watch_slots(count, 4, 60, lambda: False) as slots:
        while slots.available < 4:
            time.sleep(0.01)
    assert "waiting for task slots: 2 of 4 after 0 s, at most 60 s (train.start_seconds)" in caplog.text
    assert "4 task slots are there after" in caplog.text
    slots.check("yarn")
    with watch_slots(lambda: 1, 4, 60, lambda: True) as slots:
        pass
    with pytest.raises(UserError, match=r"Spark \(yarn\) has 0 task slots"):
        slots.check("yarn")


def test_spark_counts_its_slots(spark: SparkSession) -> None:
    assert count_slots(spark) == 2


def test_the_parts_of_a_start_add_up() -> None:
    phase_ends = {"begin": 100.0, "jvm": 103.0, "driver": 105.5, "session": 114.0, "ranks": 120.0, "first_step": 131.25}
    parts = phase_seconds(phase_ends)
    assert parts == {"jvm": 3.0, "driver": 2.5, "session": 8.5, "ranks": 6.0, "first_step": 11.25, "total": 31.25}
    assert (
        show_startup(parts) == "first step after 31.2 s: jvm 3.0, driver 2.5, session 8.5, ranks 6.0, first step 11.2"
    )
    assert phase_seconds({"jvm": 1.0}) == {}
    ends = driver_phase_ends()
    assert "jvm" not in ends  # no spark-submit above a test
    assert time.time() - 86_400 < ends["begin"] <= time.time()
    end_phase(ends, "driver")
    first = ends["driver"]
    end_phase(ends, "driver")
    assert ends["driver"] == first
    assert next(iter(PHASES)) == "jvm"


RANK = """
import resource, sys
from pathlib import Path
from headrace.train.launch.worker import rank_main

resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # bytes of a file
print(rank_main(Path(sys.argv[1]).read_text()))
# Seconds of a start that nobody needs; all of them were imported once before the first step.
slow = {"torch._dynamo", "sympy", "triton", "torch.distributed.fsdp", "mlflow", "optuna"}
print(slow & sys.modules.keys(), file=sys.stderr)
"""


ASSIGNED = """
import os, sys
from pathlib import Path
from horovod.spark.task import task_info
from pyspark.resource import ResourceInformation
from headrace.train.launch.worker import rank_main

task_info.set_resources({"gpu": ResourceInformation("gpu", ["5", "6"])})  # as Horovod does for the rank's Spark task
rank_main(Path(sys.argv[1]).read_text())
print(os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"])
"""


def test_a_rank_computes_on_the_gpu_that_spark_assigned_to_its_task(job: Job, tmp_path: Path) -> None:
    job = job.model_copy(update={"train": job.train.model_copy(update={"device": "cuda"})})
    (tmp_path / "job.json").write_text(job.model_dump_json())
    environ = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    completed = subprocess.run(
        [sys.executable, "-c", ASSIGNED, str(tmp_path / "job.json")],
        capture_output=True,
        text=True,
        check=False,
        env=environ,
    )
    assert completed.stdout == "5 PCI_BUS_ID\n", completed.stderr


def test_a_stall_is_found_though_the_store_was_away(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([StoreError("503 Slow Down"), False, True])

    def has_stalled(folder: Location) -> bool:
        answer = next(answers)
        if isinstance(answer, StoreError):
            raise answer
        return answer

    monkeypatch.setattr(module, "has_stalled", has_stalled)
    monkeypatch.setattr(module, "_STALL_POLL_SECONDS", 0.01)
    with module._signals(job):
        assert horovod.runner.gloo_run.register_shutdown_event().wait(30)


def test_a_driver_whose_store_is_away_tries_again(
    job: Job, run: Callable[..., Ranks], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver asks the store itself between attempts: whether it has the lease, and what there is to resume from."""
    looks: list[str] = []

    def check_lease() -> None:
        looks.append("lease")
        if len(looks) == 2:
            raise StoreAway("s3://b/lease: the store is away")

    def away(folder: Location) -> list[int]:
        raise StoreAway("s3://b/checkpoints: the store is away")

    monkeypatch.setattr(module, "list_steps", away)
    trained = RankResult(report=REPORT, phase_ends={"ranks": time.time()})
    ranks = run([LOST, LOST], [trained, trained])
    report = launch(job, SPARK, ranks=2, retries=2, check_lease=check_lease)
    assert report.steps == REPORT.steps
    assert (ranks.launches, len(looks)) == (2, 3)
    assert "s3://b/lease: the store is away; attempt 3 of 3 resumes from the last checkpoint" in caplog.text
    looks[:] = ["lease"]
    with pytest.raises(StoreAway, match="s3://b/lease"):
        launch(job, SPARK, ranks=2, retries=0, check_lease=check_lease)


def test_what_cannot_be_removed_does_not_hide_why_the_ranks_failed(
    job: Job, run: Callable[..., Ranks], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(RuntimeError("Exit code: 137"))

    def away(folder: Location) -> None:
        raise StoreAway("s3://b/checkpoints: the store is away")

    monkeypatch.setattr(Location, "discard_unfinished", away)
    with pytest.raises(RuntimeError, match="Exit code: 137"):
        launch(job, SPARK, ranks=2, retries=0)
    assert "stays for now: s3://b/checkpoints: the store is away" in caplog.text


def test_ranks_are_asked_to_stop_though_the_store_is_away(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler of a signal, which runs within whatever the program is at, asks the store for nothing."""
    put, written, answers = Location.put_text, threading.Event(), iter([StoreAway("away"), None])

    def put_text(location: Location, text: str) -> None:
        if location == job.stop_file:
            assert threading.current_thread() is not threading.main_thread()
            if (answer := next(answers)) is not None:
                raise answer
        put(location, text)
        written.set()

    monkeypatch.setattr(Location, "put_text", put_text)
    monkeypatch.setattr(module, "_STALL_POLL_SECONDS", 0.01)
    job.ranks_folder.make_dir()
    with module._signals(job) as received:
        kill = horovod.runner.gloo_run.register_shutdown_event()
        os.kill(os.getpid(), signal.SIGTERM)
        assert written.wait(30)
        assert not kill.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert kill.wait(30)
        with pytest.raises(SystemExit):
            received.raise_again()
    assert job.stop_file.exists()


UNANSWERED = """
import sys
from pathlib import Path
import headrace.train.loop.run as loop
from headrace.errors import UserError
from headrace.errors.stores import ChangedInPlace, StoreAway, StoreError
from headrace.train.launch.worker import rank_main

def train(*args, **more):
    if sys.argv[2] == "fails":
        raise StoreError("store/part-0001.parquet: HTTP error: 503 Slow Down")
    if sys.argv[2] == "has another file":
        raise ChangedInPlace("s3://b/part-0001.parquet was changed in place")
    try:
        raise StoreAway("s3://b/part-0001.parquet: the store is away")
    except OSError as e:
        raise UserError("part-0001.parquet is damaged") from e

loop.train = train
print(rank_main(Path(sys.argv[1]).read_text()))
"""


def test_a_rank_whose_store_does_not_answer_names_the_object(job: Job, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(job.model_dump_json())
    line = [sys.executable, "-c", UNANSWERED, str(tmp_path / "job.json")]
    expected: dict[str, tuple[str, type[UserError], int]] = {
        "fails": (r"should: store/part-0001\.parquet: HTTP error: 503 Slow Down$", StoreFailed, EXIT_FAILURE),
        "is away": (r"^s3://b/part-0001\.parquet: the store is away$", StoreWasAway, EXIT_INCOMPLETE),
        "has another file": (r"^s3://b/part-0001\.parquet was changed in place\. Run", UserError, EXIT_USER_ERROR),
    }
    pipe = subprocess.PIPE
    ranks = {how: subprocess.Popen([*line, how], stdout=pipe, stderr=pipe, text=True) for how in expected}
    for how, (message, kind, code) in expected.items():
        out, err = ranks[how].communicate()
        assert ranks[how].returncode == 0, err
        answer = RankResult.model_validate_json(out.splitlines()[-1])
        assert answer.error is not None
        assert re.search(message, answer.error.message)
        raised = answer.error.exception()
        assert (type(raised), raised.exit_code) == (kind, code)


MOUNT_AWAY = """
import errno, sys
from pathlib import Path
from headrace.storage import Location
from headrace.train.launch.worker import rank_main

def make_dir(folder):
    raise OSError(errno.ESTALE, "Stale file handle", str(folder))

Location.make_dir = make_dir
print(rank_main(Path(sys.argv[1]).read_text()))
"""


def test_a_rank_whose_mount_is_away_names_the_file(job: Job, tmp_path: Path) -> None:
    """Already where it would write its first heartbeat."""
    job = job.model_copy(update={"token": "t"})
    (tmp_path / "job.json").write_text(job.model_dump_json())
    line = [sys.executable, "-c", MOUNT_AWAY, str(tmp_path / "job.json")]
    completed = subprocess.run(line, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    answer = RankResult.model_validate_json(completed.stdout.splitlines()[-1])
    assert answer.error is not None
    assert answer.error.message.startswith(f"{job.ranks_folder}: Stale file handle. Its file system is away.")
    assert answer.error.exception().exit_code == EXIT_INCOMPLETE


@pytest.mark.parametrize(
    ("number", "message", "is_retried", "code"),
    [
        (
            errno.ETIMEDOUT,
            "/mnt/a: Connection timed out. Its file system is away. Run this again",
            True,
            EXIT_INCOMPLETE,
        ),
        (errno.EIO, "/mnt/a: Input/output error. Its disk, or the server", True, EXIT_FAILURE),
        (errno.EACCES, "/mnt/a: Permission denied. The user of this process must", False, EXIT_USER_ERROR),
        (errno.EROFS, "/mnt/a: Read-only file system. Mount it for writing", False, EXIT_USER_ERROR),
    ],
)
def test_what_a_rank_says_of_a_file(number: int, message: str, is_retried: bool, code: int, job: Job) -> None:
    """Ranks give the errors of other stages; what a mount or a disk may recover from is attempted again."""
    error = OSError(number, os.strerror(number), "/mnt/a")
    rank_error = worker._file_error(3, error, job)
    assert rank_error is not None
    raised = rank_error.exception()
    assert str(raised).startswith(message)
    assert (rank_error.rank, isinstance(raised, StoreFailed), raised.exit_code) == (3, is_retried, code)
    # A write to a file of a checkpoint that is open: the error names none.
    writer = CheckpointWriter(job.checkpoints, LocalCollective(), config="", keep=1, check_fence=lambda: None)
    unwritten = writer._unwritten(OSError(number, os.strerror(number)), 5, job.folder)
    rank_error = worker._file_error(3, unwritten, job)
    assert rank_error is not None
    assert rank_error.message.startswith(f"{job.folder}: {os.strerror(number)}. ")
    assert rank_error.exception().exit_code == code


def test_a_fault_of_the_program_stays_one(job: Job) -> None:
    assert worker._file_error(0, FileNotFoundError(errno.ENOENT, "No such file", "/mnt/a"), job) is None
    assert worker._file_error(0, OSError("torn"), job) is None


def test_a_rank_that_finds_a_file_damaged_while_its_mount_is_away_says_that(job: Job) -> None:
    try:
        try:
            raise OSError(errno.ESTALE, "Stale file handle", "/mnt/part-0001.parquet")
        except OSError as e:
            raise UserError("part-0001.parquet is damaged") from e
    except UserError as e:
        rank_error = worker._rank_error(1, e)
    assert rank_error.message.startswith("/mnt/part-0001.parquet: Stale file handle. Its file system is away")
    assert rank_error.exception().exit_code == EXIT_INCOMPLETE


def test_a_rank_that_finds_no_room_says_so(job: Job, tmp_path: Path) -> None:
    job = job.model_copy(update={"model": Model(embedding_dim=64), "threads": 1, "token": "t"})
    job.fence.local_path().write_text("t")
    (tmp_path / "job.json").write_text(job.model_dump_json())
    completed = subprocess.run(
        [sys.executable, "-c", RANK, str(tmp_path / "job.json")], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    answer = RankResult.model_validate_json(completed.stdout.splitlines()[-1])
    assert "set()" in completed.stderr
    assert answer.error is not None
    assert answer.error.full_disk
    assert "the checkpoint of step 5 could not be written (File too large" in answer.error.message
    assert f"Make room below {job.folder}, or lower train.keep (2)" in answer.error.message
    assert isinstance(answer.error.exception(), DiskFull)
    assert RankError.model_validate_json(job.error_file.read_text()) == answer.error
    assert list(answer.phase_ends) == ["ranks", "imports", "horovod", "first_step", "model"]


NO_ROOM = """
import sys
from pathlib import Path
import headrace.train.loop.run as loop
from headrace.storage import location
from headrace.storage.objects.store import ObjectStore
from headrace.train.launch.worker import rank_main
from obstore.store import MemoryStore

memory = MemoryStore()
location.STORES["s3"] = ObjectStore("s3", lambda scheme, bucket: memory)

def train(*args, **more):
    raise OSError(28, "No space left on device")

loop.train = train
print(rank_main(Path(sys.argv[1]).read_text()))
"""


def test_a_rank_whose_scratch_is_full_names_it_and_not_the_store(job: Job, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    job = job.model_copy(update={"store": "s3://bucket/store"})
    (tmp_path / "job.json").write_text(job.model_dump_json())
    line = [sys.executable, "-c", NO_ROOM, str(tmp_path / "job.json")]
    environ = os.environ | {copies.VARIABLE: str(tmp_path / "cache")}
    completed = subprocess.run(line, capture_output=True, text=True, check=False, env=environ)
    assert completed.returncode == 0, completed.stderr
    answer = RankResult.model_validate_json(completed.stdout.splitlines()[-1])
    assert answer.error is not None
    assert answer.error.full_disk
    free = re.escape(str(tmp_path))
    pattern = rf"No space left on device \([0-9,]+ bytes are free in {free}\S*\). Make room below {free}/cache"
    assert re.fullmatch(pattern, answer.error.message), answer.error.message
    assert answer.error.exception().exit_code == EXIT_INCOMPLETE


def test_a_task_counts_its_lifetime_from_the_start_of_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is the time that the command itself notes."""
    monkeypatch.setattr(SparkTaskService, "_run_command", SparkTaskService._run_command)  # put back at the end
    service = SparkTaskService(0, b"key" * 8, None, 3)
    noted = tmp_path / "noted"
    try:
        for patched in (False, True):
            if patched:
                count_from_start()
            program = (
                f"import pathlib, time; pathlib.Path({str(noted)!r}).write_text(str(time.time())); time.sleep(0.2)"
            )
            service._run_command(f"{sys.executable} -c {shlex.quote(program)}", dict(os.environ), threading.Event())
            assert service.command_exit_code() == 0
            counted_from = service._minimum_command_lifetime._timeout_at - 3
            assert (counted_from <= float(noted.read_text())) == patched
    finally:
        service.shutdown()
    assert list(counting_from_start(lambda index, rows: iter([index, *rows]))(7, [1, 2])) == [7, 1, 2]
