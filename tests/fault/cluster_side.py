"""Training on a Spark master, with a fault in each run. A program: a process has one Spark session.

    python -m tests.fault.cluster_side HOME OUT MASTER FAULT ...

Trains on 4 ranks once for each fault, in one session of MASTER (`local[4]`, `local-cluster[4,1,1024]`, a `spark://`
URL or `yarn`):

    calm              no fault
    rank_killed       SIGKILL to a rank
    rank_hangs        SIGSTOP to a rank, for good
    rank_slow         SIGSTOP to a rank for 10 s
    executor_killed   SIGSTOP to a rank for 3 s; while the others wait for it, SIGKILL to another rank's executor
    executor_late     SIGKILL to an executor before the launch, and for 15 s to each one that replaces it
    disk_full         checkpoints on a file system of 128 KiB (mounted here: root), which grows after the first attempt
    driver_stopped    SIGTERM to this process, which exits with 143; given again, the program resumes the run
    driver_killed     SIGKILL to this process; given again, the program resumes the run

The dataset is that of HOME's features manifest. OUT becomes a JSON object by fault: report, log lines, seconds.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import SparkSession

from headrace.config import Model, Spark, Train
from headrace.config.workspace import Workspace
from headrace.jobs.submit import environment, spark_home
from headrace.lake.spark.session import session
from headrace.stage.manifest import Manifest
from headrace.storage import local
from headrace.train.callbacks.progress import ProgressEvent
from headrace.train.job import Job
from headrace.train.launch.horovod_spark import launch

RANKS = 4
#: Steps of each run, and between two checkpoints.
STEPS, CHECKPOINT_STEPS = 90, 20
#: The step at which faults happen: two checkpoints are complete.
FAULT_STEP = 45

#: Four executors of one core, for each master that has executors.
EXECUTORS = {"spark.executor.memory": "1g", "spark.executor.cores": "1", "spark.cores.max": str(RANKS)}
YARN = {
    # Spark's jars lie where the containers run; without this each application uploads 450 MB.
    "spark.yarn.jars": f"local:{spark_home()}/jars/*",
    "spark.executor.instances": str(RANKS),
}


def executors(spark: SparkSession) -> dict[int, psutil.Process]:
    """Return the session's executor JVMs by Spark's id; a local session has none."""
    application = spark.sparkContext.applicationId
    processes = {}
    for process in psutil.process_iter():
        words = process.as_dict(["cmdline"], ad_value=[])["cmdline"]
        is_executor = any(word.endswith("CoarseGrainedExecutorBackend") for word in words) and application in words
        # YARN starts a shell that starts the JVM, both with these words.
        if is_executor and Path(words[0]).name == "java":
            processes[int(words[words.index("--executor-id") + 1])] = process
    return processes


def rank_process(spark: SparkSession, rank: int) -> psutil.Process:
    """Return the process of a rank of the session."""
    roots = executors(spark).values() or [psutil.Process()]
    for process in (child for root in roots for child in root.children(recursive=True)):
        info = process.as_dict(["cmdline", "environ"], ad_value={})
        is_rank = "horovod.spark.task.gloo_exec_fn" in info["cmdline"]
        if is_rank and info["environ"].get("HOROVOD_RANK") == str(rank):
            return process
    raise LookupError(f"no rank {rank}")


def suspend(process: psutil.Process, seconds: float) -> None:
    """Send SIGSTOP to a process, and SIGCONT after some seconds."""
    process.send_signal(signal.SIGSTOP)
    threading.Timer(seconds, process.send_signal, [signal.SIGCONT]).start()


def kill_another_executor(spark: SparkSession) -> None:
    """Suspend rank 2 for 3 s, and kill an executor that does not run it."""
    rank = rank_process(spark, 2)
    suspend(rank, 3)
    ancestors = {parent.pid for parent in rank.parents()}
    next(process for _, process in sorted(executors(spark).items()) if process.pid not in ancestors).kill()


#: By fault: what happens at FAULT_STEP.
FAULTS: dict[str, Callable[[SparkSession], None]] = {
    "rank_killed": lambda spark: rank_process(spark, 2).kill(),
    "rank_hangs": lambda spark: rank_process(spark, 2).suspend(),
    "rank_slow": lambda spark: suspend(rank_process(spark, 2), 10),
    "executor_killed": kill_another_executor,
    "driver_stopped": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "driver_killed": lambda _: os.kill(os.getpid(), signal.SIGKILL),
}


@contextmanager
def no_fourth_executor(spark: SparkSession, seconds: float) -> Iterator[None]:
    """Kill one executor now, and for some seconds each one that replaces it."""
    retained = sorted(executors(spark))[: RANKS - 1]
    end = time.monotonic() + seconds
    first_killed = threading.Event()

    def run() -> None:
        while time.monotonic() < end:
            for number, process in executors(spark).items():
                if number not in retained:
                    process.kill()
            first_killed.set()
            time.sleep(0.2)

    thread = threading.Thread(target=run)
    thread.start()
    first_killed.wait()
    time.sleep(2)  # until Spark has noticed
    yield
    thread.join()


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a file system of 128 KiB for the checkpoints; a warning in headrace's log makes it grow."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)], check=True)

    class _Grow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                # The first attempt's partial files must be gone before there is room.
                assert [p.name for p in folder.iterdir() if "partial" in p.name] == []
                subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)

    grow = _Grow()
    logging.getLogger("headrace.train").addHandler(grow)
    try:
        yield
    finally:
        logging.getLogger("headrace.train").removeHandler(grow)
        subprocess.run(["umount", str(folder)], check=True)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def job_of(ws: Workspace, features: Manifest, key: str) -> Job:
    """Return the run that each fault hits."""
    return Job(
        home=ws.home,
        pipeline="clicks",
        ds=features.ds,
        key=key,
        features=features,
        progress_seconds=0.0,
        threads=1,
        model=Model(embedding_dim=4, bottom_mlp=(8,), top_mlp=(16,)),
        train=Train(
            ranks=RANKS,
            batch_size=80,
            streams=RANKS,
            epochs=100,
            max_steps=STEPS,
            patience=None,
            seed=3,
            checkpoint_steps=CHECKPOINT_STEPS,
            **({"deadline_seconds": 8} if key == "rank_hangs" else {}),
        ),
    )


def play(fault: str, job: Job, spark: SparkSession) -> dict[str, Any]:
    """Train with a fault; resume without it where an earlier process has begun the run."""
    lines, happened, started = _Lines(), list[int](), time.monotonic()
    is_resumed = job.folder.is_dir()
    job.folder.make_dir()

    def on_progress(event: ProgressEvent) -> None:
        if event.step >= FAULT_STEP and fault in FAULTS and not is_resumed and not happened:
            happened.append(event.step)
            FAULTS[fault](spark)

    around: AbstractContextManager[None] = nullcontext()
    if fault == "executor_late":
        around = no_fourth_executor(spark, 15)
    elif fault == "disk_full":
        around = small_disk(job.checkpoints.local_path())
    logging.getLogger("headrace").addHandler(lines)
    with around:
        report = launch(job, spark, ranks=RANKS, retries=1, on_progress=on_progress)
    logging.getLogger("headrace").removeHandler(lines)
    return {
        "report": report.model_dump(),
        "lines": lines.lines,
        "happened": happened,
        "seconds": round(time.monotonic() - started, 1),
        "model": str(job.saved_model),
    }


def main(home: Path, out: Path, master: str, faults: list[str]) -> None:
    """Play faults one after the other in one session."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    ws = Workspace(home)
    properties = {} if master.startswith("local[") else dict(EXECUTORS)
    if master == "yarn":
        properties |= YARN | {"spark.yarn.stagingDir": f"file://{ws.home}/staging"}
    conf = Spark(master=master, driver_memory="1g", properties=properties)
    os.environ.update(environment(conf))
    # Executors' work folders; Spark's default is below its installation.
    os.environ["SPARK_WORKER_DIR"] = str(ws.spark_local / "work")
    manifests = list((ws.home / "runs" / "clicks").glob("*/features.json"))
    features = Manifest.load(local(manifests[0]))
    assert features is not None
    outcomes = {}
    with session(conf, ws, "cluster") as spark:
        for fault in faults:
            outcomes[fault] = play(fault, job_of(ws, features, fault), spark)
            out.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
