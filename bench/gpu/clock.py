"""The clock of the benches of a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

#: A figure: `what`, `value`, `unit`, and others by name.
Row = dict[str, Any]


class Clock:
    """Seconds of work on the device: the median of several runs, after some that do not count."""

    def __init__(self, device: str, turns: int, before: int) -> None:
        self.device, self.turns, self.before = device, turns, before

    def seconds(self, work: Callable[[int], object]) -> float:
        """`work` is told which turn it is."""
        found = []
        for turn in range(self.before + self.turns):
            if self.device == "cuda":
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                work(turn)
                end.record()
                end.synchronize()
                found.append(begin.elapsed_time(end) / 1000)
            else:
                began = time.perf_counter()
                work(turn)
                found.append(time.perf_counter() - began)
        return statistics.median(found[self.before :])
