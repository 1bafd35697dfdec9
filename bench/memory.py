"""Peak memory of a process and all that it started, sampled while something runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_EVERY_S = 0.2


class Peak:
    """The largest sums seen, MiB."""

    #: Of all processes.
    mib: float = 0.0
    #: Of those that are no JVM.
    python_mib: float = 0.0


@contextmanager
def peak_of_tree(pid: int | None = None) -> Iterator[Peak]:
    """Sample the tree of `pid` (this process) until the block ends.

    Anonymous resident memory, what the processes hold: pages of mapped files are the kernel's to drop. Pages that a
    forked worker shares with its parent are counted in both. A process counts from its second sample on: one that was
    started a moment ago may still be its parent's twin (vfork), and a JVM would be counted twice for it.
    """
    peak, done, root = Peak(), threading.Event(), pid or os.getpid()

    def watch() -> None:
        known: set[int] = set()
        while not done.wait(_EVERY_S):
            now = set(tree(root))
            held = {pid: _mib(pid) for pid in now & known}
            peak.mib = max(peak.mib, sum(held.values()))
            peak.python_mib = max(peak.python_mib, sum(mib for pid, mib in held.items() if not _is_jvm(pid)))
            known = now

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def tree(pid: int) -> list[int]:
    """Return a process and all below it."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # it has ended
            continue
        for child in children:
            pids += tree(int(child))
    return pids


def _is_jvm(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "java"
    except OSError:
        return False


def _mib(pid: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0
