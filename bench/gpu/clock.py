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

    def __init__(self, device: str, turns: int, warm_up: int) -> None:
        self.device, self.turns, self.warm_up = device, turns, warm_up

    def seconds(self, work: Callable[[int], object]) -> float:
        """`work` is told which turn it is."""
        measured = []
        for repeat in range(self.warm_up + self.turns):
            if self.device == "cuda":
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                work(repeat)
                end.record()
                end.synchronize()
                measured.append(begin.elapsed_time(end) / 1000)
            else:
                start = time.perf_counter()
                work(repeat)
                measured.append(time.perf_counter() - start)
        return statistics.median(measured[self.warm_up :])
