"""The publications of a table that cannot hold them itself: a JSON file a day, each replaced in one step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from headrace.publish.files.target import Record
from headrace.publish.target import Publication
from headrace.storage import Location


class Records:
    """A folder of `DAY.json`. A day's file is written after its rows: until then the day counts as the run before's."""

    def __init__(self, folder: Location) -> None:
        self._folder = folder

    def save(self, ds: str, record: Record) -> None:
        """Record a day."""
        (self._folder / f"{ds}.json").put_text(json.dumps(asdict(record), indent=1) + "\n")

    def published(self, ds: str) -> Publication | None:
        """The record of a day; None where there is none."""
        file = self._folder / f"{ds}.json"
        if not file.is_file():
            return None
        found = Record(**json.loads(file.read_text()))
        return Publication(found.key, found.rows, found.audit)

    def rows_by_day(self) -> dict[str, int]:
        """Day -> rows."""
        names = sorted(f.stem for f in self._folder.entries() if f.suffix == ".json") if self._folder.is_dir() else []
        return {ds: found.rows for ds in names if (found := self.published(ds)) is not None}

    def set_rows(self, rows: Mapping[str, int]) -> None:
        """How many rows days have by now."""
        for ds, count in rows.items():
            file = self._folder / f"{ds}.json"
            file.put_text(json.dumps(json.loads(file.read_text()) | {"rows": count}, indent=1) + "\n")

    def forget(self, days: Sequence[str]) -> None:
        """Remove the records of days."""
        for ds in days:
            (self._folder / f"{ds}.json").remove()
