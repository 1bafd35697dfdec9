"""Services of a cluster: an S3 server, PostgreSQL, Spark's master on the first host, and its workers."""

from __future__ import annotations

import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.rack.hosts import PRIVATE, Host
from headrace.publish.embedded.processes import program, reachable, server_account
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
