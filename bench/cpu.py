"""Processor time of a process and all that it started: on a machine that others use, too, it says more than seconds."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.memory import tree

_TICKS = os.sysconf("SC_CLK_TCK")


class CpuTime:
    """Processor seconds, user's and kernel's."""

    seconds: float = 0.0


@contextmanager
def cpu_of_tree() -> Iterator[CpuTime]:
    """Count the processor time of this process and those below it within the block.

    Processes that end within it count where their parent has waited for them.
    """
    cpu, start = CpuTime(), _seconds()
    yield cpu
    cpu.seconds = _seconds() - start


@contextmanager
def cpu_of_children() -> Iterator[CpuTime]:
    """Count the processor time of processes that end within the block and are waited for."""
    cpu, start = CpuTime(), resource.getrusage(resource.RUSAGE_CHILDREN)
    yield cpu
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu.seconds = end.ru_utime - start.ru_utime + end.ru_stime - start.ru_stime


def _seconds() -> float:
    total = 0.0
    for pid in tree(os.getpid()):
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # it has ended
            continue
        # Behind the name, which may hold anything: utime, stime, and those of the children that were waited for.
        total += sum(map(int, text.rpartition(")")[2].split()[11:15])) / _TICKS
    return total
