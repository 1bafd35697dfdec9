"""Which days of a source table were taken: kept in the `userMetadata` of the commits to the quarantine table.

The commit that says that a day was taken is the one that has the rows of it that features must leave out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from headrace.lake.delta.log import DeltaLog
from headrace.own_records import known_keys

_MARK = "headrace.ingest.table"


@dataclass(frozen=True)
class TakenDay:
    """One day as it was taken last."""

    ds: str
    #: Key of the run that did it.
    key: str
    #: Fingerprint of the data files that may hold its rows.
    files: str
    #: Version of the table (headrace.lake.tables.snapshot.Snapshot.pin).
    table_version: str
    #: Fingerprints of the declaration, see headrace.lake.ingest.load_history.LoadRecord.
    declared: str
    judged: str
    #: read, kept, quarantined, duplicates; where there are such: forgotten (headrace.lake.forgotten).
    rows: dict[str, int]
    drift: list[dict[str, Any]] = field(default_factory=list)
    expectations: list[dict[str, Any]] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    #: Rows that came, changed and went since the day was taken before: late, updated, deleted. Empty the first time.
    changes: dict[str, int] = field(default_factory=dict)

    @property
    def left_out(self) -> int:
        """Rows of the day that are in the quarantine table."""
        return self.rows["read"] - self.rows["kept"] - self.rows.get("forgotten", 0)


_KEYS = frozenset(f.name for f in fields(TakenDay))


@dataclass(frozen=True)
class TakenDays:
    """What the log of a quarantine table tells."""

    days: Mapping[str, TakenDay]
    #: Where the table was (headrace.lake.tables.opened.TablePlace).
    place: Mapping[str, Any] | None
    #: Its columns, name to type, when a day was taken last.
    columns: Mapping[str, str] | None
    #: Version of the quarantine table whose commit is the newest of ours; None before any.
    version: int | None

    @staticmethod
    def read(log: DeltaLog) -> TakenDays:
        """The newest record of each day. Raises UserError where a newer release has written one."""
        days: dict[str, TakenDay] = {}
        place = columns = newest = None
        for version, text in log.user_metadata():
            try:
                said = json.loads(text)[_MARK]
            except (ValueError, KeyError, TypeError):
                continue
            what = f"the record of days that were taken (version {version} of the quarantine table)"
            known_keys(said, ("place", "columns", "days"), what)
            if newest is None:
                newest, place, columns = version, said["place"], said["columns"]
            for day in said["days"]:
                days.setdefault(day["ds"], TakenDay(**known_keys(day, _KEYS, what)))
        return TakenDays(days, place, columns, newest)


def metadata(days: Sequence[TakenDay], place: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    """The text for `userMetadata`."""
    said = {"place": dict(place), "columns": dict(columns), "days": [asdict(d) for d in days]}
    return json.dumps({_MARK: said}, separators=(",", ":"), ensure_ascii=False)
