"""What a stretch of this process's life has used: processor time and storage, of all processes at work for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.manifest import Resources
from headrace.memory import below, jvms

log = logging.getLogger("headrace.resources")

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Spent:
    """What has been used up to a moment."""

    core_seconds: float = 0.0
    #: Bytes that came from storage and went there; what the page cache had at hand is not counted.
    read_bytes: int = 0
    written_bytes: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.core_seconds + other.core_seconds,
            self.read_bytes + other.read_bytes,
            self.written_bytes + other.written_bytes,
        )


#: What others use for this process on other machines, up to now: a cluster's executors (headrace.lake.session).
REMOTE: list[Callable[[], Spent]] = []


@dataclass(frozen=True)
class ResourceUse:
    """A stretch that began when the processes had used `before`."""

    before: Spent | None

    @staticmethod
    def begin() -> ResourceUse:
        """From now on."""
        return ResourceUse(_until_now())

    def used(self, ranks: float = 0.0) -> Resources | None:
        """Since then, by this process, the JVM beside it, all below them, and `REMOTE`; None where /proc is missing.

        Of processes that have ended as far as those that started them have waited for them.

        Args:
            ranks: core-seconds that ranks have told of themselves. They are added where they cannot be among those
                of this machine's processes: where these are fewer. Ranks are on other machines, or whoever started
                them went before they ended.
        """
        now = _until_now()
        if now is None or self.before is None:
            return None
        seconds = max(0.0, now.core_seconds - self.before.core_seconds)
        return Resources(
            core_seconds=round(seconds if seconds >= ranks else seconds + ranks, 3),
            read_bytes=max(0, now.read_bytes - self.before.read_bytes),
            written_bytes=max(0, now.written_bytes - self.before.written_bytes),
        )


def _until_now() -> Spent | None:
    if not Path("/proc/self/stat").exists():
        return None
    above = {os.getpid(), *jvms()}
    total = Spent()
    for pid in above.union(*(below(pid) for pid in above)):
        with suppress(OSError):  # it has ended, or it is another user's
            total += _of_process(pid)
    for remote in REMOTE:
        try:
            total += remote()
        except Exception as e:  # whoever tells is gone: no reason to lose what has been worked out
            log.debug("what is used elsewhere is not known, and not counted: %s: %s", type(e).__name__, e)
    return total


def _of_process(pid: int) -> Spent:
    """Of a process and of its ended children that it has waited for: see proc(5)."""
    # The name, in brackets, may have brackets and blanks in it.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    seconds = sum(int(ticks) for ticks in fields[11:15]) / _TICKS
    found = {"read_bytes": 0, "write_bytes": 0}
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/io").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in found:
                found[name] = int(value)
    return Spent(seconds, found["read_bytes"], found["write_bytes"])
