"""What happens to a day on hosts that share nothing. Each scenario gives a row: what was lost, how long it took."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bench.rack.day import HOME, PIPELINE, RANKS, Cluster, cluster, tail, to_promote
from bench.rack.hosts import PRIVATE
from headrace.errors import EXIT_BUSY
from tests.s3_server import BUCKET

T = TypeVar("T")
_POLL_SECONDS = 0.2
_LIMIT_SECONDS = 900.0
ONE = PRIVATE / "home" / "one"


@dataclass(frozen=True)
class Day:
    """What is run."""

    folder: Path
    ds: str
    rows: int

    @property
    def settings(self) -> Mapping[str, object]:
        """Of the pipeline: as many ranks and threads as one machine's."""
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

    @property
    def long_training(self) -> Mapping[str, object]:
        """Enough steps that something can happen between them."""
        return {**self.settings, "train.epochs": 40}


def day(given: Day) -> str:
    """A whole day over the rack, and the same on one machine: equal datasets, weights and scores, to the bit."""
    with cluster(given.folder, given.settings) as found:
        driver = found.services
        found.ingest(driver, given.ds)
        took = _timed(lambda: found.train(driver, given.ds))
        found.score(driver, given.ds)
        alone = _alone(found, given)
        print(found.services.run(_comparison(given)), flush=True)
    return row("day", "nothing: equal", f"features to promote {took:.0f} s; the whole day of one machine {alone:.0f} s")


def train(given: Day) -> str:
    """The stages from features to promote, over the rack and on one machine: equal datasets and weights, to the bit."""
    with cluster(given.folder, given.settings) as found:
        found.ingest(found.services, given.ds)
        took = _timed(lambda: found.train(found.services, given.ds))
        found.run_alone(ONE, "one.log", "generate", PIPELINE, "--until", given.ds)
        alone = _timed(lambda: found.run_alone(ONE, "one.log", *to_promote(given.ds)))
        print(found.services.run(_comparison(given)), flush=True)
    return row("train", "nothing: equal", f"features to promote {took:.0f} s; one machine, with ingest, {alone:.0f} s")


def slow_link(given: Day) -> str:
    """The link of an executor's host carries 20 Mbit/s for the whole day."""
    with cluster(given.folder, given.settings) as found:
        driver = found.services
        found.ingest(driver, given.ds)
        found.hosts[2].shape(20)
        took = _timed(lambda: found.train(driver, given.ds))
        found.score(driver, given.ds)
        _alone(found, given)
        print(found.services.run(_comparison(given)), flush=True)
    return row("slow_link", "nothing: equal", f"features to promote {took:.0f} s")


def training_link(given: Day) -> str:
    """The host of a rank loses its link in training; a third host has a worker without an executor."""
    with cluster(given.folder, given.long_training, workers=3) as found:
        driver = found.services
        found.ingest(driver, given.ds)
        found.run(driver, "features.log", "run", PIPELINE, "--ds", given.ds, "--to", "features")
        running = found.start(driver, "train.log", "run", PIPELINE, "--ds", given.ds, "--to", "train")
        seen = _until(lambda: _ranks_at(found, 25), running.poll, found.logs / "train.log")
        host = next(h for h in found.hosts if h.name == seen[RANKS - 1]["host"])
        host.cut()
        cut = time.perf_counter()
        said = _until(lambda: _line(found.logs / "train.log", "attempt 2 of"), running.poll, found.logs / "train.log")
        noticed = time.perf_counter() - cut
        code = running.wait(_LIMIT_SECONDS)
        if code:
            raise RuntimeError(f"training: exit code {code}; {tail(found.logs / 'train.log')}")
        took = time.perf_counter() - cut
    step = seen[RANKS - 1]["step"]
    lost = f"cut at step {step}: {said[said.index('attempt') :]}"
    return row("training_link", lost, f"noticed after {noticed:.0f} s, trained after {took:.0f} s")


def driver_dies(given: Day) -> str:
    """The driver's host dies in training; another one runs the day, as soon as the lease lets it."""
    with cluster(given.folder, given.long_training, drivers=1, cores=2) as found:
        driver, other = found.hosts[-1], found.services
        found.ingest(driver, given.ds)
        running = found.start(driver, "day.log", *to_promote(given.ds))
        _until(lambda: _ranks_at(found, 25), running.poll, found.logs / "day.log")
        driver.die()
        died = time.perf_counter()
        refused = 0
        while (code := found.start(other, "again.log", *to_promote(given.ds)).wait()) == EXIT_BUSY:
            refused += 1
            if time.perf_counter() - died > _LIMIT_SECONDS:
                raise RuntimeError(f"the other host was refused {refused} times within {_LIMIT_SECONDS:.0f} s")
        if code:
            raise RuntimeError(f"the other host: exit code {code}; {tail(found.logs / 'again.log')}")
        took = time.perf_counter() - died
        _alone(found, given)
        print(found.services.run(_comparison(given)), flush=True)
    return row("driver_dies", "nothing: equal", f"refused {refused} times (the lease), done after {took:.0f} s")


def row(name: str, lost: str, took: str) -> str:
    """A row of the table."""
    return f"| {name} | {lost} | {took} |"


def _alone(found: Cluster, given: Day) -> float:
    """The same day on one machine; seconds."""
    found.run_alone(ONE, "one.log", "generate", PIPELINE, "--until", given.ds)
    return _timed(lambda: found.run_alone(ONE, "one.log", "run", PIPELINE, "--ds", given.ds))


def _comparison(given: Day) -> list[str]:
    return [sys.executable, "-m", "bench.rack.compare", str(ONE), str(HOME), given.ds]


def _ranks_at(found: Cluster, step: int) -> dict[int, dict[str, Any]]:
    """What the ranks say of themselves in the store, by rank, once all have done so many steps; else nothing."""
    ranks = {}
    for file in (found.services.folder / "s3" / "buckets" / BUCKET / "store" / "models").rglob("rank-*.json"):
        try:
            said = json.loads(file.read_text())
        except (OSError, ValueError):  # it is being replaced
            continue
        ranks[said["rank"]] = said
    reached = [said for said in ranks.values() if said["phase"] == "train" and said["step"] >= step]
    return ranks if len(reached) == RANKS else {}


def _line(log: Path, text: str) -> str:
    return next((line for line in log.read_text(errors="replace").splitlines() if text in line), "")


def _until(ask: Callable[[], T], ended: Callable[[], int | None], log: Path) -> T:
    """What `ask` says when it says something."""
    end = time.monotonic() + _LIMIT_SECONDS
    while not (found := ask()):
        if ended() is not None or time.monotonic() > end:
            raise RuntimeError(f"it never came to that; {tail(log)}")
        time.sleep(_POLL_SECONDS)
    return found


def _timed(act: Callable[[], None]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


ALL: Mapping[str, Callable[[Day], str]] = {f.__name__: f for f in (day, train, slow_link, training_link, driver_dies)}
