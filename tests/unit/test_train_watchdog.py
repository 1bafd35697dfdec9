"""Callbacks of training: the watchdog, and traces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.comm import World
from headrace.storage import local
from headrace.train.callbacks import tracing as module
from headrace.train.callbacks.tracing import PARTS, Tracer
from headrace.train.callbacks.watchdog import EXIT_STALLED, Watchdog, describe_failure, heartbeat_file

RANK = """
import sys, time
from pathlib import Path
from headrace.train.callbacks.watchdog import Watchdog
from headrace.storage import local
from headrace.comm import World
folder, rank, size, deadline, waits = local(sys.argv[1]), *map(float, sys.argv[2:])
watchdog = Watchdog(folder, World(rank=int(rank), size=int(size)), deadline, stop_file=folder / "stop")
watchdog.step, watchdog.phase = 7, "train"
watchdog.on_signals()
print("up", flush=True)
if waits:
    with watchdog.waiting("all_reduce_sum"):
        time.sleep(60)
while not watchdog.stop_requested:
    time.sleep(0.05)
watchdog.close()
"""


def start(folder: Path, rank: int, size: int, deadline: float, waits: bool) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", RANK, str(folder), str(rank), str(size), str(deadline), str(int(waits))]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def step_of(folder: Path, rank: int) -> int | None:
    """The step that a rank says it is at."""
    file = heartbeat_file(local(folder), rank)
    return json.loads(file.read_text())["step"] if file.exists() else None


def wait_for(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_rank_that_waits_too_long_names_those_that_are_missing(tmp_path: Path) -> None:
    stopped, busy = start(tmp_path, 1, 5, 1e6, True), start(tmp_path, 2, 5, 2, False)
    last_rank = start(tmp_path, 4, 5, 1e6, True)
    try:
        wait_for(lambda: [step_of(tmp_path, rank) for rank in (1, 2, 4)] == [7, 7, 7])
        os.kill(stopped.pid, signal.SIGSTOP)
        waiting = start(tmp_path, 0, 5, 4, True)
        assert waiting.wait(30) == EXIT_STALLED
        message = describe_failure(local(tmp_path))
        assert "rank 0 waited 4 s at step 7 in all_reduce_sum (train.deadline_seconds: 4); missing:" in message
        assert f"rank 1 (process {stopped.pid} on " in message
        assert "was at step 7 (train), and has not reported for" in message
        assert f"rank 2 (process {busy.pid}" in message
        assert "and is at work there" in message
        assert "rank 3 never reported" in message
        assert "rank 4" not in message  # it waits like this one
    finally:
        for process in (stopped, busy, last_rank):
            process.kill()
            process.wait()


@pytest.mark.parametrize("how", ["signal", "file"])
def test_a_stop_is_asked_for_by_a_signal_or_the_drivers_file(tmp_path: Path, how: str) -> None:
    rank = start(tmp_path, 0, 1, 5, False)
    if how == "signal":
        rank.send_signal(signal.SIGTERM)
    else:
        (tmp_path / "stop").touch()
    assert rank.wait(30) == 0
    assert describe_failure(local(tmp_path)).startswith(f"rank 0 (process {rank.pid}") or how == "signal"


def test_a_message_that_comes_while_the_missing_are_looked_for_is_no_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalls: list[str] = []
    looks, come = threading.Event(), threading.Event()
    watchdog = Watchdog(local(tmp_path), World(rank=0, size=2), 0.2, on_stall=stalls.append)
    stall_message = watchdog._stall_message

    def slowly(message: str, waited: float) -> str:
        looks.set()
        assert come.wait(30)  # the shared folder is slow
        return stall_message(message, waited)

    monkeypatch.setattr(watchdog, "_stall_message", slowly)
    with watchdog.waiting("all_to_all"):
        assert looks.wait(30)
    come.set()
    monkeypatch.undo()
    with watchdog.waiting("barrier"):
        wait_for(lambda: bool(stalls))
    watchdog.close()
    assert ["in barrier" in stall for stall in stalls] == [True]


def test_waiting_shorter_than_the_deadline_is_no_stall(tmp_path: Path) -> None:
    stalls: list[str] = []
    watchdog = Watchdog(local(tmp_path), World(rank=0, size=2), 0.5, on_stall=stalls.append)
    for _ in range(4):
        with watchdog.waiting("barrier"):
            time.sleep(0.2)
    assert stalls == []
    with watchdog.waiting("barrier"):
        wait_for(lambda: bool(stalls))
    watchdog.close()
    assert "in barrier" in stalls[0]
    assert "rank 1 never reported" in stalls[0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds: a list of one number, to be moved on."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_parts_add_up_to_the_steps_and_nothing_else_counts(clock: list[float]) -> None:
    spans = Tracer()

    def spend(name: str, before_seconds: float, inner: list[tuple[str, float]], after_seconds: float) -> None:
        with spans.span(name):
            clock[0] += before_seconds
            for part, seconds in inner:
                spend(part, seconds, [], 0.0)
            clock[0] += after_seconds

    def step() -> None:
        with spans.span("step"):
            clock[0] += 1.0
            spend("data", 2.0, [], 0.0)
            spend("dense forward", 4.0, [("lookup", 8.0), ("exchange", 16.0)], 32.0)
            spend("dense backward", 64.0, [("lookup", 128.0), ("exchange", 256.0)], 512.0)
            spend("optimizer", 1024.0, [], 0.0)

    total = 0.0
    for number in range(8):
        start = clock[0]
        step()
        total += clock[0] - start if number >= 3 else 0.0  # the first steps are left out
        spend("evaluate", 5.0, [("lookup", 7.0), ("exchange", 9.0)], 0.0)
    assert spans.counted == 5
    assert sum(spans.seconds.values()) == total
    assert {p: spans.seconds[p] / 5 for p in PARTS} == {
        "data": 2,
        "lookup": 8 + 128,
        "exchange": 16 + 256,
        "dense forward": 4 + 32,
        "dense backward": 64 + 512,
        "optimizer": 1024,
        "loop": 1,
    }
