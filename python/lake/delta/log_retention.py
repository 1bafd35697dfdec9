"""Commits of a Delta table that tell of nothing which is kept: before a checkpoint, of days that are removed."""

from __future__ import annotations

from collections.abc import Collection

from headrace.lake.delta.checkpoint import newest_checkpoint
from headrace.lake.delta.erased import erased_rows
from headrace.lake.delta.log import Commit, DeltaLog
from headrace.lake.delta.retention import first_kept
from headrace.storage import Location

_LOG = "_delta_log"


def unused_commits(table: Location, pinned: Collection[int], first_day: str, before_ns: int) -> list[Location]:
    """The commits and checkpoints that can go, oldest first, so that what a killed run leaves is a log without a gap.

    They are older than a checkpoint up to which nobody reads: every version that is pinned, and every commit that
    changed a kept day, comes after it. What loads of removed days said of themselves counts for nothing
    (headrace.lake.ingest.load_history); other readers lose the history before it, as by Delta's own retention.

    Args:
        table: its folder.
        pinned: versions that can still be read.
        first_day: the first day (partition `ds`) that the table keeps.
        before_ns: what was committed since then stays: nanoseconds since 1970.
    """
    log, folder = DeltaLog(table), table / _LOG
    newest = log.version
    if newest is None or (folder / "_sidecars").is_dir():
        return []
    first = min(log.versions())
    needed, removal_seen = min([newest, *(v for v in pinned if v >= first)]), False
    for commit in log.commits():
        kept_from = first_kept(commit.user_metadata)
        says = erased_rows(commit.user_metadata) is not None or (kept_from is not None and not removal_seen)
        removal_seen |= kept_from is not None
        if says or _changes_kept_day(commit, first_day) or log.committed_ns(commit.version) >= before_ns:
            needed = min(needed, commit.version)
    checkpoint = newest_checkpoint(folder, needed)
    if checkpoint is None:
        return []
    old = (e for e in folder.entries() if e.name[:20].isdecimal() and int(e.name[:20]) < checkpoint.version)
    return sorted(old, key=lambda e: e.name)


def _changes_kept_day(commit: Commit, first_day: str) -> bool:
    """Whether files of a kept day come or go; of a file without a day nobody knows."""
    days = [(action.partition or {}).get("ds") for action in (*commit.adds, *commit.removes)]
    return any(ds is None or ds >= first_day for ds in days)
