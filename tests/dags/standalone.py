"""A master and a worker of Spark on loopback, with the REST API and the pages."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.jobs.submit import spark_home
from tests.dags.service import free_port


@dataclass(frozen=True)
class Standalone:
    """Where they are."""

    port: int
    rest: int
    web: int

    @property
    def url(self) -> str:
        """Of the master."""
        return f"spark://127.0.0.1:{self.port}"


@contextmanager
def standalone(folder: Path) -> Iterator[Standalone]:
    """They, with their files in a folder, while the block runs. Memory is what the worker counts, no more."""
    place = Standalone(free_port(), free_port(), free_port())
    conf = folder / "spark.properties"
    rest_is = {"enabled": "true", "host": "127.0.0.1", "port": str(place.rest)}
    conf.write_text("".join(f"spark.master.rest.{key} {value}\n" for key, value in rest_is.items()))
    env = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOG_DIR": str(folder), "SPARK_WORKER_DIR": str(folder)}
    start, at = [str(spark_home() / "bin" / "spark-class")], ["--host", "127.0.0.1"]
    master = ["org.apache.spark.deploy.master.Master", *at, "--port", str(place.port), "--webui-port", str(place.web)]
    worker = ["org.apache.spark.deploy.worker.Worker", *at, "--cores", "2", "--memory", "16g", "--webui-port", "0"]
    words = [[*master, "--properties-file", str(conf)], [*worker, place.url]]
    with (folder / "log").open("wb") as log:
        daemons = [subprocess.Popen([*start, *w], env=env, stdout=log, stderr=log) for w in words]
    try:
        end = time.monotonic() + 120
        while not _has_worker(place.web):
            assert time.monotonic() < end, (folder / "log").read_text()[-3000:]
            time.sleep(0.2)
        yield place
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait()


def _has_worker(web: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{web}/json/", timeout=10) as answer:
            return bool(json.load(answer)["workers"])
    except OSError:
        return False
