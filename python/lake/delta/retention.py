"""Days, log files and data files that a Delta table keeps, and those that can go.

Days are removed by one commit, which says so. Delta's own VACUUM knows ages alone; here the versions that somebody has
pinned are kept whole, however old they are. Of the log goes what Delta's protocol document allows (PROTOCOL.md of
delta-io/delta, "Metadata Cleanup"): whatever is older than a complete checkpoint, which stays with its commit and all
commits after it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from headrace.errors import UserError
from headrace.lake.delta.log import Commit, DeltaLog, file_path
from headrace.lake.delta.log_files import RETENTION_MARK, complete_checkpoints, erased_rows, first_kept, last_checkpoint
from headrace.storage import Fence, Location

_LOG_FOLDER = "_delta_log"
#: Number of newest checkpoints to keep: readers use the one before while the newest is written.
_NEWEST = 2
#: Number of parts into which checkpoints divide the needed commits: it bounds the commits kept beyond those.
_PARTS = 4
#: Folders without data files.
_NOT_DATA = (_LOG_FOLDER,)


def days_before(table: Location, first: str) -> list[str]:
    """Return the days (partitions `ds`) before `first` of which the newest version has data files, oldest first."""
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
    from headrace.lake.delta.transaction import Transaction

    metadata = json.dumps({RETENTION_MARK: {"first": first}})
    return Transaction(table, fence=fence).replace("ds", days, [], metadata)


def unused_log_files(table: Location, pinned: Collection[int], first_day: str | None, before_ns: int) -> list[Location]:
    """Return the files of the log that can go, in an order in which a killed run leaves every needed version readable.

    Commits and checkpoints that are older than a checkpoint up to which nobody reads: every version that is pinned, and
    every commit that changed a kept day, comes after it. What loads of removed days said of themselves counts for
    nothing (headrace.lake.landing.load_history); other readers lose the history before it, as by Delta's own retention.
    Of what comes later only that which makes the log quicker to read, and is not needed for it: checkpoints, checksums.
    Nothing goes that was written since `before_ns`, nor what a reader needs of a version that was committed since then:
    who has listed the log before finds what it has chosen.

    Args:
        table: its folder.
        pinned: versions that can still be read.
        first_day: the first day (partition `ds`) that the table keeps; None: it keeps all, and all of its commits.
        before_ns: nanoseconds since 1970.
    """
    log, folder = DeltaLog(table), table / _LOG_FOLDER
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
        return sorted(old, key=lambda e: e.name)  # commits are missing: every checkpoint may be needed
    kept_checkpoints = checkpoints_to_keep(checkpoints, first, needed, max(versions))
    if (named := last_checkpoint(folder)) is not None:
        kept_checkpoints.add(named)
    # An incomplete checkpoint may still be being written.
    last = sorted(kept_checkpoints)[-_NEWEST] if len(kept_checkpoints) >= _NEWEST else 0
    quick = [
        e
        for e in entries
        if first <= int(e.name[:20]) < last
        and (e.suffix == ".crc" or (".checkpoint" in e.name and int(e.name[:20]) not in kept_checkpoints))
        and e.info().modified_ns < before_ns
    ]
    return [*sorted(old, key=lambda e: e.name), *quick]


def checkpoints_to_keep(checkpoints: Sequence[int], first: int, needed: int | None, newest: int) -> set[int]:
    """Return the versions of the checkpoints that stay, of a log whose commits are whole from `first` on.

    The newest ones; that of `first`, if the log begins after commits that went; and, where commits go some day
    (`needed`), so many between it and the newest that one is not far before each commit that will be the first needed.

    Args:
        checkpoints: versions of the complete ones.
        first: the first version whose commit stays.
        needed: the first version that is needed; None: all are.
        newest: the newest version.
    """
    existing = sorted({c for c in checkpoints if c >= first})
    to_keep = {*existing[-_NEWEST:], *(c for c in existing if c == first and first > 0)}
    if needed is None:
        return to_keep
    gap = max(1, (newest - needed) // _PARTS)
    last = first
    for version, after in pairwise(existing):
        # Dropping it would leave a gap larger than `gap`.
        if version in to_keep or after - last > gap:
            to_keep.add(version)
            last = version
    return to_keep


def _first_needed(log: DeltaLog, versions: set[int], pinned: Collection[int], first_day: str, before_ns: int) -> int:
    """Return the first version that somebody reads, or whose commit somebody needs."""
    needed, removal_seen = min([max(versions), *(v for v in pinned if v >= min(versions))]), False
    for commit in log.commits():
        kept_from = first_kept(commit.user_metadata)
        says = _erased_kept_day(commit, first_day) or (kept_from is not None and not removal_seen)
        removal_seen |= kept_from is not None
        if says or _changes_kept_day(commit, first_day) or log.committed_ns(commit.version) >= before_ns:
            needed = min(needed, commit.version)
    return needed


def _erased_kept_day(commit: Commit, first_day: str) -> bool:
    """Return whether a commit has erased rows of a kept day: manifests that count such rows need it."""
    # "null" and other partitions that are no days sort after all days.
    return any(day >= first_day for day in erased_rows(commit.user_metadata) or {})


def _changes_kept_day(commit: Commit, first_day: str) -> bool:
    """Return whether a commit adds or removes files of a kept day; a file without a day may be of any."""
    days = [(action.partition or {}).get("ds") for action in (*commit.adds, *commit.removes)]
    return any(ds is None or ds >= first_day for ds in days)


def unused_files(table: Location, pinned: Collection[int], first_day: str | None, before_ns: int) -> list[Location]:
    """Return the files that can go: those of no version below, written and removed before a moment.

    Args:
        table: its folder.
        pinned: versions whose files stay, besides the newest; those that the log no longer has are nobody's.
        first_day: of pinned versions only files of this day (partition `ds`) and later ones stay; None: all.
        before_ns: what was written, or removed by a commit, since then stays: nanoseconds since 1970.

    Raises:
        UserError: a table that headrace does not read, or one of whose files is elsewhere.
    """
    log = DeltaLog(table)
    newest = log.version
    if newest is None:
        return []
    log.check()
    # Files are listed before the log is read, so that the list has no file that is committed meanwhile.
    existing = [f for f in table.files() if f.below(table).split("/", 1)[0] not in _NOT_DATA]
    used: set[Location] = set()
    for version in {newest, *pinned}:
        state = log.state(version)
        if state is None:
            if version == newest:
                raise UserError(f"{table}: the log of this Delta table is not whole, so nothing of it is removed")
            continue
        for add in state.adds:
            ds = dict(add["partitionValues"] or {}).get("ds")
            if version == newest or first_day is None or ds is None or ds >= first_day:
                used |= _files_of(table, add)
    for version in sorted(log.versions(), reverse=True):
        if log.committed_ns(version) < before_ns:
            break
        for action in log.actions(version):
            for kind in ("add", "remove", "cdc"):
                if kind in action:
                    used |= _files_of(table, action[kind])
    return [f for f in existing if f not in used and f.info().modified_ns < before_ns]


def unnamed_files(table: Location, files: Collection[Location]) -> list[Location]:
    """Return the files that no commit of the log names: their writers were killed or are paused."""
    log, named = DeltaLog(table), set[Location]()
    for version in log.versions():
        for action in log.actions(version):
            for kind in ("add", "remove", "cdc"):
                if kind in action:
                    named |= _files_of(table, action[kind])
    return [file for file in files if file not in named]


def _files_of(table: Location, action: Mapping[str, object]) -> set[Location]:
    """Return the file of an action, and its deletion vector's."""
    files = {file_path(table, str(action["path"]))}
    vector = action.get("deletionVector")
    if isinstance(vector, Mapping) and vector.get("storageType") in ("u", "p"):
        from headrace.lake.delta.deletion_vectors import vector_file

        named = str(vector["pathOrInlineDv"])
        files.add(table / vector_file(named) if vector["storageType"] == "u" else file_path(table, named))
    return files
