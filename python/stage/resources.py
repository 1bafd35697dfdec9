"""This process: what it and its children have used since a start, and whose account it has.

Processor time, storage and peak memory are those of a stage's processes. The account is for records of decisions that
people have made.
"""

from __future__ import annotations

import getpass
import logging
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.stage.manifest import Resources

log = logging.getLogger("headrace.resources")

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Spent:
    """Cumulative use of processor time and storage."""

    core_seconds: float = 0.0
    #: Bytes read from storage and written to it, without reads that the page cache served.
    read_bytes: int = 0
    written_bytes: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.core_seconds + other.core_seconds,
            self.read_bytes + other.read_bytes,
            self.written_bytes + other.written_bytes,
        )


#: Functions that return what other machines have used for this process, a cluster's executors:
#: headrace.lake.spark.session.
REMOTE: list[Callable[[], Spent]] = []


@dataclass(frozen=True)
class ResourceUse:
    """Measurement of use since a start."""

    #: What the processes had used at the start; None where /proc is missing.
    start: Spent | None

    @staticmethod
    def begin() -> ResourceUse:
        """Start a measurement."""
        return ResourceUse(_current_use())

    def used(self, ranks: float = 0.0) -> Resources | None:
        """Return the use since the start by this process, the JVM beside it, their descendants, and `REMOTE`.

        Ended processes count where their parents have waited for them.

        Args:
            ranks: core-seconds that ranks have reported. They are added where this machine's processes used fewer, so
                that the ranks' cannot be among them: ranks run on other machines, or outlive the process that
                started them.

        Returns:
            the use; None where /proc is missing.
        """
        now = _current_use()
        if now is None or self.start is None:
            return None
        seconds = max(0.0, now.core_seconds - self.start.core_seconds)
        return Resources(
            core_seconds=round(seconds if seconds >= ranks else seconds + ranks, 3),
            read_bytes=max(0, now.read_bytes - self.start.read_bytes),
            written_bytes=max(0, now.written_bytes - self.start.written_bytes),
        )


def _current_use() -> Spent | None:
    if not Path("/proc/self/stat").exists():
        return None
    roots = {os.getpid(), *jvms()}
    total = Spent()
    for pid in roots.union(*(descendants(pid) for pid in roots)):
        with suppress(OSError):  # it has ended, or it is another user's
            total += _process_use(pid)
    for remote in REMOTE:
        try:
            total += remote()
        except Exception as e:  # the other machine is gone: no reason to lose the finished work
            log.debug("what is used elsewhere is not known, and not counted: %s: %s", type(e).__name__, e)
    return total


def _process_use(pid: int) -> Spent:
    """Return the use of a process and of its ended children that it has waited for: see proc(5)."""
    # The name, in brackets, may have brackets and blanks in it.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    seconds = sum(int(ticks) for ticks in fields[11:15]) / _TICKS
    counts = {"read_bytes": 0, "write_bytes": 0}
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/io").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in counts:
                counts[name] = int(value)
    return Spent(seconds, counts["read_bytes"], counts["write_bytes"])


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


def user_name() -> str:
    """Return the name of the user that this process runs as; `unknown` where the system has no name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"
