"""Training on a cluster of separate executors, and what may happen to it. A program: a process has one Spark session.

    python -m tests.fault.cluster_side HOME OUT SCENARIO ...

trains on 4 ranks, in 4 executor JVMs of this machine, once for each scenario in turn:

    calm       nothing happens
    killed     a rank is stopped for 3 s (SIGSTOP); while the others wait for it, an executor is killed (SIGKILL)
    slow       a rank is stopped for 10 s
    late       an executor is killed before the launch, and so is each that Spark starts in its place, for 15 s
    full       checkpoints on a file system of 128 KiB (mounted here: root) that grows when the first try has failed

The dataset is that of HOME's features manifest. OUT becomes a JSON object: scenario -> report, log lines, seconds.
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
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import SparkSession

from headrace.config import Model, Spark, Train
from headrace.jobs.submit import environment
from headrace.lake.spark.session import session
from headrace.manifest import Manifest
from headrace.storage import local
from headrace.train.callbacks.progress import ProgressEvent
from headrace.train.job import Job
from headrace.train.launch.horovod_spark import launch
from headrace.workspace import Workspace

RANKS = 4
#: Steps of the scenarios' run, and from one checkpoint to the next.
STEPS, CHECKPOINT_STEPS = 90, 20


def executors() -> dict[int, psutil.Process]:
    """This session's executor JVMs by Spark's id."""
    found = {}
    for p in psutil.Process().children(recursive=True):
        words = p.as_dict(["cmdline"], ad_value=[])["cmdline"]
        if "org.apache.spark.executor.CoarseGrainedExecutorBackend" in words:
            found[int(words[words.index("--executor-id") + 1])] = p
    return found


def rank_process(rank: int) -> psutil.Process:
    """The process of a rank of this session."""
    for p in psutil.Process().children(recursive=True):
        found = p.as_dict(["cmdline", "environ"], ad_value={})
        if "horovod.spark.task.gloo_exec_fn" in found["cmdline"] and found["environ"].get("HOROVOD_RANK") == str(rank):
            return p
    raise LookupError(f"no rank {rank}")


def stop_for(rank: int, seconds: float) -> None:
    """SIGSTOP a rank, and SIGCONT it later."""
    process = rank_process(rank)
    process.send_signal(signal.SIGSTOP)
    threading.Timer(seconds, process.send_signal, [signal.SIGCONT]).start()


class Trouble:
    """What happens to a run, step by step. `done`: what did."""

    def __init__(self, scenario: str) -> None:
        self.scenario = scenario
        self.done: list[str] = []

    def on_progress(self, tick: ProgressEvent) -> None:
        if self.done or tick.step < 45 or self.scenario not in ("killed", "slow"):
            return
        self.done.append(f"rank 2 stopped at step {tick.step}")
        stop_for(2, 10 if self.scenario == "slow" else 3)
        if self.scenario == "killed":
            hosts = {p.pid for p in rank_process(2).parents()}
            number, process = next((n, p) for n, p in sorted(executors().items()) if p.pid not in hosts)
            self.done.append(f"executor {number} killed")
            process.kill()


@contextmanager
def no_fourth_executor(seconds: float) -> Iterator[None]:
    """Kill one executor, and for so long each new one."""
    kept = sorted(executors())[: RANKS - 1]
    end = time.monotonic() + seconds
    first = threading.Event()

    def run() -> None:
        while time.monotonic() < end:
            for number, process in executors().items():
                if number not in kept:
                    process.kill()
            first.set()
            time.sleep(0.2)

    thread = threading.Thread(target=run)
    thread.start()
    first.wait()
    time.sleep(2)  # until Spark knows
    yield
    thread.join()


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of 128 KiB for the checkpoints; a warning in headrace's log makes it grow."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)], check=True)

    class _Grow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                # What the first try left behind, before there is room.
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
    """The run that all scenarios make."""
    job = Job(
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
        ),
    )
    job.folder.local_path().mkdir(parents=True)
    return job


def play(scenario: str, job: Job, spark: SparkSession) -> dict[str, Any]:
    lines, trouble, began = _Lines(), Trouble(scenario), time.monotonic()
    logging.getLogger("headrace").addHandler(lines)
    around: AbstractContextManager[None] = nullcontext()
    if scenario == "late":
        around = no_fourth_executor(15)
    elif scenario == "full":
        around = small_disk(job.checkpoints.local_path())
    with around:
        report = launch(job, spark, ranks=RANKS, retries=1, on_progress=trouble.on_progress)
    logging.getLogger("headrace").removeHandler(lines)
    return {
        "report": report.model_dump(),
        "lines": lines.lines,
        "done": trouble.done,
        "seconds": round(time.monotonic() - began, 1),
        "model": str(job.saved_model),
    }


def main(home: Path, out: Path, scenarios: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    conf = Spark(
        master=f"local-cluster[{RANKS},1,1024]", driver_memory="1g", properties={"spark.executor.memory": "1g"}
    )
    os.environ.update(environment(conf))
    ws = Workspace(home)
    # Executors' work folders; Spark's default is below its installation.
    os.environ["SPARK_WORKER_DIR"] = str(ws.spark_local / "work")
    manifests = list((ws.home / "runs" / "clicks").glob("*/features.json"))
    features = Manifest.load(local(manifests[0]))
    assert features is not None
    found = {}
    with session(conf, ws, "cluster") as spark:
        for scenario in scenarios:
            found[scenario] = play(scenario, job_of(ws, features, scenario), spark)
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
