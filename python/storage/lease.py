"""Leases: each has one holder at a time, which is named. Here is the lease of one machine, by flock(2).

The kernel frees it with its holder's process. The file's one line names the holder. It is written in place, since the
lock belongs to the file and not to its name: a reader may see an empty or a mixed line, and takes the holder for
unknown. The file stays when the lease ends.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.errors import BusyError
from headrace.storage import system

#: Seconds after which a loop of removals checks its lease again: a pause that could lose the lease is longer.
_ASKED_AGAIN_SECONDS = 1.0


class Holder(BaseModel):
    """The holder of a lease, as written where others can read it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    process: int = Field(default_factory=os.getpid)
    host: str = Field(default_factory=socket.gethostname)
    since: datetime = Field(default_factory=lambda: datetime.now(UTC))
    #: After this the lease is void unless it was renewed; None: it ends with its holder's process.
    expires: datetime | None = None
    #: Larger than that of every earlier holder of the same `lease`.
    token: int = 0
    #: Id of the lease, which each holder takes over from the one before. Empty: written by a release without ids.
    lease: str = ""
    #: Kernel in which the process number is valid: only there can others tell whether it is alive. Empty: unknown.
    machine: str = ""

    def __str__(self) -> str:
        if not self.process:
            return "an unknown process"
        return f"process {self.process} on {self.host} since {self.since:%Y-%m-%d %H:%M:%S} UTC"


def holder_after(previous: Holder | None, least: int, expires: datetime | None = None, machine: str = "") -> Holder:
    """Return this process as the holder of a lease after `before`, with a token of at least `least`."""
    if previous is None or not previous.lease:
        return Holder(token=least, lease=uuid.uuid4().hex, expires=expires, machine=machine)
    return Holder(token=max(least, previous.token + 1), lease=previous.lease, expires=expires, machine=machine)


@dataclass(frozen=True)
class Fence:
    """Fencing token that the holder of a lease writes into each of its commits.

    Commits with an earlier token are refused.
    """

    #: Id of the lease (`Holder.lease`): tokens of different leases cannot be compared.
    lease: str
    #: Token of its holder.
    token: int


class Held(Exception):
    """Another process holds the lease."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(str(holder))
        self.holder = holder


class LeaseLost(BusyError):
    """The lease has passed to another holder: what this process has done since must not be committed."""


class Lease:
    """A lease that this process holds."""

    def __init__(self, holder: Holder, still_held: Callable[[], bool]) -> None:
        self.holder, self._still_held = holder, still_held
        self._checked_at = -math.inf

    @property
    def fence(self) -> Fence:
        """Return the token that commits of the holder carry."""
        return Fence(self.holder.lease, self.holder.token)

    def check(self) -> None:
        """Call it before a commit that only the holder may make.

        Raises:
            LeaseLost: this process was paused or cut off for too long.
        """
        if not self._still_held():
            raise LeaseLost(f"the lease of {self.holder} is not its own any more; run it again")
        self._checked_at = elapsed_seconds()

    def check_again(self) -> None:
        """Check the lease at most once a second, for loops of many small steps."""
        if elapsed_seconds() - self._checked_at >= _ASKED_AGAIN_SECONDS:
            self.check()


def elapsed_seconds() -> float:
    """Return the time of a clock that goes on while the process is paused and while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


#: Most bytes of a line.
_BYTES = 4096
_LOCK = ".lock"
_UNKNOWN = Holder(process=0, host="")


@contextmanager
def flock_lease(path: Path) -> Iterator[Lease]:
    """Hold the lock while the block runs; `Held` where another process does."""
    system.make_folder(path.parent)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        previous = _written(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Held(previous or _UNKNOWN) from None
        previous = _written(fd)
        # Tokens follow the clock, so that they grow even where the lease's file was lost.
        holder = holder_after(previous, time.time_ns() // 1_000_000)
        line = holder.model_dump_json().encode() + b"\n"
        os.pwrite(fd, line, 0)
        os.ftruncate(fd, len(line))
        yield Lease(holder, lambda: _written(fd) == holder)
    finally:
        os.close(fd)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is made, while the block runs; wait for it where another one has it.

    Other threads and processes of this host, and of NFS those of other hosts: the file is open for writing, as NFS asks
    of an exclusive lock. (A folder cannot be, and its lock is of one host.)
    """
    system.make_folder(path.parent)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


class HeldFolder:
    """A folder of a process of its own, which others may remove once the kernel says that the process has ended.

    Beside the folder `NAME` lies `NAME.lock`, whose lock the process has from before there is a folder.
    """

    def __init__(self, parent: Path) -> None:
        """Make a new folder below `parent`."""
        system.make_folder(parent)
        self.path = parent / f"run-{uuid.uuid4().hex[:12]}"
        self._lock = _lock_of(self.path)
        self._fd = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.pwrite(self._fd, Holder().model_dump_json().encode() + b"\n", 0)
        self.path.mkdir()

    def release(self) -> None:
        """Remove the folder, which nobody uses any more."""
        shutil.rmtree(self.path, ignore_errors=True)
        if not self.path.exists():
            self._lock.unlink(missing_ok=True)
        os.close(self._fd)

    @staticmethod
    def is_held(entry: Path) -> bool:
        """Return whether a live process holds this folder, or the folder whose lock file this is."""
        return flock_holder(entry if entry.suffix == _LOCK else _lock_of(entry)) is not None

    @staticmethod
    def is_lock(entry: Path) -> bool:
        """Return whether this is the lock file of a folder."""
        return entry.suffix == _LOCK


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{_LOCK}")


def flock_holder(path: Path) -> Holder | None:
    """Return the lock's holder, or None where it is free. The check holds the lock for no longer than it takes."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _written(fd) or _UNKNOWN
    finally:
        os.close(fd)


def _written(fd: int) -> Holder | None:
    try:
        return Holder.model_validate_json(os.pread(fd, _BYTES, 0))
    except ValidationError:
        return None
