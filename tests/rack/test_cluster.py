"""Spark, S3 and PostgreSQL on hosts that share nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.rack.cluster import (
    OUTAGE,
    OUTAGE_PORT,
    PASSWORD,
    spark_settings,
    start_outage,
    start_postgres,
    start_s3,
    start_spark,
    store_environ,
    warehouse_settings,
)
from bench.rack.hosts import PRIVATE, Host, rack
from headrace.config.installation import checkout, s3_dir
from headrace.storage import local
from tests.s3_server import BUCKET, jars

SIDE = Path(__file__).with_name("spark_side.py")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    if not any(jars().glob("s3proxy-*.jar")) or not any(s3_dir().glob("*.jar")):
        pytest.skip("no S3 server, or no Spark for S3: run `make s3proxy s3`")
    folder = tmp_path_factory.mktemp("cluster")
    with rack(folder / "rack", 3) as rack_hosts:
        start_s3(rack_hosts[0], folder / "s3.log")
        for host in rack_hosts:
            host.environ.update({**store_environ(rack_hosts[0]), "PYTHONPATH": str(checkout())})
        start_spark(rack_hosts[0], rack_hosts[1:], folder)
        yield rack_hosts


@pytest.fixture(scope="module")
def job_report(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> tuple[Mapping[str, Any], list[str]]:
    """Return a Spark job's report, and the requests of its driver that the store refused: some of those that commit."""
    log, file = tmp_path_factory.mktemp("outage") / "log", local(hosts[0].folder) / OUTAGE.name
    start_outage(hosts[0], log)
    file.put_text(json.dumps({"containing": f"PUT /{BUCKET}/lake/numbers/_delta_log/{0:020d}.json", "times": 4}))
    # Its client does not try again by itself.
    retry_settings = {"fs.s3a.attempts.maximum": "1", "fs.s3a.retry.throttle.interval": "10ms"}
    properties = {f"spark.properties.spark.hadoop.{k}": v for k, v in retry_settings.items()}
    settings = [f"{k}={json.dumps(v)}" for k, v in {**spark_settings(hosts[0], hosts[0], 2), **properties}.items()]
    endpoint = {"AWS_ENDPOINT_URL": f"http://{hosts[0].name}:{OUTAGE_PORT}"}
    printed = hosts[0].run([sys.executable, SIDE, json.dumps(settings)], endpoint)
    return json.loads(printed.splitlines()[-1]), log.read_text().splitlines()


def test_executors_of_two_hosts_share_the_store_and_nothing_else(
    job_report: tuple[Mapping[str, Any], list[str]],
) -> None:
    tasks = job_report[0]["tasks"]
    assert sorted(host for host, _, _ in tasks) == ["host1", "host2"]
    assert sum(part for _, part, _ in tasks) == 4950
    assert all(fresh for _, _, fresh in tasks)


def test_a_commit_outlasts_refusals_of_a_busy_store(job_report: tuple[Mapping[str, Any], list[str]]) -> None:
    job, refused = job_report
    assert len(refused) == 4
    assert job["total"] == 10_000 * 9_999 // 2


def test_a_host_reaches_anothers_postgresql_by_its_password(hosts: list[Host], tmp_path: Path) -> None:
    start_postgres(hosts[0], hosts[1:], tmp_path / "log")
    ask = """
import sys
from pathlib import Path
from headrace.config import load_spec
from headrace.publish.postgres.server import connect
from headrace.config.workspace import Workspace
with connect(load_spec("clicks", sys.argv[1:]).publish.warehouse, Workspace(Path("/tmp/var"))) as conn:
    print(conn.execute("SELECT inet_client_addr()").fetchone()[0])
"""
    settings = [f"{k}={json.dumps(v)}" for k, v in warehouse_settings(hosts[0]).items()]
    assert hosts[2].run([sys.executable, "-c", ask, *settings]).split()[-1] == hosts[2].address
    (hosts[2].folder / PASSWORD.relative_to(PRIVATE)).write_text("another")
    with pytest.raises(RuntimeError, match="password authentication failed"):
        hosts[2].run([sys.executable, "-c", ask, *settings])
