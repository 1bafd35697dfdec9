"""History of loads, in the `userMetadata` of the commits that made them, so it cannot disagree with the table.

Read from the table's log without Spark. Where the log no longer reaches back (log retention is set to ten years), a
day counts as not loaded, and loading it again replaces it.

Days that retention has removed count as not loaded; rows that `headrace forget` has erased are no damage. Others may
change loaded days: rows are removed by `DELETE`, files are compacted by `OPTIMIZE`. What they removed stays removed:
`LoadHistory.state` tells it from damage, which loading again repairs.

Commits are read once. What they come to is kept beside the log (`_delta_log/_headrace_loads.json.gz`) with the SHA-256
of the last of them, and readers go on from there. It has a line a day, which is parsed when somebody asks for the day:
the time of an ingest does not follow the days of the table. It says nothing that the commits do not say. Where it is
gone, damaged or of another log, all commits are read again.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any, Generic, TypeVar

import pyarrow.parquet as pq

from headrace.errors import known_keys
from headrace.lake.delta.log import Commit, DeltaLog, FileAction, FileKey, damaged_file, file_path
from headrace.lake.delta.log_files import commit_file, erased_rows, first_kept
from headrace.storage import Location, not_as_written

_LOG = logging.getLogger("headrace.lake")
_MARK = "headrace.ingest"
_SUMMARY = "_headrace_loads.json.gz"
#: Of the summary's form. Another one is not read.
_SUMMARY_FORM = 2
#: So many commits may follow the summary before it is written again.
_COMMITS_AFTER_SUMMARY = 32
_PARTITION = re.compile(r"(?:^|/)ds=([^/]+)/")

_V = TypeVar("_V")


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
        return _json({_MARK: _stored(self)})


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

    def stored(self) -> list[Any]:
        """Return it as JSON has it."""
        live = [[*key, *sizes] for key, sizes in self.live.items()]
        return [live, self.changes, [[sorted(files), c] for files, c in self.past], self.erased, self.undone]

    @classmethod
    def of_stored(cls, stored: Sequence[Any]) -> _LoadedDay:
        """Read what `stored` returned."""
        live, changes, past, erased, undone = stored
        return cls(
            {(path, vector): (size, rows) for path, vector, size, rows in live},
            _changes(changes),
            [(frozenset((path, vector) for path, vector in files), _changes(c)) for files, c in past],
            erased,
            undone,
        )


class _ByDay(MutableMapping[str, _V], Generic[_V]):
    """Values of days, of which those of a summary are parsed when they are asked for.

    Args:
        parse: reads a value from the JSON of its day.
        lines: that JSON, by day. It is shared with other values of the day.
    """

    def __init__(self, parse: Callable[[str], _V], lines: Mapping[str, str] | None = None) -> None:
        self._parse, self._lines = parse, lines or {}
        #: None: not parsed yet. In the order of the days' last loads.
        self._values: dict[str, _V | None] = dict.fromkeys(self._lines)

    def __getitem__(self, ds: str) -> _V:
        value = self._values[ds]
        if value is None:
            value = self._values[ds] = self._parse(self._lines[ds])
        return value

    def __setitem__(self, ds: str, value: _V) -> None:
        self._values[ds] = value

    def __delitem__(self, ds: str) -> None:
        del self._values[ds]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, ds: object) -> bool:
        return ds in self._values

    def line(self, ds: str) -> str | None:
        """Return the JSON of a day whose value was not parsed; None: it was."""
        return self._lines[ds] if self._values[ds] is None else None


@dataclass
class _Replay:
    """The state of a table's days that its commits up to a version come to."""

    version: int = -1
    #: The version of the summary that it goes on from, or that was made of it; -1: none.
    summary_version: int = -1
    #: The newest record of each day, but of those that retention has removed since.
    records: _ByDay[LoadRecord] = field(default_factory=lambda: _ByDay(_parsed_record))
    #: By day, as the records.
    days: _ByDay[_LoadedDay] = field(default_factory=lambda: _ByDay(_parsed_day))
    #: The key of each record, by its day.
    keys: dict[str, str] = field(default_factory=dict)
    #: The days that each record says to load again, by its day; those that name none are not in it.
    then: dict[str, list[str]] = field(default_factory=dict)
    #: The version that last changed each day; "" stands for files that have none.
    changed: dict[str, int] = field(default_factory=dict)
    #: Removals of rows by others: version, what it was, and the first day that it touched.
    removals: list[tuple[int, str, str]] = field(default_factory=list)

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
            self.keys[record.ds] = record.key
            if record.then:
                self.then[record.ds] = record.then
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
            if (added := _partition(action)) is not None and added in self.days:
                adds.setdefault(added, []).append(action)
        for action in commit.removes:
            if (ds := self._day_of(action)) is not None:
                removes.setdefault(ds, []).append(action)
        of_request = erased_rows(commit.user_metadata) or {}
        loaded = set() if record is None else {record.ds}
        for ds in {*adds, *removes, *loaded, *of_request} & self.days.keys():
            day = self.days[ds]
            day.erased += of_request.get(ds, 0)
            if day.undone is None:
                day.apply(commit, adds.get(ds, ()), removes.get(ds, ()), ds in loaded)

    def _day_of(self, action: FileAction) -> str | None:
        """Return the loaded day that has a data file; None: no such day."""
        ds = _partition(action)
        days: Iterable[str] = self.days if ds is None else {ds} & self.days.keys()
        return next((day for day in days if action.key in self.days[day].live), None)

    def _drop(self, days: Iterable[str]) -> None:
        for ds in days:
            for of_days in (self.records, self.days, self.keys, self.then):
                of_days.pop(ds, None)

    def lines(self) -> Iterator[str]:
        """Yield lines of JSON: what is of all days, then a line a day, [record, files], in the order of `keys`."""
        of_all = {"version": self.version, "then": self.then, "changed": self.changed, "removals": self.removals}
        yield _json(of_all | {"keys": self.keys})
        for ds in self.keys:
            line = self.records.line(ds)
            if line is None or self.days.line(ds) is None:
                record = self.records[ds]
                line = _json([_stored(record) | {"version": record.version}, self.days[ds].stored()])
            yield line

    @classmethod
    def of_lines(cls, lines: Sequence[str]) -> _Replay:
        """Read what `lines` yielded. Raises ValueError, KeyError, TypeError or IndexError of other lines."""
        stored = json.loads(lines[0])
        by_day = dict(zip(stored["keys"], lines[1:], strict=True))
        return cls(
            stored["version"],
            stored["version"],
            _ByDay(_parsed_record, by_day),
            _ByDay(_parsed_day, by_day),
            stored["keys"],
            stored["then"],
            stored["changed"],
            [(version, description, ds) for version, description, ds in stored["removals"]],
        )


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
    def records(self) -> Mapping[str, LoadRecord]:
        """The newest record of each day, but of those that retention has removed since."""
        return self._replay.records

    def loaded_by(self, key: str) -> list[LoadRecord]:
        """Return the records of the run with a key, in the order of their days."""
        return [self.records[ds] for ds in sorted(ds for ds, of_run in self._replay.keys.items() if of_run == key)]

    def to_load_again(self) -> set[str]:
        """Return the days that a later load of another day says to load again, and that were not since."""
        records = self.records
        pairs = ((ds, records[loaded].version) for loaded, then in self._replay.then.items() for ds in then)
        return {ds for ds, version in pairs if ds in records and records[ds].version < version}

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
        heading = _json({"form": _SUMMARY_FORM, "commit": _commit_sha256(self.log, replay.version)})
        data = gzip.compress("\n".join((heading, *replay.lines())).encode(), compresslevel=1, mtime=0)
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
        lines = gzip.decompress(file.read_bytes()).decode().split("\n")
        stored = json.loads(lines[0])
        if stored["form"] != _SUMMARY_FORM:
            return None
        replay = _Replay.of_lines(lines[1:])
        return replay if _commit_sha256(log, replay.version) == stored["commit"] else None
    except FileNotFoundError:
        return None
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
        _LOG.info("%s is damaged (%s): the commits are read instead", file, e)
        return None


def _commit_sha256(log: DeltaLog, version: int) -> str:
    return hashlib.sha256(commit_file(log.folder / "_delta_log", version).read_bytes()).hexdigest()


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _parsed_record(line: str) -> LoadRecord:
    return LoadRecord(**json.loads(line)[0])


def _parsed_day(line: str) -> _LoadedDay:
    return _LoadedDay.of_stored(json.loads(line)[1])


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
