"""Tasks of a cluster with an archive and a lake in S3: `python packed_side.py MASTER ARCHIVE HOME LAKE`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import headrace
from headrace.compute import native
from headrace.config import Spark
from headrace.config.workspace import Workspace
from headrace.jobs.submit import environment
from headrace.lake.spark.session import session
from headrace.udfs.arrow import xxhash64_integers


def of_executor(numbers: Iterator[int]) -> Iterator[dict[str, object]]:
    """Goes to the executor by value, what it names by its name: the archive's."""
    level = native.built("libheadrace_dataset.so")
    hashes = xxhash64_integers(np.fromiter(numbers, np.int64)).tolist()
    python = os.path.relpath(sys.executable)
    yield {"hashes": hashes, "python": python, "headrace": headrace.__file__, "library": str(level)}


def main(master: str, archive: str, home: str, lake: str) -> None:
    """Print what two tasks in Python said, and the numbers that the executors' JVMs wrote to the lake and read there,
    as JSON."""
    properties = {
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.archives": f"{archive}#environment",
        "spark.pyspark.python": "./environment/bin/python",
    }
    conf = Spark(master=master, properties=properties)
    os.environ.update(environment(conf))
    ws = Workspace(Path(home), lake_uri=lake)
    with session(conf, ws, "packed") as spark:
        reports = spark.sparkContext.parallelize(range(6), 2).mapPartitions(of_executor).collect()
        numbers = (ws.lake / "numbers").uri
        spark.range(6).coalesce(1).write.parquet(numbers)
        read = sorted(row.id for row in spark.read.schema("id long").parquet(numbers).collect())
    print(json.dumps({"tasks": reports, "numbers": read}))


if __name__ == "__main__":
    main(*sys.argv[1:])
