"""Peak memory of this process and of the JVM beside it."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PeakMemory:
    """Peak memory since a start: peaks of stages that this process ran before do not count."""

    #: KiB; the largest peak among child processes that had ended before the start.
    _children_peak: int

    @staticmethod
    def begin() -> PeakMemory:
        """Start a measurement: reset the kernel's peaks of this process, the JVM beside it, and their descendants.

        Peaks of Spark's Python workers on this machine are reset, too (headrace.lake.spark.tasks).
        """
        roots = {os.getpid(), *jvms()}
        for pid in roots.union(*(descendants(pid) for pid in roots)):
            # Not Linux, or another user's process: peaks are then those of its whole life.
            with suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")
        return PeakMemory(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)

    def mib(self) -> dict[str, float]:
        """Return peak resident sizes in MiB: `python` (this process), `children` (largest ended child), `jvm` (driver).

        `children` is left out where a child that ended before the start was larger. Under spark-submit the JVM is this
        process's parent; a session started from Python is its child.
        """
        peaks = {"python": _python_peak_mib()}
        children_peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        if children_peak > self._children_peak or not self._children_peak:
            peaks["children"] = round(children_peak / 1024, 1)
        jvm_peaks = [peak for pid in jvms() if (peak := _peak_mib(pid)) is not None]
        return {**peaks, "jvm": max(jvm_peaks)} if jvm_peaks else peaks


def jvms() -> list[int]:
    """Return the pids of this process's parent and children that are JVMs."""
    pids = []
    for pid in (os.getppid(), *_children(os.getpid())):
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().startswith("java"):
                pids.append(pid)
    return pids


def _children(pid: int) -> list[int]:
    """Return the pids of the processes that any thread of a process has started."""
    pids = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                pids += [int(c) for c in (task / "children").read_text().split()]
    return pids


def descendants(pid: int) -> set[int]:
    """Return the pids of a process's children, of their children, and so on."""
    children = set(_children(pid))
    return children.union(*(descendants(child) for child in children))


def _python_peak_mib() -> float:
    """Return this process's peak from /proc, else from getrusage, whose peak includes the forking process's."""
    peak = _peak_mib(os.getpid())
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1) if peak is None else peak


def _peak_mib(pid: int) -> float | None:
    """Return the peak of a process in MiB; None where the process has ended, or /proc is missing."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return round(int(line.split()[1]) / 1024, 1)
    return None
