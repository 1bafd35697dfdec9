"""Parts of benchmarks: the days of bench_day, the memory limit of a process, and the bound of a server."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import bench_day
from bench.memory_limit import limited_memory
from bench.serve_bound import highest_utilisation, latencies

#: A sync of no file is refused, unless it is none.
_SYNC = "import ctypes, os; libc = ctypes.CDLL(None); print(libc.fsync(-1), libc.fdatasync(-1), libc.syncfs(-1))"


@pytest.mark.skipif(sys.platform != "linux", reason="preloaded into Linux's programs")
def test_syncs_return_at_once() -> None:
    def run(environment: dict[str, str] | None) -> str:
        ran = subprocess.run([sys.executable, "-c", _SYNC], env=environment, capture_output=True, text=True, check=True)
        return ran.stdout.strip()

    assert run(None) == "-1 -1 -1"
    assert run(bench_day.without_syncs()) == "0 0 0"


def test_pairs_take_turns_and_medians_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []

    def fake_run(home: Path, arguments: Any, syncs: bool = True) -> bench_day.DayRun:
        assert (home / "landing" / "rows").is_file()
        ran.append(syncs)
        return bench_day.DayRun({}, 100.0 + len(ran) + (4.0 if syncs else 0.0))

    def fake_headrace(*arguments: str, **_: object) -> None:
        landing = Path(arguments[arguments.index("--home") + 1]) / "landing"
        landing.mkdir(parents=True)
        (landing / "rows").touch()

    monkeypatch.setattr(bench_day, "_run", fake_run)
    monkeypatch.setattr(bench_day, "_headrace", fake_headrace)
    pairs = bench_day.measure_pairs(0.1, 3)
    assert ran == [True, False, False, True, True, False]
    assert pairs == [(105.0, 102.0), (108.0, 103.0), (109.0, 106.0)]
    figures = bench_day.of_pairs(0.1, pairs)
    assert [(f.value, f.peer) for f in figures] == [(108.0, 103.0), (3.0, pytest.approx(5.4))]


def test_a_group_goes_with_all_that_is_in_it() -> None:
    program = (
        "import subprocess, sys; input(); "
        "subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE).wait()"
    )
    try:
        with limited_memory(1) as group:
            process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
            group.add(process.pid)
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            until = time.monotonic() + 30
            while len((group.folder / "cgroup.procs").read_text().split()) < 2 and time.monotonic() < until:
                time.sleep(0.02)
            assert group.peak_mib > 0
            assert group.killed == 0
            process.kill()
            process.wait()
    except RuntimeError as e:
        pytest.skip(str(e))
    assert not group.folder.exists()


def test_a_process_that_takes_more_is_killed() -> None:
    try:
        with limited_memory(0.05) as group:
            program = "input(); x = bytearray(2**28)"
            process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
            group.add(process.pid)
            process.communicate(b"\n")
            assert process.returncode == -9
            assert group.killed == 1
    except RuntimeError as e:
        pytest.skip(str(e))


@pytest.mark.parametrize("share", [0.3, 0.7, 0.9])
def test_one_core_waits_as_pollaczek_and_khinchine_say(share: float) -> None:
    service = 0.004
    waits = latencies(service, share / service, 1, 1_000_000, 1)
    assert waits.min() == pytest.approx(service)
    assert waits.mean() == pytest.approx(service + share * service / (2 * (1 - share)), rel=0.03)


def test_cores_serve_as_one_queue() -> None:
    """Against each request given to the core that is free first."""
    service, rate, count = 1.0, 1.6, 5000
    arrivals = np.cumsum(np.random.default_rng(3).exponential(1 / rate, count))
    free, expected = [0.0, 0.0], []
    for moment in arrivals:
        core = int(np.argmin(free))
        free[core] = max(free[core], moment) + service
        expected.append(free[core] - moment)
    assert np.sort(latencies(service, rate, 2, count, 3)) == pytest.approx(np.sort(expected))


def test_the_highest_utilisation() -> None:
    """A limit below the service time allows no load; the nearer the two are, the lower the utilisation."""
    assert highest_utilisation(0.011, 0.010, 0.99) == 0
    shares = [highest_utilisation(service, 0.010, 0.99) for service in (0.004, 0.001, 0.0003)]
    assert shares == sorted(shares)
    assert 0.1 < shares[0] < 0.5 < 0.65 < shares[1] < shares[2] < 1
