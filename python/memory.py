"""Peak memory of this process and of the JVM beside it."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PeakMemory:
    """The peaks of a stretch of this process's life: what was before, of other stages, does not count."""

    #: KiB; of the processes that had ended before.
    _ended: int

    @staticmethod
    def begin() -> PeakMemory:
        """From now on. The kernel forgets the peaks of this process, of the JVM beside it, and of all below them.

        So what Spark's Python workers on this machine needed for another stage does not count either
        (headrace.lake.worker_memory).
        """
        above = {os.getpid(), *jvms()}
        for pid in above.union(*(below(pid) for pid in above)):
            # Not Linux, or not our process: peaks are then those of its whole life.
            with suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")
        return PeakMemory(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)

    def mib(self) -> dict[str, float]:
        """Peak resident sizes in MiB: `python` (this process), `children` (the largest ended one), `jvm` (the driver).

        `children` is left out where one that ended before was larger. Under spark-submit the JVM is this process's
        parent; a session started from Python is its child.
        """
        found = {"python": _own_peak_mib()}
        ended = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        if ended > self._ended or not self._ended:
            found["children"] = round(ended / 1024, 1)
        of_jvms = [peak for pid in jvms() if (peak := _peak_mib(pid)) is not None]
        return {**found, "jvm": max(of_jvms)} if of_jvms else found


def jvms() -> list[int]:
    """The parent and the children of this process that are JVMs."""
    found = []
    for pid in (os.getppid(), *_children(os.getpid())):
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().startswith("java"):
                found.append(pid)
    return found


def _children(pid: int) -> list[int]:
    """The processes that the threads of one have started."""
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += [int(c) for c in (task / "children").read_text().split()]
    return found


def below(pid: int) -> set[int]:
    """The processes that one has started, and those that these have."""
    own = set(_children(pid))
    return own.union(*(below(child) for child in own))


def _own_peak_mib() -> float:
    """By /proc where it is there: getrusage's peak begins, at an exec, with that of the process that forked."""
    peak = _peak_mib(os.getpid())
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1) if peak is None else peak


def _peak_mib(pid: int) -> float | None:
    """The peak of a process; None where it is gone, or /proc is not there."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return round(int(line.split()[1]) / 1024, 1)
    return None
