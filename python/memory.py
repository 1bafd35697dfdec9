"""Peak memory of this process and of the JVM beside it."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def peak_memory_mib() -> dict[str, float]:
    """Peak resident sizes in MiB: `python` (this process), `children` (the largest ended one), `jvm` (the driver).

    Under spark-submit the JVM is this process's parent; a session started from Python is its child.
    """
    peaks = {
        "python": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "children": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, 1),
    }
    candidates = [os.getppid(), *_children(os.getpid())]
    jvms = [peak for pid in candidates if (peak := _jvm_peak_mib(pid)) is not None]
    if jvms:
        peaks["jvm"] = max(jvms)
    return peaks


def _children(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _jvm_peak_mib(pid: int) -> float | None:
    """The peak of `pid` where it is a JVM; None where it is something else, is gone, or /proc is not there."""
    try:
        if not Path(f"/proc/{pid}/comm").read_text().startswith("java"):
            return None
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return round(int(line.split()[1]) / 1024, 1)
    except OSError:
        pass
    return None
