"""A limit of memory for a process and all that it starts: a control group of the kernel, which root may make."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


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
    is_v2 = (_ROOT / "cgroup.controllers").exists()
    folder = (_ROOT if is_v2 else _ROOT / "memory") / f"headrace-bench-{os.getpid()}"
    limit, peak = ("memory.max", "memory.peak") if is_v2 else ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
    try:
        folder.mkdir()
    except OSError as e:
        raise RuntimeError(f"no control group can be made below {folder.parent}: {e.strerror}. It takes root") from e
    try:
        (folder / limit).write_text(str(int(gib * 2**30)))
        yield ControlGroup(folder, peak)
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
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
