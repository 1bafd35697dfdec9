"""What goes wrong on the hosts of one cluster, and what comes of it: each scenario ends with a comparison with a calm
day's dataset, weights or scores."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.rack.day import PIPELINE, RANKS, Cluster, cluster, tail
from bench.rack.hosts import MBIT, Host
from bench.rack.rows import Row
from bench.rack.scenarios import Day
from bench.rack.services import OUTAGE, OUTAGE_PORT, start_outage, start_worker
from bench.rack.trial import PARTS, CalmDay, Trial
from bench.rack.waiting import LIMIT_SECONDS, until
from headrace.errors import EXIT_BUSY
from headrace.storage import local

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

    cluster: Cluster
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
def lab(given: Day) -> Iterator[Lab]:
    """A cluster for scenarios."""
    with cluster(given.folder, given.long_training, workers=WORKERS, drivers=1) as found:
        start_outage(found.services, found.logs / "outage.log")
        yield Lab(found, CalmDay(found, given.ds))


def features_link(given: Lab) -> Row:
    """An executor's host is cut off while its tasks decode the lake's files."""
    return _cut_off(given, "features_link", "features", after="ingest")


def scoring_link(given: Lab) -> Row:
    """An executor's host is cut off in scoring."""
    return _cut_off(given, "scoring_link", "score", after="promote")


def _cut_off(given: Lab, name: str, part: str, after: str) -> Row:
    calm = given.calm.seconds([part])
    trial = given.calm.begin(name, after)
    begin = time.perf_counter()
    running = trial.start_part(given.services, part)
    with _ended(running):
        host = until(lambda: _at_work(trial, given.workers), running.poll, trial.log)
        with _cut(given, host):
            cut = time.perf_counter()
            trial.end(running, LIMIT_SECONDS + calm)
            done = time.perf_counter()
    given.calm.check(trial, part)
    lost = f"{trial.losses(given.services)}; done {done - cut:.0f} s after the cut"
    return Row(name, lost, done - begin, calm)


def training_link(given: Lab) -> Row:
    """A rank's host is cut off; a third host has a worker without an executor."""
    calm = given.calm.seconds(["train"])
    trial = given.calm.begin("training_link", "features")
    begin = time.perf_counter()
    running = trial.start_part(given.services, "train")
    with _ended(running):
        seen = until(lambda: _ranks(trial), running.poll, trial.log)
        host = next(h for h in given.workers if h.name == seen[RANKS - 1]["host"])
        with _cut(given, host):
            cut = time.perf_counter()
            said = until(lambda: _next_attempt(trial.log), running.poll, trial.log)
            noticed = time.perf_counter() - cut
            trial.end(running, LIMIT_SECONDS + calm)
            done = time.perf_counter()
    given.calm.check(trial, "train")
    lost = f"{trial.losses(given.services)}; {said}; noticed after {noticed:.0f} s"
    return Row("training_link", lost, done - begin, calm)


def driver_dies(given: Lab) -> Row:
    """The driver's host dies in training; another one runs the day, as soon as the lease lets it.

    The executors of the dead one keep the slots of their workers until Spark's master has noticed.
    """
    calm = given.calm.seconds(["train"])
    trial = given.calm.begin("driver_dies", "features")
    begin = time.perf_counter()
    with _ended(running := trial.start_part(given.spare, "train")):
        seen = until(lambda: _ranks(trial), running.poll, trial.log)
        given.spare.die()
    died = time.perf_counter()
    refused = _when_free(trial, given.services, LIMIT_SECONDS + calm)
    done = time.perf_counter()
    given.calm.check(trial, "train")
    lost = f"the driver, at step {seen[0]['step']}; the lease refused another host {refused} times, which went on from "
    lost += f"step {_resumed_from(trial)} and was done {done - died:.0f} s after"
    return Row("driver_dies", lost, done - begin, calm)


def store_503(given: Lab) -> Row:
    """The store answers 503 for half a minute in features, in training and in scoring."""
    calm = given.calm.seconds(PARTS[1:])
    trial = given.calm.begin("store_503", "ingest", OUTAGE_PORT)
    file, log = local(given.services.folder) / OUTAGE.name, given.cluster.logs / "outage.log"
    seconds, refused = 0.0, []
    for part in PARTS[1:]:
        begin, before = time.perf_counter(), len(log.read_text().splitlines())
        at_work = partial(_ranks, trial) if part == "train" else _computing(trial, given.services)
        running = trial.start_part(given.services, part)
        with _ended(running):
            if part != "promote":
                until(at_work, running.poll, trial.log)
                file.put_text("{}")
                time.sleep(OUTAGE_SECONDS)
                file.remove()
            trial.end(running, LIMIT_SECONDS + calm)
        seconds += time.perf_counter() - begin
        refused.append(len(log.read_text().splitlines()) - before)
    if not all(n for n, part in zip(refused, PARTS[1:], strict=True) if part != "promote"):
        raise RuntimeError(f"requests that were refused, by part: {refused}")
    given.calm.check(trial, PARTS[-1])
    lost = f"{trial.losses(given.services)}; {sum(refused)} requests were answered 503"
    return Row("store_503", lost, seconds, calm)


def slow_link(given: Lab) -> Row:
    """The links of two of three workers' hosts carry 20 Mbit/s from features to scores: one has an executor."""
    trial = given.calm.begin("slow_link", "ingest")
    for host in given.workers[1:]:
        host.shape(SLOW_MBIT)
    try:
        seconds = sum(trial.run_part(part) for part in PARTS[1:])
    finally:
        for host in given.workers[1:]:
            host.shape(MBIT)
    given.calm.check(trial, PARTS[-1])
    return Row("slow_link", str(trial.losses(given.services)), seconds, given.calm.seconds(PARTS[1:]))


@contextmanager
def _ended(running: Any) -> Iterator[None]:
    """At the end of the block nothing of a command is left."""
    try:
        yield
    finally:
        running.kill()
        running.wait()


@contextmanager
def _cut(given: Lab, host: Host) -> Iterator[None]:
    """Within, a worker's host is cut off; after it, it is as one that was started anew."""
    host.cut()
    try:
        yield
    finally:
        host.restore()
        _start_anew(given, host)


def _start_anew(given: Lab, host: Host) -> None:
    """End a worker, and what it has started, and start another one on its host."""
    master = given.cluster.logs / "master.log"
    host.end_all()
    before = _registered(master)
    worker = start_worker(host, given.services, given.cluster.logs, memory="4g")
    until(lambda: _registered(master) > before, worker.poll, master)


def _registered(master: Path) -> int:
    return master.read_text(errors="replace").count("Registering worker")


def _at_work(trial: Trial, workers: list[Host]) -> Host | None:
    """A host on which tasks have left files."""
    return next((host for host in workers if trial.scratch(host)), None)


def _computing(trial: Trial, driver: Host) -> Callable[[], bool]:
    """Whether an application that is not there now has begun with a job of Spark's."""
    before = set(trial.events(driver))

    def begun() -> bool:
        with suppress(FileNotFoundError):  # the application has ended, and its log has another name
            return any("SparkListenerJobStart" in log.read_text() for log in trial.events(driver) if log not in before)
        return False

    return begun


def _ranks(trial: Trial) -> dict[int, dict[str, Any]]:
    """What the ranks say of themselves in the store, by rank, once all have done some steps; else nothing."""
    ranks = {}
    for file in (trial.objects / "store" / "models").rglob("ranks-*/rank-*.json"):
        try:
            said = json.loads(file.read_text())
        except (OSError, ValueError):  # it is being replaced
            continue
        ranks[said["rank"]] = said
    reached = [said for said in ranks.values() if said["phase"] == "train" and said["step"] >= _STEPS]
    return ranks if len(reached) == RANKS else {}


def _when_free(trial: Trial, driver: Host, seconds: float) -> int:
    """Train on a host as soon as the lease lets it; how often it was refused.

    Raises:
        RuntimeError: it failed, or was refused for so many seconds.
    """
    refused, end = 0, time.monotonic() + seconds
    while True:
        with _ended(running := trial.start_part(driver, "train")):
            code = running.wait(seconds)
        if not code:
            return refused
        if code != EXIT_BUSY or time.monotonic() > end:
            raise RuntimeError(f"the other host: exit code {code} after {refused} refusals; {tail(trial.log)}")
        refused += 1


def _resumed_from(trial: Trial) -> int:
    """The step from which the finished training went on."""
    manifest = trial.objects / "store" / "runs" / PIPELINE / trial.ds / "train.json"
    return int(json.loads(manifest.read_text())["facts"]["resumed_from_step"])


def _next_attempt(log: Path) -> str:
    """From where the next attempt of training goes on, and how many steps it repeats; empty: there is none yet."""
    said = " ".join(log.read_text(errors="replace").split())
    found = _ATTEMPT.search(said)
    if found is None:
        return ""
    return f"attempt {found[2]} repeats {int(found[1]) - int(found[3] or 0)} steps"


#: In this order: the last one ends a host for good.
ALL: Mapping[str, Callable[[Lab], Row]] = {
    f.__name__: f for f in (features_link, training_link, scoring_link, store_503, slow_link, driver_dies)
}
