"""The publications of a table that cannot hold them itself: a JSON file a day, each replaced in one step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from headrace.own_records import known_keys
from headrace.publish.files.target import Record
from headrace.publish.target import Publication
from headrace.storage import Fence, Location
from headrace.storage.fenced_file import put_fenced

#: In a record, beside it: by lease, the token of who wrote it.
_FENCES = "fences"
#: In a record: that its day's rows change just now, and `rows` is of before.
_CHANGES = "changes"
_KEYS = frozenset(f.name for f in fields(Record))


class Records:
    """A folder of `DAY.json`. A day's file is written after its rows: until then the day counts as the run before's.

    With a fence, LeaseLost is raised where a later holder of the lease has written a day's file.
    """

    def __init__(self, folder: Location, fence: Fence | None = None) -> None:
        self._folder, self._fence = folder, fence

    def save(self, ds: str, record: Record) -> None:
        """Record a day."""
        self._put(ds, asdict(record))

    def published(self, ds: str) -> Publication | None:
        """The record of a day; None where there is none. Raises UserError where a newer release has written it."""
        file = self._folder / f"{ds}.json"
        if not file.is_file():
            return None
        found = Record(**known_keys(self._said(ds), _KEYS, str(file)))
        return Publication(found.key, found.rows, found.audit)

    def rows_by_day(self) -> dict[str, int]:
        """Day -> rows."""
        return {ds: found.rows for ds in self._days() if (found := self.published(ds)) is not None}

    def begin_change(self, days: Iterable[str]) -> None:
        """Note that days' rows change now: `changing` names them until `set_rows` does, also after a kill."""
        for ds in days:
            self._put(ds, {**self._said(ds), _CHANGES: True})

    def changing(self) -> list[str]:
        """The days of which nobody has said yet how many rows they have after their change."""
        return [ds for ds in self._days() if self._text(ds).get(_CHANGES)]

    def set_rows(self, rows: Mapping[str, int]) -> None:
        """How many rows days have by now."""
        for ds, count in rows.items():
            self._put(ds, self._said(ds) | {"rows": count})

    def forget(self, days: Sequence[str]) -> None:
        """Remove the records of days."""
        for ds in days:
            (self._folder / f"{ds}.json").remove()

    def _days(self) -> list[str]:
        return sorted(f.stem for f in self._folder.entries() if f.suffix == ".json") if self._folder.is_dir() else []

    def _text(self, ds: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self._folder / f"{ds}.json").read_text())
        return found

    def _said(self, ds: str) -> dict[str, Any]:
        """The record alone."""
        return {name: value for name, value in self._text(ds).items() if name not in (_FENCES, _CHANGES)}

    def _put(self, ds: str, said: Mapping[str, Any]) -> None:
        fences = () if self._fence is None else (self._fence,)
        whole = {**said, **({_FENCES: {f.lease: f.token for f in fences}} if fences else {})}
        text = json.dumps(whole, indent=1) + "\n"
        put_fenced(self._folder / f"{ds}.json", text, fences, lambda there: json.loads(there).get(_FENCES, {}))
