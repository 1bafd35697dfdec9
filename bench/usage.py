"""Memory and processor time of a process and all that it started: measured, and limited.

Processor time says more than seconds on a machine that others use, too. A limit of memory is a control group of the
kernel, which root may make.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
            held = {pid: _anonymous_mib(pid) for pid in now & known}
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


def _anonymous_mib(pid: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


_TICKS = os.sysconf("SC_CLK_TCK")


class CpuTime:
    """Processor seconds, user's and kernel's."""

    seconds: float = 0.0


@contextmanager
def cpu_of_tree() -> Iterator[CpuTime]:
    """Count the processor time of this process and those below it within the block.

    Processes that end within it count where their parent has waited for them.
    """
    cpu, start = CpuTime(), _cpu_seconds()
    yield cpu
    cpu.seconds = _cpu_seconds() - start


@contextmanager
def cpu_of_children() -> Iterator[CpuTime]:
    """Count the processor time of processes that end within the block and are waited for."""
    cpu, start = CpuTime(), resource.getrusage(resource.RUSAGE_CHILDREN)
    yield cpu
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu.seconds = end.ru_utime - start.ru_utime + end.ru_stime - start.ru_stime


def _cpu_seconds() -> float:
    total = 0.0
    for pid in tree(os.getpid()):
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # it has ended
            continue
        # Behind the name, which may hold anything: utime, stime, and those of the children that were waited for.
        total += sum(map(int, text.rpartition(")")[2].split()[11:15])) / _TICKS
    return total


_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class ControlGroup:
    """A control group.

    Attributes:
        folder: of the kernel's files.
        peak_file: bytes at most so far, pages of files included.
    """

    folder: Path
    peak_file: str

    def add(self, pid: int) -> None:
        """Put a process into it that has just begun, with all that it will start."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    @property
    def peak_mib(self) -> float:
        """At most so far, pages of files included, which the kernel drops before it refuses anybody memory."""
        return int((self.folder / self.peak_file).read_text()) / 2**20

    @property
    def killed(self) -> int:
        """Processes that the kernel has killed for memory."""
        events = self.folder / "memory.events"
        lines = (events if events.exists() else self.folder / "memory.oom_control").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


@contextmanager
def limited_memory(gib: float) -> Iterator[ControlGroup]:
    """Create a group that may hold so much, of either version of control groups.

    Raises:
        RuntimeError: no group can be made here: it takes root, and a container that passes control groups on.
    """
    is_v2 = (_CGROUPS / "cgroup.controllers").exists()
    folder = (_CGROUPS if is_v2 else _CGROUPS / "memory") / f"headrace-bench-{os.getpid()}"
    limit, peak = ("memory.max", "memory.peak") if is_v2 else ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
    try:
        folder.mkdir()
    except OSError as e:
        raise RuntimeError(f"no control group can be made below {folder.parent}: {e.strerror}. It takes root") from e
    try:
        (folder / limit).write_text(str(int(gib * 2**30)))
        yield ControlGroup(folder, peak)
    finally:
        _remove_group(folder)


def _remove_group(folder: Path) -> None:
    """End who is still in the group, whose first process may have been killed, and remove it."""
    deadline = time.monotonic() + 10
    while pids := (folder / "cgroup.procs").read_text().split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {', '.join(pids)} do not end; {folder} stays")
        time.sleep(0.05)
    folder.rmdir()
