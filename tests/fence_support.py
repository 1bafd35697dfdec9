"""Runs that hold a pipeline's lease by a token, for tests of what a later one's leaves to an earlier one."""

from __future__ import annotations

from headrace.stage import RunLock
from headrace.storage import Lease
from headrace.storage.lease import Holder


def holding(token: int, lease: str = "l") -> RunLock:
    """A run that takes itself for the holder: it was paused, and has not asked."""
    return RunLock((Lease(Holder(token=token, lease=lease), lambda: True),))


def overtaken(token: int, lease: str = "l") -> RunLock:
    """A run that is told that it is not the holder any more when it asks."""
    return RunLock((Lease(Holder(token=token, lease=lease), lambda: False),))
