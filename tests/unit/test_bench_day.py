"""Pairs of days with syncs and without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import bench_day

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
