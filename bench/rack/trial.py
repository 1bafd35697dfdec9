"""Workspaces of their own on a cluster's hosts: what one scenario does is not seen by the next."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.rack.day import PIPELINE, RackCluster, tail
from bench.rack.hosts import PRIVATE, Host
from bench.rack.losses import PROPERTIES, Losses, losses
from bench.rack.services import S3_PORT
from headrace.storage import local
from tests.s3_server import BUCKET, environ_of

#: The last stages of the day's parts: each is a command of its own.
PARTS = ("ingest", "features", "train", "promote", "score")


@dataclass(frozen=True)
class RackTrial:
    """Lake and store, and on each host a home, a scratch folder and Spark's logs of events."""

    cluster: RackCluster
    name: str
    ds: str
    #: Of the store, as its processes know it.
    port: int = S3_PORT

    @staticmethod
    def create(rack: RackCluster, name: str, ds: str, port: int = S3_PORT) -> RackTrial:
        """Return a workspace in which there is nothing yet."""
        root, endpoint = f"s3://{BUCKET}/{name}", f"http://{rack.services.name}:{port}"
        spark = {**PROPERTIES, "eventLog.dir": f"file://{PRIVATE}/events/{name}"}
        spark["executorEnv.AWS_ENDPOINT_URL"] = endpoint
        places = {"lake": f"{root}/lake", "store": f"{root}/store", "scratch": str(PRIVATE / "trials" / name)}
        settings = {**rack.settings, **places, **{f"spark.properties.spark.{k}": v for k, v in spark.items()}}
        return RackTrial(replace(rack, settings=settings, home=PRIVATE / "home" / name), name, ds, port)

    @property
    def root(self) -> str:
        """The URI below which lake and store are."""
        return f"s3://{BUCKET}/{self.name}"

    @property
    def objects(self) -> Path:
        """The same as files of the server's."""
        return self.cluster.services.folder / "s3" / "buckets" / BUCKET / self.name

    @property
    def log(self) -> Path:
        """Return the log of its commands."""
        return self.cluster.logs / f"{self.name}.log"

    def scratch(self, host: Host) -> list[Path]:
        """Return the files that tasks have left on a host."""
        # Folders may go while one looks.
        return [
            Path(folder, name) for folder, _, names in os.walk(host.folder / "trials" / self.name) for name in names
        ]

    def start(self, driver: Host, *words: str) -> subprocess.Popen[bytes]:
        """Start `headrace WORDS...` on the cluster."""
        (local(driver.folder) / "events" / self.name).make_dir()
        endpoint = f"http://{self.cluster.services.name}:{self.port}"
        return driver.start(self.cluster.words(driver, *words), self.log, environ_of(endpoint))

    def start_part(self, driver: Host, part: str) -> subprocess.Popen[bytes]:
        """Start the stages up to the last one of a part; those before are done, and pass."""
        return self.start(driver, "run", PIPELINE, "--ds", self.ds, "--to", part)

    def end(self, running: subprocess.Popen[bytes], seconds: float | None = None) -> None:
        """Wait for a command.

        Raises:
            RuntimeError: it failed.
        """
        code = running.wait(seconds)
        if code:
            raise RuntimeError(f"{self.name}: exit code {code}; {tail(self.log)}")

    def run_part(self, part: str) -> float:
        """Run the stages of a part on the host of the services; seconds."""
        begin = time.perf_counter()
        self.end(self.start_part(self.cluster.services, part))
        return time.perf_counter() - begin

    def events(self, driver: Host) -> list[Path]:
        """Return Spark's logs of the applications of a driver's host; while one runs, its own has another name."""
        return sorted((driver.folder / "events" / self.name).glob("*"))

    def losses(self, driver: Host) -> Losses:
        """Return what Spark lost and made again in the applications of a driver's host."""
        return losses(self.events(driver))


class CalmDay:
    """A day to which nothing happens, run as far as somebody asks, with a copy of the workspace after each part."""

    def __init__(self, rack: RackCluster, ds: str) -> None:
        self._trial = RackTrial.create(rack, "calm", ds)
        self._snapshots = rack.services.folder / "kept"
        #: By part.
        self._seconds: dict[str, float] = {}

    def seconds(self, parts: Sequence[str]) -> float:
        """Return the seconds that some parts took."""
        self._run(parts[-1])
        return sum(self._seconds[part] for part in parts)

    def begin(self, name: str, after: str, port: int = S3_PORT) -> RackTrial:
        """Create a workspace as it is after a part."""
        self._run(after)
        trial = RackTrial.create(self._trial.cluster, name, self._trial.ds, port)
        home = trial.cluster.services.folder / "home"
        for snapshot, place in (
            (self._snapshots / after / "objects", trial.objects),
            (self._snapshots / after / "home", home / name),
        ):
            shutil.copytree(snapshot, place)
        return trial

    def check(self, trial: RackTrial, last: str) -> None:
        """Compare another workspace's dataset, weights and scores, up to a part.

        Raises:
            RuntimeError: they differ.
        """
        self._run(last)
        words = [sys.executable, "-m", "bench.rack.compare", self._trial.root, trial.root, trial.ds, last]
        print(self._trial.cluster.services.run(words), end="", flush=True)

    def _run(self, last: str) -> None:
        for part in PARTS[: PARTS.index(last) + 1]:
            if part in self._seconds:
                continue
            if part == "ingest":
                services = self._trial.cluster.services
                self._trial.end(self._trial.start(services, "generate", PIPELINE, "--until", self._trial.ds))
            self._seconds[part] = self._trial.run_part(part)
            home = self._trial.cluster.services.folder / "home" / self._trial.name
            local(home).make_dir()
            for name, place in (("objects", self._trial.objects), ("home", home)):
                shutil.copytree(place, self._snapshots / part / name)
