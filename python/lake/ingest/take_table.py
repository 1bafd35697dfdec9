"""Ingest of a source table: its version is pinned, its days are checked, and rows that break the declaration noted.

Nothing of the table is copied.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator

from pyspark.sql import SparkSession

from headrace.errors import UserError
from headrace.lake import landing
from headrace.lake.ingest.check_days import DaysCheck
from headrace.lake.ingest.completeness import behind, incomplete, warn_left_out
from headrace.lake.ingest.judged_rows import newest
from headrace.lake.ingest.plan import declaration
from headrace.lake.ingest.table_look import TableLook
from headrace.lake.tables.change_feed import ChangeFeed
from headrace.lake.tables.snapshot import FileSnapshot, Snapshot
from headrace.manifest import fingerprint

_LOG = logging.getLogger("headrace.lake")


class TableCheck:
    """The days of a source table that a run has to check."""

    def __init__(self, seen: TableLook, version: int) -> None:
        """`version`: of the stage ingest."""
        self.seen, self.ctx, self.source, self.table = seen, seen.ctx, seen.source, seen.ctx.table
        self.declared = declaration(self.source, self.table, version)
        self.judged = fingerprint(self.table.model_dump(mode="json"))
        #: Oldest first.
        self.days = self._to_check()

    def _to_check(self) -> list[str]:
        taken, own = self.seen.taken.days, self.ctx.ds
        found = set()
        for ds, version in self.seen.versions.items():
            record = taken.get(ds)
            same = record is not None and record.files == version and record.declared == self.declared
            if not same or (ds == own and record is not None and record.judged != self.judged):
                found.add(ds)
        if self.source.daily and self.table.keys:
            # Their duplicates were found by what is checked anew.
            late = self.table.late_days
            near = {landing.following(ds, k) for ds in found if ds in taken for k in range(1, late + 1)}
            found |= near & taken.keys() & self.seen.versions.keys()
        return sorted(found)

    def run(self, spark: SparkSession) -> None:
        """Check them, and take those up to the first that may not be taken: in one commit, of a feed in one a day.

        Raises:
            UserError: a type is not as declared, a day breaks an expectation, or has changed in a way that is refused.
            IncompleteError: the run's own day is behind its watermark. Others are taken.
        """
        left_out = self._behind(spark)
        self.days = [ds for ds in self.days if ds not in left_out]
        done: list[str] = []
        for days, snapshot in self._views():
            self._check_files(snapshot, days)
            DaysCheck(self.seen, snapshot, days, tuple(done), self.declared, self.judged).run(spark)
            done += days
        if self.ctx.ds in left_out:
            raise incomplete(self.ctx, self.ctx.ds, [left_out[self.ctx.ds]])

    def _check_files(self, snapshot: Snapshot, days: Collection[str]) -> None:
        """Raises UserError where a file is not the one that the table's log names: Spark reads an empty one as no rows.

        A folder's files are as they are listed.
        """
        if not isinstance(snapshot, FileSnapshot) or not snapshot.versioned:
            return
        what = snapshot.damage(days if self.source.daily else None)
        if what is not None:
            raise UserError(
                f"{self.ctx.where}source: {self.source.shown} cannot be read at version {snapshot.pin({})}: {what}. "
                f"Restore that file, or have the table written again"
            )

    def _views(self) -> Iterator[tuple[list[str], Snapshot]]:
        """The days that are taken together, and what they are checked by.

        A day of a feed is checked as it was when it ended, whatever was updated or deleted since: so days that are
        taken in one run are what they are day by day.
        """
        snapshot = self.seen.snapshot
        if not isinstance(snapshot, ChangeFeed):
            yield from [(self.days, snapshot)] if self.days else ()
            return
        for ds in self.days:
            yield [ds], snapshot.at(ds, self.seen.versions)

    def _behind(self, spark: SparkSession) -> dict[str, str]:
        """Days to be taken for the first time that the table's watermark has not reached yet, and how far it is."""
        watermark = self.source.complete and self.source.complete.watermark
        new = [ds for ds in self.days if ds not in self.seen.taken.days]
        if not watermark or not new:
            return {}
        column = next(c for c in self.table.columns if c.name == watermark.column)
        parts = self.seen.snapshot.stored_rows(spark, None, [column.steps])
        reached = (newest(part.frame, column, self.source) for part in parts)
        greatest = max((one for one in reached if one is not None), default=None)
        found = {ds: why for ds in new if (why := behind(self.source, ds, greatest)) is not None}
        for ds, why in found.items():
            if ds != self.ctx.ds:
                warn_left_out(ds, why)
        return found
