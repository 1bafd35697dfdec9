"""Commits that carry the token of a lease's holder: after one of a later holder, those of an earlier one are refused.

The token is a `txn` action (PROTOCOL.md of delta-io/delta): the lease is the application, and its version the holder's
token with a number behind it, which is larger in each commit. So a log tells whose commit is the newest, Delta's own
writers refuse a commit that was overtaken by another one of the application, and no store needs to know of leases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.lake.delta.log import DeltaLog
from headrace.storage import Fence, LeaseLost, Location

#: Bits of an application version for the commits of one holder. The other 43 bits hold milliseconds since 1970.
_BITS = 20


def application_of(fence: Fence) -> str:
    """Return the application that commits of a lease's holders are versions of."""
    return f"headrace.lease.{fence.lease}"


def next_version(table: Location, fence: Fence, last: int | None) -> int:
    """Return the application version of a holder's next commit to a table.

    Args:
        table: its folder.
        fence: of the holder.
        last: the newest application version in the table's log; None: there is none.

    Raises:
        LeaseLost: that one is of a later holder.
    """
    first = fence.token << _BITS
    if last is None or last < first:
        return first
    check(table, fence, last)
    return last + 1


def is_of(fence: Fence, last: int | None) -> bool:
    """Return whether an application version belongs to this holder."""
    return last is not None and last >> _BITS == fence.token


def check(table: Location, fence: Fence, last: int | None) -> None:
    """Raise LeaseLost where the newest application version in a table's log is of a later holder."""
    if last is not None and last >> _BITS > fence.token:
        raise LeaseLost(
            f"{table}: a later holder of the lease has committed since; nothing of this run was committed there. Run "
            f"it again"
        )


def version_in(action: Mapping[str, Any], fence: Fence) -> int | None:
    """Return the application version that an action of a log says; None: it says none of this lease."""
    txn = action.get("txn")
    return int(txn["version"]) if txn and txn["appId"] == application_of(fence) else None


def committed(log: DeltaLog, fence: Fence, version: int, after: int) -> int | None:
    """Return the version of the table, of those after `after`, that an application version was committed as; None:
    none.
    """
    for table_version in sorted(log.versions(after + 1), reverse=True):
        if any(version_in(action, fence) == version for action in log.actions(table_version)):
            return table_version
    return None
