"""Processor time and storage that the processes of a stage have used since its start."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.manifest import Resources
from headrace.memory import descendants, jvms

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
