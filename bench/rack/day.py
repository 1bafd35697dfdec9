"""A cluster of hosts that share nothing but S3, and headrace's commands on it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.rack.hosts import PRIVATE, Host, rack
from bench.rack.services import spark_settings, start_postgres, start_s3, start_spark, store_environ, warehouse_settings
from headrace.storage import local
from headrace.workspace import checkout

PIPELINE = "clicks"
HOME = PRIVATE / "home" / "var"
#: Ranks, and executors that run at once.
RANKS = 2


@dataclass(frozen=True)
class RackCluster:
    """Hosts: S3, PostgreSQL and Spark's master on the first, a worker on each of the others that has none of these."""

    hosts: Sequence[Host]
    #: What all processes on this machine say.
    logs: Path
    #: Of the pipeline, besides where it runs.
    settings: Mapping[str, object]
    #: `--home`, on every host.
    home: Path = HOME

    @property
    def services(self) -> Host:
        return self.hosts[0]

    def words(self, driver: Host, *words: str) -> list[str]:
        """Return the command line of `headrace WORDS...` on a host."""
        spark = spark_settings(self.services, driver, RANKS)
        return [*_headrace(), *words, "--home", str(self.home), *_sets({**self.settings, **spark, **self._warehouse})]

    @property
    def _warehouse(self) -> Mapping[str, str]:
        return warehouse_settings(self.services)

    def start(self, driver: Host, log: str, *words: str) -> subprocess.Popen[bytes]:
        """Start `headrace WORDS...` on the cluster; what it says is appended to a file of `logs`."""
        return driver.start(self.words(driver, *words), self.logs / log)

    def run(self, driver: Host, log: str, *words: str) -> None:
        """Run it.

        Raises:
            RuntimeError: it failed.
        """
        code = self.start(driver, log, *words).wait()
        if code:
            line = f"headrace {' '.join(words)} on {driver.name}"
            raise RuntimeError(f"{line}: exit code {code}; {tail(self.logs / log)}")

    def generate(self, driver: Host, ds: str) -> None:
        """Generate the landing files, on the driver's host."""
        self.run(driver, "generate.log", "generate", PIPELINE, "--until", ds)

    def ingest(self, driver: Host, ds: str) -> None:
        """Generate the landing files and ingest them."""
        self.generate(driver, ds)
        self.run(driver, "ingest.log", "run", PIPELINE, "--ds", ds, "--to", "ingest")

    def train(self, driver: Host, ds: str) -> None:
        """Run the stages from `features` to `promote`."""
        self.run(driver, "day.log", *to_promote(ds))

    def whole_day(self, driver: Host, ds: str) -> None:
        """Run all stages from `ingest` to `publish` to PostgreSQL and `report`."""
        self.run(driver, "day.log", "run", PIPELINE, "--ds", ds)

    def pack(self, driver: Host, archive: str, *excluded: str) -> None:
        """Pack the environment, but for some packages, as an archive in the store.

        Raises:
            RuntimeError: it failed.
        """
        words = [*_headrace(), "pack", archive, *(word for name in excluded for word in ("--leave-out", name))]
        code = driver.start(words, self.logs / "pack.log").wait()
        if code:
            raise RuntimeError(f"headrace pack: exit code {code}; {tail(self.logs / 'pack.log')}")

    def run_alone(self, home: Path, log: str, *words: str) -> None:
        """Run it on the first host as on one machine: on local files, with a local master, below another home.

        Raises:
            RuntimeError: it failed.
        """
        line = [*_headrace(), *words, "--home", str(home), *_sets({"spark.master": "local[2]", **self.settings})]
        environ = {f"HEADRACE_{root}": "" for root in ("LAKE", "STORE", "SCRATCH")}
        code = self.services.start(line, self.logs / log, environ).wait()
        if code:
            raise RuntimeError(f"headrace {' '.join(words)} on one machine: exit code {code}; {tail(self.logs / log)}")


@contextmanager
def cluster(
    folder: Path,
    settings: Mapping[str, object],
    workers: int = 2,
    drivers: int = 0,
    cores: int = 1,
    bare_workers: bool = False,
) -> Iterator[RackCluster]:
    """Start a rack with services and workers, while the block runs.

    Args:
        folder: new; for the hosts' files and the logs.
        settings: of the pipeline.
        workers: hosts with a worker.
        drivers: further hosts, with nothing.
        cores: task slots of each worker.
        bare_workers: whether these hosts have Spark alone, and nothing of the checkout's.
    """
    logs = folder / "logs"
    local(logs).make_dir()
    bare = range(1, 1 + workers) if bare_workers else ()
    with rack(folder / "hosts", 1 + workers + drivers, bare=bare) as hosts:
        start_s3(hosts[0], logs / "s3.log")
        for host in hosts:
            host.environ.update({**store_environ(hosts[0]), "COLUMNS": "160"})
            if not host.bare:
                host.environ["PYTHONPATH"] = str(checkout())
        start_postgres(hosts[0], hosts[1:], logs / "postgres.log")
        start_spark(hosts[0], hosts[1 : 1 + workers], logs, cores)
        yield RackCluster(hosts, logs, settings)


def to_promote(ds: str) -> list[str]:
    """Return the words of `headrace run` up to the stage promote."""
    return ["run", PIPELINE, "--ds", ds, "--to", "promote"]


def tail(log: Path, lines: int = 25) -> str:
    """Return the end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _headrace() -> list[str]:
    return [sys.executable, "-m", "headrace.cli"]


def _sets(settings: Mapping[str, object]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
