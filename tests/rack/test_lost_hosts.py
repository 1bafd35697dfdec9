"""Horovod's driver notices a rank's host that is gone without a word, and Spark's master a driver's."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.rack.cluster import MASTER_PORT, start_spark
from bench.rack.hosts import rack

#: On the rank's host: Horovod's service, whose answer never comes.
SERVICE = """
import time
from horovod.runner.common.util.network import BasicService, PingRequest
class Late(BasicService):
    def _handle(self, request, address):
        if isinstance(request, PingRequest):
            return super()._handle(request, address)
        print("asked", flush=True)
        time.sleep(1000)
print(Late("late", b"key", {"eth0"}).get_port(), flush=True)
time.sleep(1000)
"""
#: On the driver's: who waits for that answer.
CLIENT = """
import sys
from contextlib import nullcontext
from headrace.train.launch.hosts import notice_lost_hosts
from horovod.runner.common.util.network import BasicClient
address, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
with notice_lost_hosts(seconds) if seconds else nullcontext():
    client = BasicClient("late", {"eth0": [(address, port)]}, b"key", 0, attempts=1)
    try:
        client._send("the exit code")
    except OSError as e:
        print(type(e).__name__)
"""


def read(log: Path, count: int) -> list[str]:
    """The lines of a log, when there are as many as wanted."""
    end = time.monotonic() + 120
    while len(lines := log.read_text().splitlines()) < count:
        assert time.monotonic() < end
        time.sleep(0.05)
    return lines


@pytest.mark.parametrize("seconds", [2, 0])
def test_who_waits_for_a_host_that_was_cut_off_is_told(tmp_path: Path, seconds: float) -> None:
    """The wait goes on without `notice_lost_hosts` (0 seconds)."""
    with rack(tmp_path / "rack", 2) as hosts:
        output = tmp_path / "service"
        hosts[1].start([sys.executable, "-c", SERVICE], output)
        (port,) = read(output, 1)
        log = tmp_path / "client"
        client = hosts[0].start([sys.executable, "-c", CLIENT, hosts[1].address, port, str(seconds)], log)
        assert read(output, 2)[1] == "asked"
        hosts[1].cut()
        if seconds:
            assert client.wait(60) == 0
            assert log.read_text().split()[-1] == "TimeoutError"
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                client.wait(6)


def test_the_master_is_told_of_a_host_that_was_cut_off(tmp_path: Path) -> None:
    with rack(tmp_path / "rack", 2) as hosts:
        start_spark(hosts[0], [], tmp_path)
        for name in ("tcp_keepalive_time", "tcp_keepalive_intvl", "tcp_keepalive_probes"):
            hosts[0].set_network(name, 1)
        driver = f"import socket, time; s = socket.create_connection(('host0', {MASTER_PORT})); time.sleep(1000)"
        hosts[1].start([sys.executable, "-c", driver], tmp_path / "driver")

        def wait_for_connections(count: int) -> None:
            end = time.monotonic() + 60
            while hosts[0].run(["ss", "-Htn", "state", "established"]).count(hosts[1].address) != count:
                assert time.monotonic() < end
                time.sleep(0.1)

        wait_for_connections(1)
        hosts[1].cut()
        wait_for_connections(0)
