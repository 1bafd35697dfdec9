"""A master and a worker of Spark on loopback, with the REST API and the pages."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.jobs.submit import spark_home
from tests.dags.service import free_port


@dataclass(frozen=True)
class Standalone:
    """Addresses and folders of a standalone cluster."""

    port: int
    rest: int
    web: int

    @property
    def url(self) -> str:
        """Return the master's URL."""
        return f"spark://127.0.0.1:{self.port}"


@contextmanager
def standalone(folder: Path, worker: Sequence[str] = (), cores: int = 2) -> Iterator[Standalone]:
    """They, with their files in a folder, while the block runs. Memory is what the worker counts, no more.

    Args:
        folder: theirs.
        worker: what the worker's command begins with: of a mount namespace of its own, in which Spark lies in `folder`.
        cores: that the worker counts.
    """
    place = Standalone(free_port(), free_port(), free_port())
    conf = folder / "spark.properties"
    rest_is = {"enabled": "true", "host": "127.0.0.1", "port": str(place.rest)}
    conf.write_text("".join(f"spark.master.rest.{key} {value}\n" for key, value in rest_is.items()))
    env = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOG_DIR": str(folder), "SPARK_WORKER_DIR": str(folder)}
    start, address = [str(spark_home() / "bin" / "spark-class")], ["--host", "127.0.0.1"]
    master = [
        "org.apache.spark.deploy.master.Master",
        *address,
        "--port",
        str(place.port),
        "--webui-port",
        str(place.web),
    ]
    executors = ["org.apache.spark.deploy.worker.Worker", *address, "--webui-port", "0"]
    executors += ["--cores", str(cores), "--memory", "16g"]
    words = [[*start, *master, "--properties-file", str(conf)], [*start, *executors, place.url]]
    envs = [env, env]
    if worker:
        home = folder / "spark"
        home.mkdir()
        # The worker's Spark is seen at another place before its own is hidden.
        bind = f"mount --bind '{spark_home()}' '{home}' && exec \"$@\""
        words[1] = ["unshare", "-m", "sh", "-c", bind, "sh", *worker]
        words[1] += [str(home / "bin" / "spark-class"), *executors, place.url]
        envs[1] = env | {"SPARK_HOME": str(home), "SPARK_SCALA_VERSION": "2.13"}
    with (folder / "log").open("wb") as log:
        daemons = [subprocess.Popen(w, env=e, stdout=log, stderr=log) for w, e in zip(words, envs, strict=True)]
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
