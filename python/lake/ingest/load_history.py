"""What has been loaded: kept in the `userMetadata` of the commits that loaded it, so it cannot disagree with the table.

Read from the table's log without Spark. Where the log no longer reaches back (log retention is set to ten years), a
day counts as not loaded, and loading it again replaces it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.lake.delta.log import DeltaLog
from headrace.lake.landing import LandingDay, same_files

_MARK = "headrace.ingest"


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
    #: [name, size, mtime_ns] of each file.
    files: list[list[Any]]
    rows: dict[str, int]
    #: Days that must be loaded again after this load: their duplicates were found by what it replaced.
    then: list[str] = field(default_factory=list)
    drift: list[dict[str, Any]] = field(default_factory=list)
    expectations: list[dict[str, Any]] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    #: Of the commit; not stored in it.
    version: int = -1

    def metadata(self) -> str:
        """The text for `userMetadata`."""
        stored = asdict(self)
        del stored["version"]
        return json.dumps({_MARK: stored}, separators=(",", ":"), ensure_ascii=False)


def read(log: DeltaLog) -> dict[str, LoadRecord]:
    """The newest record of each day."""
    found: dict[str, LoadRecord] = {}
    for version, text in log.user_metadata():
        try:
            stored = json.loads(text)
        except ValueError:
            continue  # somebody else's commit
        if isinstance(stored, dict) and _MARK in stored:
            record = LoadRecord(**stored[_MARK], version=version)
            found.setdefault(record.ds, record)
    return found


def row_counts(log: DeltaLog, version: int, days: set[str]) -> dict[str, int] | None:
    """Rows of each day at `version` by the log, all of whose files are on disk; None where some are not, or the log
    does not reach back. A day without rows is not in the answer.
    """
    files = log.files(version)
    if files is None:
        return None
    found: dict[str, int] = {}
    for file in files:
        ds = file.partition.get("ds")
        if ds in days:
            if not file.path.is_file() or file.rows is None:
                return None
            found[str(ds)] = found.get(str(ds), 0) + file.rows
    return found


def pending(
    days: tuple[LandingDay, ...], records: Mapping[str, LoadRecord], declared: str, judged: str, log: DeltaLog
) -> tuple[list[LandingDay], set[str]]:
    """What a run has to load.

    Args:
        days: days with landing files that it covers; the last is the run's own.
        records: what is loaded.
        declared: fingerprint of the declaration.
        judged: the same with all expectations: what the run's own day must have met; days before are not judged anew.
        log: the log of the events.

    Returns:
        those of `days` that are not loaded, or from other files, or by another declaration, or are damaged; and other
        days that are still to be reloaded after an earlier run that was killed (`then`).
    """
    version = log.version
    reloads = {d for e in records.values() for d in e.then if d in records and records[d].version < e.version}
    todo = []
    for day in days:
        record = records.get(day.ds)
        done = record is not None and same_files(day.files, asdict(record)) and record.declared == declared
        if day == days[-1] and done and record is not None:
            done = record.judged == judged
        if done and record is not None and version is not None:
            there = row_counts(log, version, {day.ds})
            done = there is not None and there.get(day.ds, 0) == record.rows["kept"]
        if not done or day.ds in reloads:
            todo.append(day)
    return todo, reloads - {d.ds for d in todo}
