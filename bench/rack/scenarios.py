"""A day on hosts that share nothing, compared with one machine's. What goes wrong there: faults.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bench.rack.day import PIPELINE, RANKS, RackCluster, cluster, tail, to_promote
from bench.rack.hosts import PRIVATE
from bench.rack.rows import ScenarioResult
from bench.rack.waiting import timed
from headrace.workspace import checkout
from tests.s3_server import BUCKET

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


ALL: Mapping[str, Callable[[ScenarioPlan], ScenarioResult]] = {f.__name__: f for f in (day, train, packed)}
