"""Waiting for what processes on hosts do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bench.rack.day import tail

T = TypeVar("T")
_POLL_SECONDS = 0.1
#: Of any one thing.
LIMIT_SECONDS = 900.0


def until(ask: Callable[[], T], exit_code: Callable[[], int | None], log: Path) -> T:
    """Wait until `ask` gives an answer, and return it.

    Args:
        ask: gives what is false as long as there is nothing to say.
        exit_code: that of what is waited for, None while it runs.
        log: shown where it never came to that.

    Raises:
        RuntimeError: it ended before, or took longer than LIMIT_SECONDS.
    """
    end = time.monotonic() + LIMIT_SECONDS
    while not (answer := ask()):
        if exit_code() is not None or time.monotonic() > end:
            raise RuntimeError(f"it never came to that; {tail(log)}")
        time.sleep(_POLL_SECONDS)
    return answer


def timed(act: Callable[[], object]) -> float:
    """Measure the seconds of a call."""
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin
