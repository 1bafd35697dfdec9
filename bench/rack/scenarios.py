"""Scenarios: a day on hosts that share nothing, compared with one machine's, and faults on the hosts of one cluster.

Each fault ends with a comparison with a calm day's dataset, weights or scores. What happened is a table with a row for
each scenario.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bench.rack.cluster import (
    OUTAGE,
    OUTAGE_PORT,
    PARTS,
    PIPELINE,
    RANKS,
    CalmDay,
    RackCluster,
    RackTrial,
    cluster,
    start_outage,
    start_worker,
    tail,
    to_promote,
)
from bench.rack.hosts import MBIT, PRIVATE, Host
from headrace.config.installation import checkout
from headrace.errors import EXIT_BUSY
from headrace.storage import local
from tests.s3_server import BUCKET

HEAD = "| scenario | what was lost | seconds | undisturbed |\n|---|---|---:|---:|"


@dataclass(frozen=True)
class ScenarioResult:
    """Result of a scenario. That its end result is right was checked before."""

    scenario: str
    lost: str
    seconds: float
    #: Of the same without what happens in the scenario; of one without anything, of one machine.
    undisturbed: float

    def __str__(self) -> str:
        return f"| {self.scenario} | {self.lost} | {self.seconds:.0f} | {self.undisturbed:.0f} |"


def publish(rows: Sequence[ScenarioResult]) -> Path:
    """Put rows in place of their scenarios' in build/bench/rack.json, in one step, and print them."""
    path = checkout() / "build" / "bench" / "rack.json"
    previous = json.loads(path.read_text()) if path.is_file() else []
    table = {row["scenario"]: row for row in [*previous, *map(asdict, rows)]}
    local(path).put_text(json.dumps(list(table.values()), indent=1) + "\n")
    print("\n".join(["", HEAD, *map(str, rows)]), flush=True)
    return path


T = TypeVar("T")
_POLL_SECONDS = 0.1
#: Of any one thing.
LIMIT_SECONDS = 900.0


def until(ask: Callable[[], T], exit_code: Callable[[], int | None], log: Path) -> T:
    """Wait until `ask` gives an answer, and return it.

    Args:
        ask: gives what is false as long as there is nothing to say.
        exit_code: that of what is waited for, None while it runs.
        log: shown where it never came to that.

    Raises:
        RuntimeError: it ended before, or took longer than LIMIT_SECONDS.
    """
    end = time.monotonic() + LIMIT_SECONDS
    while not (answer := ask()):
        if exit_code() is not None or time.monotonic() > end:
            raise RuntimeError(f"it never came to that; {tail(log)}")
        time.sleep(_POLL_SECONDS)
    return answer


def timed(act: Callable[[], object]) -> float:
    """Measure the seconds of a call."""
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


SINGLE_HOST = PRIVATE / "home" / "one"
_ARCHIVE = f"s3://{BUCKET}/environment.tar.gz"
#: Spark brings its own pyspark, and ranks on processors compile nothing for GPUs.
_NOT_OF_EXECUTORS = ("pyspark", "triton")


@dataclass(frozen=True)
class ScenarioPlan:
    """Plan of a scenario: the folder, the day and its rows."""

    folder: Path
    ds: str
    rows: int

    @property
    def settings(self) -> Mapping[str, object]:
        """Return overrides of the pipeline: as many ranks and threads as one machine's."""
        return {
            "generate.rows_per_day": self.rows,
            "train.ranks": RANKS,
            "train.threads": 1,
            "train.epochs": 2,
            "train.batch_size": 512,
            "train.checkpoint_steps": 20,
            "train.deadline_seconds": 60,
            "train.retries": 3,
            "baseline.rounds": 5,
            "spark.driver_memory": "1g",
        }

    def below(self, name: str) -> ScenarioPlan:
        """Return the same plan in a folder of that name."""
        return replace(self, folder=self.folder / name)

    @property
    def long_training(self) -> Mapping[str, object]:
        """Enough steps that something can happen between them."""
        return {**self.settings, "train.epochs": 60, "train.patience": None}


def day(plan: ScenarioPlan) -> ScenarioResult:
    """Run a whole day over the rack, and the same on one machine: equal datasets, weights and scores, to the bit."""
    with cluster(plan.folder, plan.settings) as rack:
        driver = rack.services
        rack.generate(driver, plan.ds)
        took = timed(lambda: rack.whole_day(driver, plan.ds))
        alone = _alone(rack, plan)
        print(rack.services.run(_comparison(plan)), flush=True)
    return ScenarioResult("day", "nothing", took, alone)


def train(plan: ScenarioPlan) -> ScenarioResult:
    """Run the stages from features to promote, over the rack and on one machine: equal datasets and weights, to the
    bit.
    """
    with cluster(plan.folder, plan.settings) as rack:
        rack.ingest(rack.services, plan.ds)
        took = timed(lambda: rack.train(rack.services, plan.ds))
        rack.run_alone(SINGLE_HOST, "one.log", "generate", PIPELINE, "--until", plan.ds)
        rack.run_alone(SINGLE_HOST, "one.log", "run", PIPELINE, "--ds", plan.ds, "--to", "ingest")
        alone = timed(lambda: rack.run_alone(SINGLE_HOST, "one.log", *to_promote(plan.ds)))
        print(rack.services.run(_comparison(plan)), flush=True)
    return ScenarioResult("train", "nothing", took, alone)


def packed(plan: ScenarioPlan) -> ScenarioResult:
    """Run a whole day whose tasks and ranks are on hosts with Spark and a Python without packages: all else comes with
    the archive of the environment, from S3. The same dataset, weights and scores as one machine's with its checkout.
    """
    with cluster(plan.folder, plan.settings, bare_workers=True) as rack:
        driver = rack.services
        for host in rack.hosts[1:]:
            host.run(["bash", "-c", f"! test -e {checkout()}/python && ! test -e {sys.executable}"])
        rack.generate(driver, plan.ds)
        packing = timed(lambda: rack.pack(driver, _ARCHIVE, *_NOT_OF_EXECUTORS))
        print(f"{tail(rack.logs / 'pack.log', 3)}\npacked in {packing:.0f} s", flush=True)
        of_archive = {"archives": f"{_ARCHIVE}#environment", "pyspark.python": "./environment/bin/python"}
        settings = {**rack.settings, **{f"spark.properties.spark.{k}": v for k, v in of_archive.items()}}
        took = timed(lambda: replace(rack, settings=settings).whole_day(driver, plan.ds))
        alone = _alone(rack, plan)
        print(rack.services.run(_comparison(plan)), flush=True)
    return ScenarioResult("packed", "nothing", took, alone)


def _alone(rack: RackCluster, plan: ScenarioPlan) -> float:
    """Run the same day on one machine; return its seconds."""
    rack.run_alone(SINGLE_HOST, "one.log", "generate", PIPELINE, "--until", plan.ds)
    return timed(lambda: rack.run_alone(SINGLE_HOST, "one.log", "run", PIPELINE, "--ds", plan.ds))


def _comparison(plan: ScenarioPlan) -> list[str]:
    return [sys.executable, "-m", "bench.rack.compare", str(SINGLE_HOST), f"s3://{BUCKET}", plan.ds]


DAYS: Mapping[str, Callable[[ScenarioPlan], ScenarioResult]] = {f.__name__: f for f in (day, train, packed)}


WORKERS = 3
SLOW_MBIT = 20
OUTAGE_SECONDS = 30.0
#: What the log says of a try that failed: how far its ranks were, which try comes next, and from which step.
_ATTEMPT = re.compile(
    r"rank \d+ (?:waited \d+ s|\([^)]*\) was) at step (\d+).*?"
    r"attempt (\d+) of \d+ resumes from (?:step (\d+)|the start)"
)
#: Training is disturbed after so many steps.
_STEPS = 25


@dataclass(frozen=True)
class Lab:
    """A cluster with one more worker than there are executors, a host for another driver, and a calm day."""

    cluster: RackCluster
    calm: CalmDay

    @property
    def services(self) -> Host:
        return self.cluster.services

    @property
    def workers(self) -> list[Host]:
        return list(self.cluster.hosts[1 : 1 + WORKERS])

    @property
    def spare(self) -> Host:
        """Has nothing on it."""
        return self.cluster.hosts[-1]


@contextmanager
def start_lab(plan: ScenarioPlan) -> Iterator[Lab]:
    """Start a cluster for scenarios, while the block runs."""
    with cluster(plan.folder, plan.long_training, workers=WORKERS, drivers=1) as rack:
        start_outage(rack.services, rack.logs / "outage.log")
        yield Lab(rack, CalmDay(rack, plan.ds))


def features_link(lab: Lab) -> ScenarioResult:
    """Cut off an executor's host while its tasks decode the lake's files."""
    return _cut_off(lab, "features_link", "features", after="ingest")


def scoring_link(lab: Lab) -> ScenarioResult:
    """Cut off an executor's host in scoring."""
    return _cut_off(lab, "scoring_link", "score", after="promote")


def _cut_off(lab: Lab, name: str, part: str, after: str) -> ScenarioResult:
    calm = lab.calm.seconds([part])
    trial = lab.calm.begin(name, after)
    begin = time.perf_counter()
    running = trial.start_part(lab.services, part)
    with _end_at_exit(running):
        host = until(lambda: _at_work(trial, lab.workers), running.poll, trial.log)
        with _cut(lab, host):
            cut = time.perf_counter()
            trial.end(running, LIMIT_SECONDS + calm)
            done = time.perf_counter()
    lab.calm.check(trial, part)
    lost = f"{trial.losses(lab.services)}; done {done - cut:.0f} s after the cut"
    return ScenarioResult(name, lost, done - begin, calm)


def training_link(lab: Lab) -> ScenarioResult:
    """Cut off a rank's host; a third host has a worker without an executor."""
    calm = lab.calm.seconds(["train"])
    trial = lab.calm.begin("training_link", "features")
    begin = time.perf_counter()
    running = trial.start_part(lab.services, "train")
    with _end_at_exit(running):
        seen = until(lambda: _ranks(trial), running.poll, trial.log)
        host = next(h for h in lab.workers if h.name == seen[RANKS - 1]["host"])
        with _cut(lab, host):
            cut = time.perf_counter()
            attempt = until(lambda: _next_attempt(trial.log), running.poll, trial.log)
            noticed = time.perf_counter() - cut
            trial.end(running, LIMIT_SECONDS + calm)
            done = time.perf_counter()
    lab.calm.check(trial, "train")
    lost = f"{trial.losses(lab.services)}; {attempt}; noticed after {noticed:.0f} s"
    return ScenarioResult("training_link", lost, done - begin, calm)


def driver_dies(lab: Lab) -> ScenarioResult:
    """End the driver's host in training; another one runs the day, as soon as the lease lets it.

    The executors of the dead one keep the slots of their workers until Spark's master has noticed.
    """
    calm = lab.calm.seconds(["train"])
    trial = lab.calm.begin("driver_dies", "features")
    begin = time.perf_counter()
    with _end_at_exit(running := trial.start_part(lab.spare, "train")):
        seen = until(lambda: _ranks(trial), running.poll, trial.log)
        lab.spare.die()
    died = time.perf_counter()
    refused = _when_free(trial, lab.services, LIMIT_SECONDS + calm)
    done = time.perf_counter()
    lab.calm.check(trial, "train")
    lost = f"the driver, at step {seen[0]['step']}; the lease refused another host {refused} times, which went on from "
    lost += f"step {_resumed_from(trial)} and was done {done - died:.0f} s after"
    return ScenarioResult("driver_dies", lost, done - begin, calm)


def store_503(lab: Lab) -> ScenarioResult:
    """Have the store answer 503 for half a minute in features, in training and in scoring."""
    calm = lab.calm.seconds(PARTS[1:])
    trial = lab.calm.begin("store_503", "ingest", OUTAGE_PORT)
    file, log = local(lab.services.folder) / OUTAGE.name, lab.cluster.logs / "outage.log"
    seconds, refused = 0.0, []
    for part in PARTS[1:]:
        begin, line_count = time.perf_counter(), len(log.read_text().splitlines())
        at_work = partial(_ranks, trial) if part == "train" else _computing(trial, lab.services)
        running = trial.start_part(lab.services, part)
        with _end_at_exit(running):
            if part != "promote":
                until(at_work, running.poll, trial.log)
                file.put_text("{}")
                time.sleep(OUTAGE_SECONDS)
                file.remove()
            trial.end(running, LIMIT_SECONDS + calm)
        seconds += time.perf_counter() - begin
        refused.append(len(log.read_text().splitlines()) - line_count)
    if not all(n for n, part in zip(refused, PARTS[1:], strict=True) if part != "promote"):
        raise RuntimeError(f"requests that were refused, by part: {refused}")
    lab.calm.check(trial, PARTS[-1])
    lost = f"{trial.losses(lab.services)}; {sum(refused)} requests were answered 503"
    return ScenarioResult("store_503", lost, seconds, calm)


def slow_link(lab: Lab) -> ScenarioResult:
    """Limit the links of two of three workers' hosts to 20 Mbit/s from features to scores: one has an executor."""
    trial = lab.calm.begin("slow_link", "ingest")
    for host in lab.workers[1:]:
        host.shape(SLOW_MBIT)
    try:
        seconds = sum(trial.run_part(part) for part in PARTS[1:])
    finally:
        for host in lab.workers[1:]:
            host.shape(MBIT)
    lab.calm.check(trial, PARTS[-1])
    return ScenarioResult("slow_link", str(trial.losses(lab.services)), seconds, lab.calm.seconds(PARTS[1:]))


@contextmanager
def _end_at_exit(running: Any) -> Iterator[None]:
    """End all of a command when the block ends."""
    try:
        yield
    finally:
        running.kill()
        running.wait()


@contextmanager
def _cut(lab: Lab, host: Host) -> Iterator[None]:
    """Cut off a worker's host within the block; after it, the host is as one that was started anew."""
    host.cut()
    try:
        yield
    finally:
        host.restore()
        _start_anew(lab, host)


def _start_anew(lab: Lab, host: Host) -> None:
    """End a worker, and what it has started, and start another one on its host."""
    master = lab.cluster.logs / "master.log"
    host.end_all()
    registered = _registered(master)
    worker = start_worker(host, lab.services, lab.cluster.logs, memory="4g")
    until(lambda: _registered(master) > registered, worker.poll, master)


def _registered(master: Path) -> int:
    return master.read_text(errors="replace").count("Registering worker")


def _at_work(trial: RackTrial, workers: list[Host]) -> Host | None:
    """Return a host on which tasks have left files."""
    return next((host for host in workers if trial.scratch(host)), None)


def _computing(trial: RackTrial, driver: Host) -> Callable[[], bool]:
    """Return a check whether an application that is not there now has begun with a job of Spark's."""
    earlier = set(trial.events(driver))

    def begun() -> bool:
        with suppress(FileNotFoundError):  # the application has ended, and its log has another name
            return any("SparkListenerJobStart" in log.read_text() for log in trial.events(driver) if log not in earlier)
        return False

    return begun


def _ranks(trial: RackTrial) -> dict[int, dict[str, Any]]:
    """Return the ranks' status files in the store, by rank, once all have done some steps; else nothing."""
    ranks = {}
    for file in (trial.objects / "store" / "models").rglob("ranks-*/rank-*.json"):
        try:
            status = json.loads(file.read_text())
        except (OSError, ValueError):  # it is being replaced
            continue
        ranks[status["rank"]] = status
    reached = [status for status in ranks.values() if status["phase"] == "train" and status["step"] >= _STEPS]
    return ranks if len(reached) == RANKS else {}


def _when_free(trial: RackTrial, driver: Host, seconds: float) -> int:
    """Train on a host as soon as the lease lets it; how often it was refused.

    Raises:
        RuntimeError: it failed, or was refused for so many seconds.
    """
    refused, end = 0, time.monotonic() + seconds
    while True:
        with _end_at_exit(running := trial.start_part(driver, "train")):
            code = running.wait(seconds)
        if not code:
            return refused
        if code != EXIT_BUSY or time.monotonic() > end:
            raise RuntimeError(f"the other host: exit code {code} after {refused} refusals; {tail(trial.log)}")
        refused += 1


def _resumed_from(trial: RackTrial) -> int:
    """Return the step from which the finished training went on."""
    manifest = trial.objects / "store" / "runs" / PIPELINE / trial.ds / "train.json"
    return int(json.loads(manifest.read_text())["facts"]["resumed_from_step"])


def _next_attempt(log: Path) -> str:
    """Return which attempt of training comes next, and how many steps it repeats; empty: there is none yet."""
    text = " ".join(log.read_text(errors="replace").split())
    match = _ATTEMPT.search(text)
    if match is None:
        return ""
    return f"attempt {match[2]} repeats {int(match[1]) - int(match[3] or 0)} steps"


#: In this order: the last one ends a host for good.
FAULTS: Mapping[str, Callable[[Lab], ScenarioResult]] = {
    f.__name__: f for f in (features_link, training_link, scoring_link, store_503, slow_link, driver_dies)
}
