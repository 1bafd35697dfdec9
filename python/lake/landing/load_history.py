"""History of loads, in the `userMetadata` of the commits that made them, so it cannot disagree with the table.

Read from the table's log without Spark. Where the log no longer reaches back (log retention is set to ten years), a
day counts as not loaded, and loading it again replaces it.

Days that retention has removed count as not loaded; rows that `headrace forget` has erased are no damage. Others may
change loaded days: rows are removed by `DELETE`, files are compacted by `OPTIMIZE`. What they removed stays removed:
`LoadHistory.state` tells it from damage, which loading again repairs.

Commits are read once. What they come to is kept beside the log (`_delta_log/_headrace_loads.json.gz`) with the SHA-256
of the last of them, and readers go on from there. It says nothing that the commits do not say. Where it is gone,
damaged or of another log, all commits are read again.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any

import pyarrow.parquet as pq

from headrace.lake.delta.log import Commit, DeltaLog, FileAction, FileKey, damaged_file, file_path
from headrace.lake.delta.log_files import commit_file, erased_rows
from headrace.lake.delta.retention import first_kept
from headrace.storage import Location, not_as_written
from headrace.storage.own_records import known_keys

_LOG = logging.getLogger("headrace.lake")
_MARK = "headrace.ingest"
_SUMMARY = "_headrace_loads.json.gz"
#: Of the summary's form. Another one is not read.
_SUMMARY_FORM = 1
#: So many commits may follow the summary before it is written again.
_COMMITS_AFTER_SUMMARY = 32
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
        return json.dumps({_MARK: _stored(self)}, separators=(",", ":"), ensure_ascii=False)


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


@dataclass
class _LoadedDay:
    """The data files of a day since its load, by the commits."""

    #: Size and rows of each live file; None where a commit does not say.
    live: dict[FileKey, tuple[int | None, int | None]] = field(default_factory=dict)
    #: Commits of others that changed rows: as `DELETE at version 7`, and whether rows went.
    changes: list[tuple[str, bool]] = field(default_factory=list)
    #: The live files and the changes after each commit that touched the day, for RESTORE.
    past: list[tuple[frozenset[FileKey], list[tuple[str, bool]]]] = field(default_factory=list)
    #: Rows that `headrace forget` has removed.
    erased: int = 0
    #: Why the load itself is gone.
    undone: str | None = None

    def apply(self, commit: Commit, adds: Iterable[FileAction], removes: Iterable[FileAction], is_load: bool) -> None:
        """Replay a commit: `adds` and `removes` are those of the day."""
        adds, removes = list(adds), list(removes)
        for action in removes:
            del self.live[action.key]
        self.live |= {action.key: (action.size, action.rows) for action in adds}
        of_request = erased_rows(commit.user_metadata)
        if of_request is None and not is_load and (adds or removes):
            if commit.operation == "RESTORE":
                past_changes = next((c for files, c in reversed(self.past) if files == frozenset(self.live)), None)
                if past_changes is None:
                    self.undone = f"the load was undone by RESTORE at version {commit.version}"
                    return
                self.changes = list(past_changes)
            elif any(action.data_change for action in (*adds, *removes)):
                self.changes = [*self.changes, (_describe(commit), bool(removes))]
        self.past.append((frozenset(self.live), self.changes))


@dataclass
class _Replay:
    """The state of a table's days that its commits up to a version come to."""

    version: int = -1
    #: The version of the summary that it goes on from, or that was made of it; -1: none.
    summary_version: int = -1
    #: The newest record of each day, but of those that retention has removed since.
    records: dict[str, LoadRecord] = field(default_factory=dict)
    #: By day, as the records.
    days: dict[str, _LoadedDay] = field(default_factory=dict)
    #: The version that last changed each day; "" stands for files that have none.
    changed: dict[str, int] = field(default_factory=dict)
    #: Removals of rows by others: version, what it was, and the first day that it touched.
    removals: list[tuple[int, str, str]] = field(default_factory=list)
    #: The day of each live file of a loaded day.
    _day_of: dict[FileKey, str] = field(default_factory=dict)

    def apply(self, commit: Commit) -> None:
        """Replay the next commit.

        Raises:
            UserError: a newer release has made it.
        """
        record, first = _record(commit), first_kept(commit.user_metadata)
        self.version = commit.version
        if record is not None:
            self._drop([record.ds])
            self.records[record.ds], self.days[record.ds] = record, _LoadedDay()
        self._touch(commit, record)
        if first is not None:
            self._drop([ds for ds in self.records if ds < first])
            return
        changed_days = (
            {record.ds} if record is not None else {_partition(a) or "" for a in (*commit.adds, *commit.removes)}
        )
        self.changed |= dict.fromkeys(changed_days, commit.version)
        removed_days = [_partition(action) or "" for action in commit.removes if action.data_change]
        if removed_days and record is None and erased_rows(commit.user_metadata) is None:
            self.removals.append((commit.version, _describe(commit), min(removed_days)))

    def _touch(self, commit: Commit, record: LoadRecord | None) -> None:
        """Replay a commit for each loaded day that it touches."""
        adds: dict[str, list[FileAction]] = {}
        removes: dict[str, list[FileAction]] = {}
        for action in commit.adds:
            if (ds := _partition(action)) in self.days:
                adds.setdefault(ds, []).append(action)
        for action in commit.removes:
            if (ds := self._day_of.pop(action.key, None)) is not None:
                removes.setdefault(ds, []).append(action)
        of_request = erased_rows(commit.user_metadata) or {}
        loaded = set() if record is None else {record.ds}
        for ds in {*adds, *removes, *loaded, *of_request} & self.days.keys():
            day = self.days[ds]
            day.erased += of_request.get(ds, 0)
            if day.undone is None:
                day.apply(commit, adds.get(ds, ()), removes.get(ds, ()), ds in loaded)
                self._day_of |= dict.fromkeys(day.live, ds)

    def _drop(self, days: Iterable[str]) -> None:
        for ds in days:
            self.records.pop(ds, None)
            if (day := self.days.pop(ds, None)) is not None:
                for key in day.live:
                    self._day_of.pop(key, None)

    def text(self) -> str:
        """Return it as JSON."""
        days = {
            ds: {
                "live": [[*key, *sizes] for key, sizes in day.live.items()],
                "changes": day.changes,
                "past": [[sorted(files), changes] for files, changes in day.past],
                "erased": day.erased,
                "undone": day.undone,
            }
            for ds, day in self.days.items()
        }
        records = {ds: _stored(record) | {"version": record.version} for ds, record in self.records.items()}
        return json.dumps(
            {
                "version": self.version,
                "records": records,
                "days": days,
                "changed": self.changed,
                "removals": self.removals,
            },
            separators=(",", ":"),
            ensure_ascii=False,
        )

    @classmethod
    def of_text(cls, text: str) -> _Replay:
        """Read what `text` returned. Raises ValueError, KeyError or TypeError of other texts."""
        stored = json.loads(text)
        replay = cls(stored["version"], stored["version"], changed=stored["changed"])
        replay.removals = [(version, description, ds) for version, description, ds in stored["removals"]]
        for ds, record in stored["records"].items():
            replay.records[ds] = LoadRecord(**record)
        for ds, day in stored["days"].items():
            live = {(path, vector): (size, rows) for path, vector, size, rows in day["live"]}
            past = [(frozenset((p, v) for p, v in files), _changes(changes)) for files, changes in day["past"]]
            replay.days[ds] = _LoadedDay(live, _changes(day["changes"]), past, day["erased"], day["undone"])
            replay._day_of |= dict.fromkeys(live, ds)
        return replay


class LoadHistory:
    """Loads that the log of the events' table records. Raises UserError where a newer release has loaded a day."""

    def __init__(self, log: DeltaLog) -> None:
        self.log = log
        self._replay = _replay(log)

    @property
    def version(self) -> int:
        """The version of the table, as this history has it; -1: there is none."""
        return self._replay.version

    @property
    def records(self) -> dict[str, LoadRecord]:
        """The newest record of each day, but of those that retention has removed since."""
        return self._replay.records

    def state(self, ds: str) -> DayState:
        """Return what became of a loaded day since its load."""
        record, day = self.records[ds], self._replay.days[ds]
        if day.undone is not None:
            return DayState(0, damage=day.undone)
        removed = tuple(description for description, is_removal in day.changes if is_removal)
        counts = [rows for _, rows in day.live.values()]
        rows = sum(n or 0 for n in counts)
        sizes = {key: size for key, (size, _) in day.live.items() if size is not None}
        damage = not_as_written({file_path(self.log.folder, path): size for (path, _), size in sizes.items()})
        if damage is None and not removed and day.changes:
            damage = f"rows were added by {day.changes[0][0]}"
        elif damage is None and (None in counts or (not removed and rows + day.erased != record.rows["kept"])):
            damage = f"its files hold {rows:,} rows, not {record.rows['kept'] - day.erased:,}"
        return DayState(rows, removed, damage)

    def last_change(self, ds: str) -> int:
        """Return the version that last changed a landing day up to `ds`: later versions are of later days alone."""
        versions = [version for day, version in self._replay.changed.items() if day <= ds]
        return max(versions) if versions else min(self.log.versions())

    def removed_by_others(self, after: int, ds: str) -> str | None:
        """Return the first commit after a version by which others removed or changed rows of days up to `ds`."""
        return next((text for version, text, day in self._replay.removals if version > after and day <= ds), None)

    def save_summary(self) -> None:
        """Keep what the commits come to beside the log, where many came since the last time."""
        replay = self._replay
        if replay.version - replay.summary_version <= _COMMITS_AFTER_SUMMARY:
            return
        heading = json.dumps({"form": _SUMMARY_FORM, "commit": _commit_sha256(self.log, replay.version)})
        data = gzip.compress(f"{heading}\n{replay.text()}".encode(), compresslevel=1, mtime=0)
        (self.log.folder / "_delta_log" / _SUMMARY).put_bytes(data)
        replay.summary_version = replay.version


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


def _replay(log: DeltaLog) -> _Replay:
    """Return what all commits come to. It is shared, and must not be changed."""
    version = log.version
    if version is None:
        return _Replay()
    log.check()
    # Commits never change; another table in the same place has other times.
    return _replay_commits(log.folder, version, log.committed_ns(version))


@lru_cache(maxsize=16)
def _replay_commits(folder: Location, version: int, committed_ns: int) -> _Replay:
    log = DeltaLog(folder)
    replay = _summary(log) or _Replay()
    for commit in reversed(list(log.commits(replay.version))):
        replay.apply(commit)
    return replay


def _summary(log: DeltaLog) -> _Replay | None:
    """Return what is kept beside the log; None where there is nothing, or not of this log."""
    file = log.folder / "_delta_log" / _SUMMARY
    try:
        heading, _, text = gzip.decompress(file.read_bytes()).decode().partition("\n")
        stored = json.loads(heading)
        if stored["form"] != _SUMMARY_FORM:
            return None
        replay = _Replay.of_text(text)
        return replay if _commit_sha256(log, replay.version) == stored["commit"] else None
    except FileNotFoundError:
        return None
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as e:
        _LOG.info("%s is damaged (%s): the commits are read instead", file, e)
        return None


def _commit_sha256(log: DeltaLog, version: int) -> str:
    return hashlib.sha256(commit_file(log.folder / "_delta_log", version).read_bytes()).hexdigest()


def _stored(record: LoadRecord) -> dict[str, Any]:
    stored = asdict(record)
    del stored["version"]
    if not record.bad_files:  # releases that do not know the key read the record
        del stored["bad_files"]
    return stored


def _changes(stored: Iterable[Sequence[Any]]) -> list[tuple[str, bool]]:
    return [(str(description), bool(is_removal)) for description, is_removal in stored]


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


def _partition(action: FileAction) -> str | None:
    """Return the landing day of a data file; a `remove` may tell it by its path alone."""
    if action.partition:
        return action.partition.get("ds")
    match = _PARTITION.search(str(action.path))
    return None if match is None else match.group(1)


def _describe(commit: Commit) -> str:
    return f"{commit.operation} at version {commit.version}"
