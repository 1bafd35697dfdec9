"""Spark, S3 and PostgreSQL on hosts that share nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.rack.hosts import PRIVATE, Host, rack
from bench.rack.services import (
    PASSWORD,
    spark_settings,
    start_postgres,
    start_s3,
    start_spark,
    store_environ,
    warehouse_settings,
)
from headrace.workspace import checkout, s3_dir
from tests.s3_server import jars

SIDE = Path(__file__).with_name("spark_side.py")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    if not any(jars().glob("s3proxy-*.jar")) or not any(s3_dir().glob("*.jar")):
        pytest.skip("no S3 server, or no Spark for S3: run `make s3proxy s3`")
    folder = tmp_path_factory.mktemp("cluster")
    with rack(folder / "rack", 3) as found:
        start_s3(found[0], folder / "s3.log")
        for host in found:
            host.environ.update({**store_environ(found[0]), "PYTHONPATH": str(checkout())})
        start_spark(found[0], found[1:], folder)
        yield found


def test_executors_of_two_hosts_share_the_store_and_nothing_else(hosts: list[Host]) -> None:
    settings = [f"{k}={json.dumps(v)}" for k, v in spark_settings(hosts[0], hosts[0], 2).items()]
    said = json.loads(hosts[0].run([sys.executable, SIDE, json.dumps(settings)]).splitlines()[-1])
    assert sorted(host for host, _, _ in said["tasks"]) == ["host1", "host2"]
    assert sum(part for _, part, _ in said["tasks"]) == 4950
    assert all(fresh for _, _, fresh in said["tasks"])
    assert said["total"] == 10_000 * 9_999 // 2


def test_a_host_reaches_anothers_postgresql_by_its_password(hosts: list[Host], tmp_path: Path) -> None:
    start_postgres(hosts[0], hosts[1:], tmp_path / "log")
    ask = """
import sys
from pathlib import Path
from headrace.config import load_spec
from headrace.publish.postgres.server import connect
from headrace.workspace import Workspace
with connect(load_spec("clicks", sys.argv[1:]).publish.warehouse, Workspace(Path("/tmp/var"))) as conn:
    print(conn.execute("SELECT inet_client_addr()").fetchone()[0])
"""
    settings = [f"{k}={json.dumps(v)}" for k, v in warehouse_settings(hosts[0]).items()]
    assert hosts[2].run([sys.executable, "-c", ask, *settings]).split()[-1] == hosts[2].address
    (hosts[2].folder / PASSWORD.relative_to(PRIVATE)).write_text("another")
    with pytest.raises(RuntimeError, match="password authentication failed"):
        hosts[2].run([sys.executable, "-c", ask, *settings])
