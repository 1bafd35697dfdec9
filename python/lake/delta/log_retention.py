"""Files of a Delta table's log that nobody needs: commits before all that is kept, checkpoints in between.

What Delta's protocol document (PROTOCOL.md of delta-io/delta, "Metadata Cleanup") asks for: whatever goes is older than
a complete checkpoint, which stays with its commit and all commits after it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from itertools import pairwise

from headrace.lake.delta.checkpoint import complete_checkpoints
from headrace.lake.delta.erased import erased_rows
from headrace.lake.delta.log import Commit, DeltaLog
from headrace.lake.delta.retention import first_kept
from headrace.storage import Location

_LOG = "_delta_log"
_LAST_CHECKPOINT = "_last_checkpoint"
#: Of the newest checkpoints, those that stay: the one before is for readers while the newest is written.
_NEWEST = 2
#: Into how many parts the commits that are needed are divided by checkpoints: so much more than them is kept at most.
_PARTS = 4


def unused_log_files(table: Location, pinned: Collection[int], first_day: str | None, before_ns: int) -> list[Location]:
    """The files of the log that can go, in an order in which a killed run leaves every needed version readable.

    Commits and checkpoints that are older than a checkpoint up to which nobody reads: every version that is pinned, and
    every commit that changed a kept day, comes after it. What loads of removed days said of themselves counts for
    nothing (headrace.lake.ingest.load_history); other readers lose the history before it, as by Delta's own retention.
    Of what comes later only that which makes the log quicker to read, and is not needed for it: checkpoints, checksums.
    Nothing goes that was written since `before_ns`, nor what a reader needs of a version that was committed since then:
    who has listed the log before finds what it has chosen.

    Args:
        table: its folder.
        pinned: versions that can still be read.
        first_day: the first day (partition `ds`) that the table keeps; None: it keeps all, and all of its commits.
        before_ns: nanoseconds since 1970.
    """
    log, folder = DeltaLog(table), table / _LOG
    versions = log.versions()
    if not versions or (folder / "_sidecars").is_dir():
        return []
    entries = [e for e in folder.entries() if e.name[:20].isdecimal()]
    checkpoints = [c.version for c in complete_checkpoints(folder)]
    needed = None if first_day is None else _first_needed(log, versions, pinned, first_day, before_ns)
    start = max((c for c in checkpoints if needed is not None and c <= needed), default=None)
    old = [] if start is None else [e for e in entries if int(e.name[:20]) < start]
    first = min(v for v in versions if start is None or v >= start)
    if len([v for v in versions if v >= first]) != max(versions) + 1 - first or (first and first not in checkpoints):
        return sorted(old, key=lambda e: e.name)  # the commits do not say all: every checkpoint may be needed
    kept = checkpoints_to_keep(checkpoints, first, needed, max(versions))
    if (named := _last_named(folder)) is not None:
        kept.add(named)
    # One that is not complete may be at work.
    last = sorted(kept)[-_NEWEST] if len(kept) >= _NEWEST else 0
    quick = [
        e
        for e in entries
        if first <= int(e.name[:20]) < last
        and (e.suffix == ".crc" or (".checkpoint" in e.name and int(e.name[:20]) not in kept))
        and e.info().modified_ns < before_ns
    ]
    return [*sorted(old, key=lambda e: e.name), *quick]


def checkpoints_to_keep(checkpoints: Sequence[int], first: int, needed: int | None, newest: int) -> set[int]:
    """The versions of the checkpoints that stay, of a log whose commits are whole from `first` on.

    The newest ones; that of `first`, if the log begins after commits that went; and, where commits go some day
    (`needed`), so many between it and the newest that one is not far before each commit that will be the first needed.

    Args:
        checkpoints: versions of the complete ones.
        first: the first version whose commit stays.
        needed: the first version that is needed; None: all are.
        newest: the newest version.
    """
    there = sorted({c for c in checkpoints if c >= first})
    kept = {*there[-_NEWEST:], *(c for c in there if c == first and first > 0)}
    if needed is None:
        return kept
    gap = max(1, (newest - needed) // _PARTS)
    last = first
    for version, after in pairwise(there):
        # Without it the next would be further than this from the one before.
        if version in kept or after - last > gap:
            kept.add(version)
            last = version
    return kept


def _first_needed(log: DeltaLog, versions: set[int], pinned: Collection[int], first_day: str, before_ns: int) -> int:
    """The first version that somebody reads, or whose commit somebody needs."""
    needed, removal_seen = min([max(versions), *(v for v in pinned if v >= min(versions))]), False
    for commit in log.commits():
        kept_from = first_kept(commit.user_metadata)
        says = _erased_kept_day(commit, first_day) or (kept_from is not None and not removal_seen)
        removal_seen |= kept_from is not None
        if says or _changes_kept_day(commit, first_day) or log.committed_ns(commit.version) >= before_ns:
            needed = min(needed, commit.version)
    return needed


def _erased_kept_day(commit: Commit, first_day: str) -> bool:
    """Whether rows of a kept day were erased by it, which says so of manifests that count them."""
    # "null" and other names of partitions that are no days are behind all days.
    return any(day >= first_day for day in erased_rows(commit.user_metadata) or {})


def _changes_kept_day(commit: Commit, first_day: str) -> bool:
    """Whether files of a kept day come or go; of a file without a day nobody knows."""
    days = [(action.partition or {}).get("ds") for action in (*commit.adds, *commit.removes)]
    return any(ds is None or ds >= first_day for ds in days)


def _last_named(folder: Location) -> int | None:
    """The checkpoint at which readers begin to list the log; None where nothing says."""
    try:
        return int(json.loads((folder / _LAST_CHECKPOINT).read_text())["version"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
