"""Hosts as namespaces: what they share, what a cut and a slow link do, and that nothing of them stays."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.rack.hosts import Host, rack
from headrace.config.installation import checkout
from headrace.jobs.submit import spark_home
from tests.rack.support import SHARED, UNSHARED

PORT = 8000


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    folder = tmp_path_factory.mktemp("hosts")
    with rack(folder / "rack", 3) as rack_hosts:
        rack_hosts[0].start([sys.executable, "-m", "http.server", str(PORT), "--directory", "/tmp"], folder / "log")
        rack_hosts[0].wait_for(PORT)
        yield rack_hosts


def fetch(host: Host, path: str = "/") -> str:
    return host.run(["curl", "-sS", "-m", "20", f"http://host0:{PORT}{path}"])


def test_hosts_share_no_file_that_can_be_written(hosts: list[Host]) -> None:
    for host in hosts:
        for folder in UNSHARED:
            host.run(["bash", "-c", f"! test -e {folder}/was-here && echo x > {folder}/was-here"])
        for folder in SHARED:
            host.run(["bash", "-c", f"! touch {folder}/was-here 2>/dev/null"])
    # Nor does one see the other's under another path.
    marker = hosts[0].folder / "was-here"
    assert marker.exists()
    hosts[1].run(["bash", "-c", f"! test -e {marker}"])


def test_a_bare_host_has_spark_and_nothing_of_the_checkouts(tmp_path: Path) -> None:
    with rack(tmp_path / "rack", 2, bare=[1]) as hosts:
        for path in (checkout() / "python", Path(sys.executable), spark_home() / "jars"):
            hosts[0].run(["test", "-e", path])
            hosts[1].run(["test", "!", "-e", path])
        for host in hosts:
            host.run(["test", "-e", host.spark_home / "jars"])
            host.run(["bash", "-c", f"! touch {host.spark_home}/was-here 2>/dev/null"])


def test_each_has_a_name_an_address_and_its_own_processes(hosts: list[Host]) -> None:
    assert [h.run(["hostname"]).strip() for h in hosts] == ["host0", "host1", "host2"]
    seen = {h.run(["readlink", "/proc/self/ns/net"]).strip() for h in hosts}
    assert len(seen) == 3
    assert str(Path("/proc/self/ns/net").readlink()) not in seen
    assert "http.server" in hosts[0].run(["bash", "-c", "cat /proc/*/cmdline | tr '\\0' ' '"])
    assert "http.server" not in hosts[1].run(["bash", "-c", "cat /proc/*/cmdline | tr '\\0' ' '"])
    fetch(hosts[1])


def test_a_cut_link_loses_frames_without_a_word_until_it_is_restored(hosts: list[Host]) -> None:
    """A connection that is refused, reset or ended would end the command with another code than a time-out's."""
    hosts[1].cut()
    try:
        completed = subprocess.run(hosts[1].command(["curl", "-s", "-m", "2", f"http://host0:{PORT}/"]), check=False)
        assert completed.returncode == 28
        assert hosts[1].run(["cat", "/sys/class/net/eth0/carrier"]).strip() == "1"
        fetch(hosts[2])
    finally:
        hosts[1].restore()
    fetch(hosts[1])


def test_a_link_holds_back_what_is_more_than_it_carries(hosts: list[Host]) -> None:
    """The kernel's own count shows the packets that were held back."""
    hosts[0].run(["bash", "-c", "head -c 2000000 /dev/zero > /tmp/zeros"])
    assert "rate 1Gbit " in hosts[0].run(["tc", "qdisc", "show", "dev", "eth0"])
    hosts[0].shape(20)
    fetch(hosts[2], "/zeros")
    queue_state = hosts[0].run(["tc", "-s", "qdisc", "show", "dev", "eth0"])
    assert "rate 20Mbit " in queue_state
    assert not re.search(r"overlimits 0\b", queue_state)
    hosts[0].shape(1000)


def test_a_fault_of_a_tool_is_not_taken_for_a_machine_without_racks(hosts: list[Host]) -> None:
    with pytest.raises(RuntimeError, match="tc qdisc replace"):
        hosts[1].shape(0)


def test_who_may_make_no_namespaces_is_told(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from bench.rack.hosts import NoRack, rack
try:
    with rack(Path({str(tmp_path)!r}) / "rack", 1):
        print("a rack")
except NoRack as e:
    print(f"none: {{e}}")
"""
    words = ["setpriv", "--bounding-set", "-sys_admin", sys.executable, "-c", code]
    completed = subprocess.run(words, capture_output=True, text=True, check=True)
    assert completed.stdout.startswith("none: unshare --net: ")
    assert "not permitted" in completed.stdout


def test_what_runs_on_a_host_can_be_ended_while_the_host_stays(hosts: list[Host], tmp_path: Path) -> None:
    sleeps = hosts[2].start(["sleep", "1000"], tmp_path / "log")
    hosts[2].end_all()
    assert sleeps.poll() is not None
    hosts[2].end_all()
    fetch(hosts[2])


def test_a_host_that_dies_takes_its_processes_and_says_nothing(tmp_path: Path) -> None:
    with rack(tmp_path / "rack", 2) as hosts:
        server = hosts[0].start([sys.executable, "-m", "http.server", str(PORT)], tmp_path / "log")
        hosts[0].wait_for(PORT)
        asks = hosts[1].start(
            ["bash", "-c", f"exec 3<>/dev/tcp/host0/{PORT}; echo connected; cat <&3"], tmp_path / "asks"
        )
        while "connected" not in (tmp_path / "asks").read_text():
            time.sleep(0.02)
        hosts[0].die()
        assert server.poll() is not None
        assert asks.poll() is None
        hosts[1].run(["true"])
    assert asks.wait(10) is not None


def test_nothing_stays_where_the_maker_is_killed(tmp_path: Path) -> None:
    """Two racks at once have the same names and addresses, and do not meet."""
    code = f"""
import time
from pathlib import Path
from bench.rack.hosts import rack
with rack(Path({str(tmp_path)!r}) / "rack", 1) as hosts:
    hosts[0].start(["sleep", "1000"], Path({str(tmp_path)!r}) / "log")
    print(hosts[0].process, flush=True)
    time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        first = int(maker.stdout.readline())
        assert Path(f"/proc/{first}").exists()
        maker.kill()
    end = time.monotonic() + 20
    while Path(f"/proc/{first}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
