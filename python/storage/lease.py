"""Leases: each has one holder at a time, which is named."""

from __future__ import annotations

import math
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict, Field

from headrace.errors import BusyError

#: A loop of removals asks for its lease again after so many seconds: who was paused has lost at least as many.
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
    #: What all holders have in common, the next one taking it from the one before. Empty: written before there was one.
    lease: str = ""
    #: The kernel that knows the process by its number: others cannot tell whether it is alive. Empty: not said.
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

    #: Of the lease (`Holder.lease`): tokens of different leases say nothing of each other.
    lease: str
    #: Of its holder.
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
