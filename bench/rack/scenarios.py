"""A day on hosts that share nothing, compared with one machine's. What goes wrong there: faults.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bench.rack.day import PIPELINE, RANKS, Cluster, cluster, tail, to_promote
from bench.rack.hosts import PRIVATE
from bench.rack.rows import Row
from bench.rack.waiting import timed
from headrace.workspace import checkout
from tests.s3_server import BUCKET

ONE = PRIVATE / "home" / "one"
_ARCHIVE = f"s3://{BUCKET}/environment.tar.gz"
#: Spark brings its own pyspark, and ranks on processors compile nothing for GPUs.
_NOT_OF_EXECUTORS = ("pyspark", "triton")


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

    def below(self, name: str) -> Day:
        """The same in a folder of that name."""
        return replace(self, folder=self.folder / name)

    @property
    def long_training(self) -> Mapping[str, object]:
        """Enough steps that something can happen between them."""
        return {**self.settings, "train.epochs": 60, "train.patience": None}


def day(given: Day) -> Row:
    """A whole day over the rack, and the same on one machine: equal datasets, weights and scores, to the bit."""
    with cluster(given.folder, given.settings) as found:
        driver = found.services
        found.generate(driver, given.ds)
        took = timed(lambda: found.whole_day(driver, given.ds))
        alone = _alone(found, given)
        print(found.services.run(_comparison(given)), flush=True)
    return Row("day", "nothing", took, alone)


def train(given: Day) -> Row:
    """The stages from features to promote, over the rack and on one machine: equal datasets and weights, to the bit."""
    with cluster(given.folder, given.settings) as found:
        found.ingest(found.services, given.ds)
        took = timed(lambda: found.train(found.services, given.ds))
        found.run_alone(ONE, "one.log", "generate", PIPELINE, "--until", given.ds)
        found.run_alone(ONE, "one.log", "run", PIPELINE, "--ds", given.ds, "--to", "ingest")
        alone = timed(lambda: found.run_alone(ONE, "one.log", *to_promote(given.ds)))
        print(found.services.run(_comparison(given)), flush=True)
    return Row("train", "nothing", took, alone)


def packed(given: Day) -> Row:
    """A whole day whose tasks and ranks are on hosts with Spark and a Python without packages: all else comes with the
    archive of the environment, from S3. The same dataset, weights and scores as one machine's with its checkout."""
    with cluster(given.folder, given.settings, bare_workers=True) as found:
        driver = found.services
        for host in found.hosts[1:]:
            host.run(["bash", "-c", f"! test -e {checkout()}/python && ! test -e {sys.executable}"])
        found.generate(driver, given.ds)
        packing = timed(lambda: found.pack(driver, _ARCHIVE, *_NOT_OF_EXECUTORS))
        print(f"{tail(found.logs / 'pack.log', 3)}\npacked in {packing:.0f} s", flush=True)
        of_archive = {"archives": f"{_ARCHIVE}#environment", "pyspark.python": "./environment/bin/python"}
        settings = {**found.settings, **{f"spark.properties.spark.{k}": v for k, v in of_archive.items()}}
        took = timed(lambda: replace(found, settings=settings).whole_day(driver, given.ds))
        alone = _alone(found, given)
        print(found.services.run(_comparison(given)), flush=True)
    return Row("packed", "nothing", took, alone)


def _alone(found: Cluster, given: Day) -> float:
    """The same day on one machine; seconds."""
    found.run_alone(ONE, "one.log", "generate", PIPELINE, "--until", given.ds)
    return timed(lambda: found.run_alone(ONE, "one.log", "run", PIPELINE, "--ds", given.ds))


def _comparison(given: Day) -> list[str]:
    return [sys.executable, "-m", "bench.rack.compare", str(ONE), f"s3://{BUCKET}", given.ds]


ALL: Mapping[str, Callable[[Day], Row]] = {f.__name__: f for f in (day, train, packed)}
