"""A lease by flock(2): one holder on a machine, freed by the kernel with its process.

The file's one line says who holds it. It is written in place, since the lock belongs to the file and not to its name: a
reader may see an empty or a mixed line, and takes the holder for unknown. The file stays when the lease ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from headrace.storage import system
from headrace.storage.lease import Held, Holder, Lease, holder_after

#: A line is never longer.
_BYTES = 4096
_LOCK = ".lock"
_UNKNOWN = Holder(process=0, host="")


@contextmanager
def lease(path: Path) -> Iterator[Lease]:
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
        # A lease whose file was lost goes on behind the tokens that it had, unless the clock was set back.
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
        return holder(entry if entry.suffix == _LOCK else _lock_of(entry)) is not None

    @staticmethod
    def is_lock(entry: Path) -> bool:
        """Return whether this is the lock file of a folder."""
        return entry.suffix == _LOCK


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{_LOCK}")


def holder(path: Path) -> Holder | None:
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
