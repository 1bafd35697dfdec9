"""A day of features on two executors without a common folder: `-m tests.spark.own_scratch_side SPEC HOME DAY`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from headrace.config import build_spec
from headrace.drift.count_day import count_day
from headrace.features.build.stage import BuildFeatures
from headrace.features.engines.arrow import fit, fit_exchange, keyed_exchange
from headrace.lake.exchange import Block, exchange, small_batches
from headrace.lake.session import session
from headrace.lake.tasks import numbered
from headrace.stage import run_stage
from headrace.workspace import Workspace

MASTER = "local-cluster[2,1,1024]"


def executor() -> int:
    """In a task: the JVM above its worker and the worker's daemon."""
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])


def of_executor(numbers: Iterator[int]) -> Iterator[tuple[int, str, list[str]]]:
    """(process, its folder, the decoded files there)."""
    time.sleep(1)  # so that the other executor gets the other task
    folder = Path(os.environ["SPARK_LOCAL_DIRS"].split(",")[0])
    for _ in numbers:
        yield executor(), str(folder), [p.parent.name for p in folder.glob("encoded/*/*/*/*/pieces.json")]


def executors(spark: SparkSession) -> dict[int, tuple[str, list[str]]]:
    """By process."""
    found: dict[int, tuple[str, list[str]]] = {}
    while len(found) < 2:
        said = numbered(spark.sparkContext, 2).mapPartitions(of_executor).collect()
        found |= {process: (folder, files) for process, folder, files in said}
    return found


def lost_once(spark: SparkSession, marker: Path) -> list[list[int]]:
    """What 4 partitions get of 6 tasks, where an executor ends at the first partition with all that it has sent."""

    def send(task: int) -> Iterator[Block]:
        for k in range(8):
            yield Block(k % 4, task, k, bytes([task, k]))

    def receive(blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
        if not marker.exists():
            marker.touch()
            os.kill(executor(), signal.SIGKILL)
        yield pa.RecordBatch.from_pydict({"x": [list(b"".join(bytes(b.payload) for b in blocks))]})

    with small_batches(spark):
        return sorted(r.x for r in exchange(spark, 6, send, 4, receive, "x array<bigint>").collect())


def main(file: str, home: str, ds: str) -> None:
    """Print the folders that were made and what was seen on the way, as JSON."""
    data = json.loads(Path(file).read_text())
    ws, said = Workspace(Path(home)), dict[str, Any]()
    fit_exchange.MOST_IN_DRIVER = 0

    def noted(*args: Any) -> Any:
        found = keyed_exchange.keyed_tables(*args)
        said.setdefault("tables", []).extend(sorted(name for learned in found.values() for name in learned.tables))
        return found

    fit.keyed_tables = noted  # type: ignore[assignment]
    data["spark"] |= {"master": MASTER, "scratch": "own", "properties": {"spark.executor.memory": "1g"}}
    with session(build_spec(data).spark, ws, "own") as spark:

        def after(step: str) -> None:
            if step == "fit":
                there = executors(spark)
                said["decoded"] = [files for _, files in there.values()]
                process, (folder, _) = there.popitem()
                os.kill(process, signal.SIGKILL)
                shutil.rmtree(folder, ignore_errors=True)

        for engine in ("arrow", "spark"):
            data["features"]["engine"] = engine
            stage = BuildFeatures(count_day, after if engine == "arrow" else lambda step: None)
            manifest = run_stage(stage, build_spec(data), ws, ds).manifest
            said[engine] = manifest.model_dump(mode="json")
        said["lost"] = lost_once(spark, Path(home) / "marker")
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
