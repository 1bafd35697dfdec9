"""A lease in a store of objects: one holder on any number of hosts.

The lease PATH is the last of the files PATH/0000000001, PATH/0000000002, ...: each says who holds it, until when. Its
number is the holder's token. The next file is written on the condition that there is none of that number, so of two who
want the lease one gets it; that is the one condition that every store keeps between writers at once. The holder renews
its file in a thread; where it could not (its process was paused, its host is cut off) the lease ends, another may take
it, and what its holder then wants to commit is refused. A lease that was given back, or whose holder's process is gone
from this very machine, is free at once. To give it back is tried for END_SECONDS: where the store is away for longer it
ends by itself, and nobody waits for that here.

Clocks: `expires` is of the holder's clock, and another host waits SKEW_SECONDS longer by its own. The holder itself
counts on a clock that goes on while the machine sleeps, from before it asked the store.
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

#: Seconds for which a lease holds unless it is renewed; tests set fewer.
SECONDS = 60.0
#: Largest tolerated difference of hosts' clocks, in seconds.
SKEW_SECONDS = 10.0
#: Seconds for which the end of a lease waits for a store that is away.
END_SECONDS = 5.0
#: Share of SECONDS after which a lease is renewed: two renewals may fail.
_RENEWED_AFTER = 0.25
_UNKNOWN = Holder(process=0, host="")
#: (lease, token) that this process has ended but not yet released in the store: they do not block its next lease.
_ended_leases: set[tuple[str, int]] = set()


@contextmanager
def lease(bucket: Any, path: str) -> Iterator[Lease]:
    """Hold the lease while the block runs; `Held` where another process does."""
    held = _Held(bucket, path)
    try:
        yield Lease(held.holder, held.is_held)
    finally:
        held.end()


def holder(bucket: Any, path: str) -> Holder | None:
    """Return the lease's holder, or None."""
    last = _last(bucket, path)
    return None if last is None or _is_free(last) else last


class _Held:
    """A lease that this process has taken, and the thread that renews it."""

    def __init__(self, bucket: Any, path: str) -> None:
        self._bucket, self._path = bucket, path
        self._stop_requested, self._given_back = Event(), False
        self._refusal: Exception | None = None
        #: Time of `elapsed_seconds` up to which no other process can hold it.
        self._until = 0.0
        self._seconds = SECONDS
        self.holder = self._take()
        self._thread = Thread(target=self._renew_and_end, name="lease", daemon=True)
        self._thread.start()

    def is_held(self) -> bool:
        """Return whether this process holds the lease now, by the clock and by the store."""
        if elapsed_seconds() >= self._until:
            return False
        return _numbers(self._bucket, self._path)[-1:] == [self.holder.token] and elapsed_seconds() < self._until

    def end(self) -> None:
        """Give it back: the next holder need not wait. Where the store is away, the thread alone goes on to try."""
        self._stop_requested.set()
        self._thread.join(END_SECONDS)
        if not self._given_back:
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
        written = calls.put_new(self._bucket, _key(self._path, token), data)
        numbers = _numbers(self._bucket, self._path)
        if written is None:
            current = calls.get(self._bucket, _key(self._path, token))
            # It is this process's own write, if only the answer to the first try was lost.
            written = None if current is None or current[0] != data else current[1].tag
        if written is None or numbers[-1:] != [token]:
            raise Held(_last(self._bucket, self._path) or _UNKNOWN)
        self._until = start + self._seconds
        calls.delete(self._bucket, [_key(self._path, n) for n in numbers if n < token])
        return holder

    def _renew_and_end(self) -> None:
        """Renew the lease, then give it back, in one thread: no renewal is in flight when the lease is given back."""
        self._renew()
        self._stop_requested.wait()
        try:
            self._write(datetime.fromtimestamp(0, UTC))
            self._given_back = True
        except (OSError, UserError) as e:
            self._refusal = e

    def _renew(self) -> None:
        while not self._stop_requested.wait(self._seconds * _RENEWED_AFTER):
            start = elapsed_seconds()
            if start >= self._until:
                return
            try:
                self._write(self._end())
            except (OSError, UserError):  # the store is away: try again until the lease ends
                continue
            # If that took longer than the lease held, another process may have taken it.
            if elapsed_seconds() >= self._until:
                return
            self._until = start + self._seconds

    def _write(self, expires: datetime) -> None:
        """Its own file: no other process writes that one."""
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
    """Return the holder that the last file names, with its number as the token; None where there never was one."""
    while numbers := _numbers(bucket, path):
        last = calls.get(bucket, _key(path, numbers[-1]))
        if last is not None:
            return (_read(last[0]) or _UNKNOWN).model_copy(update={"token": numbers[-1]})
    return None


def _encoded(held: Holder) -> bytes:
    return held.model_dump_json().encode() + b"\n"


def _read(data: bytes) -> Holder | None:
    try:
        return Holder.model_validate_json(data)
    except ValidationError:
        return None


def _is_free(written: Holder) -> bool:
    """Return whether the lease that a file describes is free."""
    if written.expires is None:  # unknown: the record is damaged
        return False
    if written.expires.timestamp() == 0:
        return True
    if written.machine and written.machine == _machine() and not _is_alive(written.process):
        return True
    return datetime.now(UTC) > written.expires + timedelta(seconds=SKEW_SECONDS)


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
    """Return an identity of the running kernel and of this process table."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115  (no file)
    except OSError:
        return ""
