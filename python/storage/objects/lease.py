"""A lease in a store of objects: one holder on any number of hosts.

The lease PATH is the last of the files PATH/0000000001, PATH/0000000002, ... Each names its holder and its end, and its
number is the holder's token. A process takes the lease by writing the file of the next number, on condition that it
does not exist. All stores guarantee that condition between concurrent writers, so only one process gets the lease.

The holder renews its file in a thread. If it cannot (its process was paused, its host is cut off), the lease ends,
another process may take it, and later commits of the old holder are refused. A lease is free at once if it was
released, or if its holder's process on this machine has ended. The holder tries for END_SECONDS to release it; if the
store is away for longer, the lease ends by itself.

Clocks: `expires` is by the holder's clock, and another host waits SKEW_SECONDS longer by its own. The holder measures
from before its request to the store, by a clock that goes on while the machine sleeps.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from threading import Event, Thread
from typing import Any

from pydantic import ValidationError

from headrace.errors import UserError
from headrace.storage.lease import Held, Holder, Lease, elapsed_seconds, holder_after
from headrace.storage.objects import calls

log = logging.getLogger("headrace.storage")

#: Seconds for which a lease is valid without renewal; tests set fewer.
SECONDS = 60.0
#: Largest tolerated difference between hosts' clocks, in seconds.
SKEW_SECONDS = 10.0
#: Seconds for which a holder tries to release its lease in a store that is away.
END_SECONDS = 5.0
#: Share of SECONDS after which a lease is renewed, so that two renewals may fail.
_RENEWED_AFTER = 0.25
_UNKNOWN = Holder(process=0, host="")
#: (lease, token) of leases that this process has ended and could not release: they do not block its next lease.
_ended_leases: set[tuple[str, int]] = set()


@contextmanager
def lease(bucket: Any, path: str) -> Iterator[Lease]:
    """Hold the lease during the block. Raises Held if another process holds it."""
    active = _ActiveLease(bucket, path)
    try:
        yield Lease(active.holder, active.is_held)
    finally:
        active.end()


def holder(bucket: Any, path: str) -> Holder | None:
    """Return the lease's holder, or None."""
    last = _last(bucket, path)
    return None if last is None or _is_free(last) else last


class _ActiveLease:
    """A lease that this process holds, and the thread that renews it."""

    def __init__(self, bucket: Any, path: str) -> None:
        self._bucket, self._path = bucket, path
        self._stop_requested, self._is_released = Event(), False
        self._refusal: Exception | None = None
        #: Time by `elapsed_seconds` until which no other process can hold the lease.
        self._held_until = 0.0
        self._seconds = SECONDS
        self.holder = self._take()
        self._thread = Thread(target=self._renew_and_release, name="lease", daemon=True)
        self._thread.start()

    def is_held(self) -> bool:
        """Return whether this process holds the lease now, by its clock and by the store."""
        if elapsed_seconds() >= self._held_until:
            return False
        return _numbers(self._bucket, self._path)[-1:] == [self.holder.token] and elapsed_seconds() < self._held_until

    def end(self) -> None:
        """Release the lease, so that the next holder need not wait. If the store is away, only the thread goes on."""
        self._stop_requested.set()
        self._thread.join(END_SECONDS)
        if not self._is_released:
            _ended_leases.add((self.holder.lease, self.holder.token))
            log.warning(
                "the lease %s was not given back (%s): it ends by itself, and %g s from now at the latest another "
                "process can take it",
                self._path,
                self._refusal or "the store does not answer",
                self._seconds + SKEW_SECONDS,
            )

    def _take(self) -> Holder:
        previous = _last(self._bucket, self._path)
        if previous is not None and not _is_free(previous) and (previous.lease, previous.token) not in _ended_leases:
            raise Held(previous)
        start = elapsed_seconds()
        holder = holder_after(previous, previous.token + 1 if previous else 1, self._end(), _machine())
        token = holder.token
        data = _encoded(holder)
        tag = calls.put_new(self._bucket, _key(self._path, token), data)
        numbers = _numbers(self._bucket, self._path)
        if tag is None:
            current = calls.get(self._bucket, _key(self._path, token))
            # It is this process's own write, if only the answer to the first try was lost.
            tag = None if current is None or current[0] != data else current[1].tag
        if tag is None or numbers[-1:] != [token]:
            raise Held(_last(self._bucket, self._path) or _UNKNOWN)
        self._held_until = start + self._seconds
        calls.delete(self._bucket, [_key(self._path, n) for n in numbers if n < token])
        return holder

    def _renew_and_release(self) -> None:
        """Renew the lease, then release it, in one thread, so that no renewal is in flight at the release."""
        self._renew()
        self._stop_requested.wait()
        try:
            self._write(datetime.fromtimestamp(0, UTC))
            self._is_released = True
        except (OSError, UserError) as e:
            self._refusal = e

    def _renew(self) -> None:
        while not self._stop_requested.wait(self._seconds * _RENEWED_AFTER):
            start = elapsed_seconds()
            if start >= self._held_until:
                return
            try:
                self._write(self._end())
            except (OSError, UserError):  # the store is away: try again until the lease ends
                continue
            # If the renewal took longer than the lease was valid, another process may have taken it.
            if elapsed_seconds() >= self._held_until:
                return
            self._held_until = start + self._seconds

    def _write(self, expires: datetime) -> None:
        """Write this holder's file, which no other process writes."""
        data = _encoded(self.holder.model_copy(update={"expires": expires}))
        calls.put(self._bucket, _key(self._path, self.holder.token), data)

    def _end(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self._seconds)


def _key(path: str, number: int) -> str:
    return f"{path}/{number:010d}"


def _numbers(bucket: Any, path: str) -> list[int]:
    names = (o.key.rsplit("/", 1)[-1] for o in calls.list_level(bucket, path)[1])
    return sorted(int(name) for name in names if name.isdigit())


def _last(bucket: Any, path: str) -> Holder | None:
    """Return the holder in the last file, with the file's number as its token; None if there was never a holder."""
    while numbers := _numbers(bucket, path):
        last = calls.get(bucket, _key(path, numbers[-1]))
        if last is not None:
            return (_read(last[0]) or _UNKNOWN).model_copy(update={"token": numbers[-1]})
    return None


def _encoded(holder: Holder) -> bytes:
    return holder.model_dump_json().encode() + b"\n"


def _read(data: bytes) -> Holder | None:
    try:
        return Holder.model_validate_json(data)
    except ValidationError:
        return None


def _is_free(record: Holder) -> bool:
    """Return whether the lease that a file describes is free."""
    if record.expires is None:  # unknown: the record is damaged
        return False
    if record.expires.timestamp() == 0:
        return True
    if record.machine and record.machine == _machine() and not _is_alive(record.process):
        return True
    return datetime.now(UTC) > record.expires + timedelta(seconds=SKEW_SECONDS)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is alive, as another user's process
        return True
    return True


@cache
def _machine() -> str:
    """Return an identity of the running kernel and its process table, empty where /proc does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115  (no file)
    except OSError:
        return ""
