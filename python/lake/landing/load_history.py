"""History of loads, in the `userMetadata` of the commits that made them, so it cannot disagree with the table.

Read from the table's log without Spark. Where the log no longer reaches back (log retention is set to ten years), a
day counts as not loaded, and loading it again replaces it.

Days that retention has removed count as not loaded; rows that `headrace forget` has erased are no damage. Others may
change loaded days: rows are removed by `DELETE`, files are compacted by `OPTIMIZE`. What they removed stays removed:
`LoadHistory.state` tells it from damage, which loading again repairs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any

import pyarrow.parquet as pq

from headrace.lake.delta.erased import erased_rows
from headrace.lake.delta.log import Commit, DeltaLog, FileAction, FileKey, damaged_file
from headrace.lake.delta.retention import first_kept
from headrace.storage import Location, not_as_written
from headrace.storage.own_records import known_keys

_MARK = "headrace.ingest"
_PARTITION = re.compile(r"(?:^|/)ds=([^/]+)/")


@dataclass(frozen=True)
class LoadRecord:
    """One load of one day."""

    ds: str
    #: Key of the run that did it.
    key: str
    #: Fingerprint of all of the spec that decides what becomes of a file's rows.
    declared: str
    #: Fingerprint of the declaration with all its expectations.
    judged: str
    #: [name, size, SHA-256] of each file (a time in nanoseconds in place of the SHA-256: of an older release).
    files: list[list[Any]]
    #: read, kept, quarantined, duplicates; where there are such: expanded, deleted (left out:
    #: headrace.lake.landing.load), forgotten (headrace.lake.forgotten).
    rows: dict[str, int]
    #: Days that must be loaded again after this load: their duplicates were found by what it replaced.
    then: list[str] = field(default_factory=list)
    drift: list[dict[str, Any]] = field(default_factory=list)
    expectations: list[dict[str, Any]] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    #: Modification time of each file, nanoseconds since the epoch: one with the same size and time is not read again
    #: to know that it is the same.
    modified: dict[str, int] = field(default_factory=dict)
    #: Of files in stores that give them: the store's name of each one's content, which is asked in place of the time.
    tags: dict[str, str] = field(default_factory=dict)
    #: Version of the quarantine table that has the bad rows of this load; -1: not known.
    quarantine: int = -1
    #: Whether others have deleted rows of the day, before this load or an earlier one.
    erased: bool = False
    #: By name: files none of whose rows was taken, and why (`expectations.max_bad_files`).
    bad_files: dict[str, str] = field(default_factory=dict)
    #: Of the commit; not stored in it.
    version: int = -1

    def metadata(self) -> str:
        """Return the text for `userMetadata`."""
        stored = asdict(self)
        del stored["version"]
        if not self.bad_files:  # releases that do not know the key read the record
            del stored["bad_files"]
        return json.dumps({_MARK: stored}, separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True)
class DayState:
    """State of a loaded day."""

    #: Rows there are now.
    rows: int
    #: Commits of others that removed or changed rows, as `DELETE at version 7`.
    changed_by: tuple[str, ...] = ()
    #: Why the day must be loaded again: files are gone, rows were added, or the load was undone by RESTORE.
    damage: str | None = None


#: Of a record as it is stored.
_KEYS = frozenset(f.name for f in fields(LoadRecord)) - {"version"}


class LoadHistory:
    """Loads that the log of the events' table records. Raises UserError where a newer release has loaded a day."""

    def __init__(self, log: DeltaLog) -> None:
        self.log = log
        self._commits = _commits(log)
        #: Of the table, as this history has it; -1: there is none.
        self.version = self._commits[0].version if self._commits else -1
        #: The newest record of each day, but of those that retention has removed since.
        self.records: dict[str, LoadRecord] = {}
        expired = ""
        for commit in self._commits:
            record = _record(commit)
            if record is not None and record.ds >= expired:
                self.records.setdefault(record.ds, record)
            expired = max(expired, first_kept(commit.user_metadata) or "")

    def state(self, ds: str) -> DayState:
        """Return what became of a loaded day since its load."""
        record, erased = self.records[ds], 0
        live: dict[FileKey, FileAction] = {}
        changes: list[tuple[Commit, bool]] = []
        #: Files and changes after each commit.
        past: list[tuple[frozenset[FileKey], list[tuple[Commit, bool]]]] = []
        for commit in reversed(self._commits):
            if commit.version < record.version:
                continue
            adds = [a for a in commit.adds if _partition(a) == ds]
            removes = [r for r in commit.removes if r.key in live]
            for action in removes:
                del live[action.key]
            live |= {a.key: a for a in adds}
            of_request = erased_rows(commit.user_metadata)
            if of_request is not None:
                erased += of_request.get(ds, 0)
            elif commit.version > record.version and (adds or removes):
                if commit.operation == "RESTORE":
                    back = next((c for files, c in reversed(past) if files == frozenset(live)), None)
                    if back is None:
                        return DayState(0, damage=f"the load was undone by RESTORE at version {commit.version}")
                    changes = back
                elif any(a.data_change for a in (*adds, *removes)):
                    changes = [*changes, (commit, bool(removes))]
            past.append((frozenset(live), changes))
        removed = tuple(_describe(c) for c, is_removal in changes if is_removal)
        counts = [a.rows for a in live.values()]
        rows = sum(n or 0 for n in counts)
        damage = not_as_written({a.path: a.size for a in live.values() if a.size is not None})
        if damage is None and not removed and changes:
            damage = f"rows were added by {_describe(changes[0][0])}"
        elif damage is None and (None in counts or (not removed and rows + erased != record.rows["kept"])):
            damage = f"its files hold {rows:,} rows, not {record.rows['kept'] - erased:,}"
        return DayState(rows, removed, damage)

    def last_change(self, ds: str) -> int:
        """Return the version that last changed a landing day up to `ds`: later versions are of later days alone."""
        return _last_change(self._commits, ds)

    def removed_by_others(self, after: int, ds: str) -> str | None:
        """Return the first commit after a version by which others removed or changed rows of days up to `ds`."""
        description = None
        for commit in self._commits:
            if commit.version <= after:
                break
            removes = [r for r in commit.removes if r.data_change and (_partition(r) or "") <= ds]
            is_own = first_kept(commit.user_metadata) is not None or erased_rows(commit.user_metadata) is not None
            if removes and _record(commit) is None and not is_own:
                description = _describe(commit)
        return description


def last_change(log: DeltaLog, ds: str) -> int:
    """Return `LoadHistory.last_change` of a table that is partitioned by `ds`."""
    return _last_change(_commits(log), ds)


def row_counts(log: DeltaLog, version: int, days: set[str]) -> dict[str, int] | None:
    """Count the rows of each day at `version` by the log; None where files are damaged, or the log does not reach back.

    A day without rows is not in the answer. Rows that were erased since are counted.
    """
    files = log.files(version)
    if files is None:
        return None
    files = [file for file in files if file.partition.get("ds") in days]
    if damaged_file(files) is not None:
        return None
    counts: dict[str, int] = {}
    for file in files:
        ds, rows = str(file.partition.get("ds")), file.rows
        if rows is None:  # a writer without statistics
            rows = pq.read_metadata(file.path).num_rows - file.deleted
        counts[ds] = counts.get(ds, 0) + rows + file.erased
    return counts


def _commits(log: DeltaLog) -> tuple[Commit, ...]:
    """Return all commits, newest first."""
    version = log.version
    if version is None:
        return ()
    log.check()
    # Commits never change; another table in the same place has other times.
    return _read_commits(log.folder, version, log.committed_ns(version))


@lru_cache(maxsize=16)
def _read_commits(folder: Location, version: int, committed_ns: int) -> tuple[Commit, ...]:
    return tuple(DeltaLog(folder).commits())


def _last_change(commits: tuple[Commit, ...], ds: str) -> int:
    for commit in commits:
        if first_kept(commit.user_metadata) is not None:
            continue
        record = _record(commit)
        days = {record.ds} if record is not None else set(_days(commit))
        if any(day <= ds for day in days):
            return commit.version
    return commits[-1].version


def _record(commit: Commit) -> LoadRecord | None:
    """Return the record in a commit; None in somebody else's."""
    if commit.user_metadata is None:
        return None
    try:
        stored = json.loads(commit.user_metadata)
    except ValueError:
        return None
    if not isinstance(stored, dict) or _MARK not in stored:
        return None
    stored_record = stored[_MARK]
    record_name = f"the load record of {stored_record.get('ds')} (version {commit.version} of the events' table)"
    return LoadRecord(**known_keys(stored_record, _KEYS, record_name), version=commit.version)


def _days(commit: Commit) -> Iterator[str]:
    return (_partition(action) or "" for action in (*commit.adds, *commit.removes))


def _partition(action: FileAction) -> str | None:
    """Return the landing day of a data file; a `remove` may tell it by its path alone."""
    if action.partition:
        return action.partition.get("ds")
    match = _PARTITION.search(str(action.path))
    return None if match is None else match.group(1)


def _describe(commit: Commit) -> str:
    return f"{commit.operation} at version {commit.version}"
