"""A Spark job on a rack's hosts: `python spark_side.py SETTINGS`, which prints what it found as JSON."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from headrace.config import load_spec
from headrace.config.workspace import Workspace
from headrace.lake.spark.session import session
from tests.rack.support import UNSHARED


def of_executor(numbers: Iterator[int]) -> Iterator[tuple[str, int, bool]]:
    """Leaves a file in each place that is a host's own, where none may be from another host's task."""
    values = list(numbers)
    time.sleep(0.5)  # each executor has one of the tasks
    fresh = not any(Path(folder, "was-here").exists() for folder in UNSHARED)
    for folder in UNSHARED:
        Path(folder, "was-here").touch()
    yield socket.gethostname(), sum(values), fresh


def main(settings: str) -> None:
    """Tasks on executors, and a Delta table in the store that they write and read."""
    spec = load_spec("clicks", json.loads(settings))
    ws = Workspace.from_environment(Path(os.environ["HOME"]) / "var", os.environ)
    with session(spec.spark, ws, "rack") as spark:
        tasks = spark.sparkContext.parallelize(range(100), 2).mapPartitions(of_executor).collect()
        table = (ws.lake / "numbers").uri
        spark.range(10_000).write.format("delta").save(table)
        total = spark.read.format("delta").load(table).selectExpr("sum(id)").first()
    assert total is not None
    print(json.dumps({"tasks": tasks, "total": total[0]}))


if __name__ == "__main__":
    main(sys.argv[1])
