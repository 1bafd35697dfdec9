"""Tracer: each second counted once."""

from __future__ import annotations

import pytest

from headrace.train.callbacks import tracing as module
from headrace.train.callbacks.tracing import PARTS, Tracer


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
