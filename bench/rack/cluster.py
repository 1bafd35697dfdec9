"""A cluster of hosts that share nothing but S3: its services, headrace's commands on it, and workspaces of its own.

Services are an S3 server, PostgreSQL, Spark's master on the first host, and its workers. Each trial has workspaces of
its own on the hosts: what one scenario does is not seen by the next. `losses` tells what a Spark application lost and
made again, by its own log of events.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.rack.hosts import PRIVATE, Host, rack
from headrace.config.installation import checkout
from headrace.publish.postgres.processes import program, reachable, server_account
from headrace.storage import local
from tests.s3_server import BUCKET, command, environ_of, prepare

S3_PORT, POSTGRES_PORT, MASTER_PORT = 9000, 5432, 7077
#: Where the store is asked through what can answer 503 in its place, and the file that has it do so: outage.py.
OUTAGE_PORT, OUTAGE = 9001, PRIVATE / "outage"
#: The role that publishes, and its password's file on each host.
ROLE, PASSWORD = "headrace", PRIVATE / "postgres-password"
#: Until a service is there, on a machine that has much else to do.
_START_SECONDS = 600.0
#: On the master's host: whoever says nothing for 30 s is asked three times, each 10 s, for a sign of life. A master has
#: no other way to notice that a driver's host is gone, and keeps its executors for it.
_KEEPALIVE = {"tcp_keepalive_time": 30, "tcp_keepalive_intvl": 10, "tcp_keepalive_probes": 3}


def start_s3(host: Host, log: Path, port: int = S3_PORT) -> None:
    """Start S3Proxy with one bucket. Its files are the host's own."""
    folder = host.folder / "s3"
    prepare(folder, f"http://0.0.0.0:{port}", PRIVATE / "s3")
    host.start(command(PRIVATE / "s3"), log)
    host.wait_for(port, _START_SECONDS)


def start_outage(host: Host, log: Path) -> None:
    """Start a proxy that can answer in place of the S3 server of this host.

    Each request that it refuses is a line of `log`.
    """
    words = [sys.executable, "-m", "bench.rack.outage", host.address, str(OUTAGE_PORT), str(S3_PORT), str(OUTAGE)]
    host.start(words, log)
    host.wait_for(OUTAGE_PORT, _START_SECONDS)


def store_environ(s3: Host, port: int = S3_PORT) -> Mapping[str, str]:
    """Return the variables that tell a process on a host of lake, store and scratch; the credentials are of the
    environment, as AWS's tools want them.
    """
    return {
        **environ_of(f"http://{s3.name}:{port}"),
        "HEADRACE_LAKE": f"s3://{BUCKET}/lake",
        "HEADRACE_STORE": f"s3://{BUCKET}/store",
        "HEADRACE_SCRATCH": str(PRIVATE / "scratch"),
    }


def start_postgres(host: Host, clients: Sequence[Host], log: Path) -> None:
    """Start the PostgreSQL of the wheel, for other hosts, too: it asks for a password, which is in a file on each of
    them.
    """
    secret = secrets.token_urlsafe(24)
    for client in {host.number: host, **{c.number: c for c in clients}}.values():
        file = client.folder / PASSWORD.name
        file.touch(0o600)
        file.write_text(secret)
    account = server_account()
    data, superuser_file = PRIVATE / "postgres", PRIVATE / "postgres-superuser"
    programs = {name: shlex.quote(str(reachable(program(name), account))) for name in ("initdb", "postgres", "psql")}
    switch = (
        ["setpriv", f"--reuid={account.uid}", f"--regid={account.gid}", "--clear-groups"] if account.is_other else []
    )
    host.run(["install", "-d", "-m", "700", "-o", str(account.uid), "-g", str(account.gid), data])
    host.run(["install", "-m", "600", "-o", str(account.uid), "-g", str(account.gid), PASSWORD, superuser_file])
    make = (
        f"{programs['initdb']} -D {data} -U {ROLE} -A scram-sha-256 --pwfile={superuser_file} --no-sync -E UTF8 "
        f"--locale=C"
    )
    host.run([*switch, "bash", "-c", f"{make} && echo 'host all all 10.77.0.0/24 scram-sha-256' >> {data}/pg_hba.conf"])
    serve = f"exec {programs['postgres']} -D {data} -h 0.0.0.0 -p {POSTGRES_PORT} -k {data}"
    host.start([*switch, "bash", "-c", serve], log)
    host.wait_for(POSTGRES_PORT, _START_SECONDS)
    connect = f"PGPASSWORD=$(cat {PASSWORD}) {programs['psql']} -h {host.name} -U {ROLE} -d postgres"
    # It listens before it is ready.
    begun = f"until {connect} -c 'SELECT 1' >/dev/null 2>&1; do sleep 0.2; done"
    host.run(["bash", "-c", f"{begun}; {connect} -c 'CREATE DATABASE {ROLE}'"], timeout=_START_SECONDS)


def warehouse_settings(postgres: Host) -> Mapping[str, str]:
    """Return the pipeline's `publish.warehouse` for it."""
    settings = {"kind": "postgres", "host": postgres.name, "port": str(POSTGRES_PORT), "user": ROLE, "database": ROLE}
    settings |= {"password_file": str(PASSWORD), "sslmode": "disable"}
    return {f"publish.warehouse.{key}": value for key, value in settings.items()}


def start_spark(master: Host, workers: Sequence[Host], logs: Path, cores: int = 1, memory: str = "4g") -> None:
    """Start a standalone cluster. Executors inherit their worker's environment, and so its host's.

    The master asks for signs of life as docs/cluster.md has it: it hears of a host that is cut off after a minute.

    Args:
        master: where it is.
        workers: a worker on each.
        logs: the daemons'.
        cores: task slots of each worker.
        memory: that a worker counts for its executors' JVMs.

    Raises:
        RuntimeError: a worker did not register.
    """
    java = ["java", "-Xmx512m", "-cp", f"{master.spark_home}/jars/*"]
    address = ["--host", master.name, "--port", str(MASTER_PORT), "--webui-port", "0"]
    log = logs / "master.log"
    for name, value in _KEEPALIVE.items():
        master.set_network(name, value)
    words = [*java, "-Dspark.rpc.io.enableTcpKeepAlive=true", "org.apache.spark.deploy.master.Master", *address]
    master.start(words, log, _spark_environ(master))
    master.wait_for(MASTER_PORT, _START_SECONDS)
    started = [start_worker(host, master, logs, cores, memory) for host in workers]
    end = time.monotonic() + _START_SECONDS
    while log.read_text(errors="replace").count("Registering worker") < len(workers):
        if time.monotonic() > end or any(worker.poll() is not None for worker in started):
            raise RuntimeError(f"not all of {len(workers)} workers registered; see {logs}")
        time.sleep(0.1)


def start_worker(host: Host, master: Host, logs: Path, cores: int = 1, memory: str = "2g") -> subprocess.Popen[bytes]:
    """Start a worker of Spark's standalone cluster."""
    (local(host.folder) / "work").make_dir()
    words = ["java", "-Xmx512m", "-cp", f"{host.spark_home}/jars/*", "org.apache.spark.deploy.worker.Worker"]
    words += ["--host", host.name, "--cores", str(cores), "--memory", memory, "--webui-port", "0"]
    words += ["--work-dir", str(PRIVATE / "work"), f"spark://{master.name}:{MASTER_PORT}"]
    return host.start(words, logs / f"worker-{host.name}.log", _spark_environ(host))


def spark_settings(master: Host, driver: Host, executors: int) -> Mapping[str, str]:
    """Return the pipeline's `spark` for a driver on a host, and one slot an executor."""
    properties = {
        "driver.host": driver.name,
        "driver.bindAddress": driver.address,
        "executor.cores": "1",
        "cores.max": str(executors),
        "executor.memory": "1g",
        "ui.enabled": "false",
        "dynamicAllocation.enabled": "false",
        "sql.shuffle.partitions": "4",
    }
    settings = {f"spark.properties.spark.{key}": value for key, value in properties.items()}
    return {"spark.master": f"spark://{master.name}:{MASTER_PORT}", **settings}


def _spark_environ(host: Host) -> dict[str, str]:
    # Without the version of Scala an executor looks for a build of Spark's own sources.
    environ = {"SPARK_HOME": str(host.spark_home), "SPARK_SCALA_VERSION": "2.13"}
    return {**environ, "SPARK_LOCAL_DIRS": str(PRIVATE / "spark"), "SPARK_LOG_DIR": str(PRIVATE / "logs")}


#: Properties of an application that writes such a log, besides its folder (`spark.eventLog.dir`), which must be there.
PROPERTIES = {"eventLog.enabled": "true", "eventLog.compress": "false", "eventLog.rolling.enabled": "false"}


@dataclass(frozen=True)
class Losses:
    """Losses of some applications."""

    executors: int
    #: Tasks whose work was lost, by Spark's name of the reason.
    tasks: Mapping[str, int]
    #: Attempts of stages that failed.
    stages: int

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {name}" for name, count in sorted(self.tasks.items()))
        counts = [
            _many(self.executors, "executor"),
            _many(sum(self.tasks.values()), "task") + (f" ({reasons})" if reasons else ""),
            _many(self.stages, "attempt") + " of a stage",
        ]
        return ", ".join(counts)


def losses(logs: Sequence[Path]) -> Losses:
    """Read applications' logs; that of a driver that was killed as far as it goes."""
    executors, stages, tasks = 0, 0, Counter[str]()
    for log in logs:
        for event in _events(log):
            match event["Event"]:
                case "SparkListenerExecutorRemoved":
                    executors += 1
                case "SparkListenerStageCompleted":
                    stages += "Failure Reason" in event["Stage Info"]
                case "SparkListenerTaskEnd":
                    reason = event["Task End Reason"]["Reason"]
                    tasks[reason] += reason != "Success"
    return Losses(executors, {name: count for name, count in tasks.items() if count}, stages)


def _events(log: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the events up to the end of the application: what it ends itself then is no loss."""
    for line in log.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            return
        event = json.loads(line)
        if event["Event"] == "SparkListenerApplicationEnd":
            return
        yield event


def _many(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


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
