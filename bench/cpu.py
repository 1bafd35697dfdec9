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
    """What this process and those below it take within the block; processes that end within it count where their parent
    has waited for them."""
    found, before = CpuTime(), _seconds()
    yield found
    found.seconds = _seconds() - before


@contextmanager
def cpu_of_children() -> Iterator[CpuTime]:
    """What the processes took that end within the block and are waited for."""
    found, before = CpuTime(), resource.getrusage(resource.RUSAGE_CHILDREN)
    yield found
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found.seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


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
