"""Faults on the hosts of one cluster, and what comes of them: each scenario ends with a comparison with a calm day's
dataset, weights or scores.
"""

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

from bench.rack.day import PIPELINE, RANKS, RackCluster, cluster, tail
from bench.rack.hosts import MBIT, Host
from bench.rack.rows import ScenarioResult
from bench.rack.scenarios import ScenarioPlan
from bench.rack.services import OUTAGE, OUTAGE_PORT, start_outage, start_worker
from bench.rack.trial import PARTS, CalmDay, RackTrial
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
ALL: Mapping[str, Callable[[Lab], ScenarioResult]] = {
    f.__name__: f for f in (features_link, training_link, scoring_link, store_503, slow_link, driver_dies)
}
