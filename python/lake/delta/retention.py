"""Days that a table keeps: the others are removed by one commit, which says so."""

from __future__ import annotations

import json

from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import Transaction
from headrace.lake.delta.user_metadata import said_by
from headrace.own_records import known_keys
from headrace.storage import Fence, Location

_MARK = "headrace.retention"


def days_before(table: Location, first: str) -> list[str]:
    """The days (partitions `ds`) before `first` of which the newest version has data files, oldest first."""
    log = DeltaLog(table)
    version = log.version
    files = log.files(version) if version is not None else None
    return sorted({ds for f in files or [] if (ds := f.partition.get("ds")) is not None and ds < first})


def remove_days_before(table: Location, first: str, fence: Fence | None = None) -> int | None:
    """Remove them, in one commit; its version, None where there are none. Files stay until they are vacuumed.

    Raises:
        UserError: another writer changes these days, or the table must not be written without Spark.
        LeaseLost: a later holder of the lease (`fence`: of this one) has committed.
    """
    days = days_before(table, first)
    if not days:
        return None
    metadata = json.dumps({_MARK: {"first": first}})
    return Transaction(table, fence=fence).replace("ds", days, [], metadata)


def first_kept(user_metadata: str | None) -> str | None:
    """The first day that a commit of `remove_days_before` has left; None of another commit.

    Raises:
        UserError: a newer release has made it.
    """
    said = said_by(_MARK, user_metadata)
    if said is None:
        return None
    return str(known_keys(said, ("first",), "the record of days that were removed in a table's log")["first"])
