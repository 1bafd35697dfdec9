"""Loading days: read together, checked, and committed one by one.

A day is loaded in this order, so that a kill between any two steps is healed by running again:

1. its files are read once and typed into a staging folder; expectations can stop the day here;
2. bad rows replace the day's partition of the quarantine table;
3. good rows replace the day's partition of the events table. The same commit says which files it came from, so the
   day is loaded if and only if its rows are there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog
from headrace.lake.ingest import deduplicate
from headrace.lake.ingest.assess import assess_day
from headrace.lake.ingest.completeness import behind, incomplete, warn_left_out
from headrace.lake.ingest.day_files import DayFiles
from headrace.lake.ingest.load_history import LoadRecord
from headrace.lake.ingest.plan import LoadPlan
from headrace.lake.ingest.profile import FileProfile, profiles
from headrace.lake.ingest.source_context import SourceContext
from headrace.lake.ingest.tables import may_have_rows, replace_days
from headrace.lake.ingest.typed_rows import typed
from headrace.lake.ingest.withhold import withheld_rows
from headrace.lake.landing import LandingDay, following
from headrace.lake.sources.formats import FORMATS, SourceFormat
from headrace.lake.sources.frame import BAD, GOOD, quoted
from headrace.lake.sources.lines import FileDamaged, LandingBatch, damaged_file_named, one_file_a_task
from headrace.storage import Location

_LOG = logging.getLogger("headrace.lake")


@dataclass(frozen=True)
class _CheckedDay:
    """A day that may be committed."""

    day: LandingDay
    record: LoadRecord
    #: Undeclared columns that the table has or gets.
    extra: list[str]


@dataclass(frozen=True)
class _Dropped:
    """Rows that are not loaded: their positions, and how many of each day."""

    rows: DataFrame | None
    counts: Mapping[str, int]

    @staticmethod
    def stage(rows: DataFrame | None, folder: Location) -> _Dropped:
        """Compute them once. `rows`: `_ds`, `_file`, `_line`, `_copy`; None: there are none."""
        if rows is None:
            return _Dropped(None, {})
        staged = _stage(rows.sparkSession, rows, folder)
        return _Dropped(staged, {r["_ds"]: r["count"] for r in staged.groupBy("_ds").count().collect()})

    def without(self, rows: DataFrame, ds: str | None = None) -> DataFrame:
        """The others of `rows`, which are of the day `ds` (None: of all days)."""
        if self.rows is None or not (sum(self.counts.values()) if ds is None else self.counts.get(ds)):
            return rows
        mine = self.rows if ds is None else self.rows.where(F.col("_ds") == ds)
        return rows.join(mine.drop("_ds"), ["_file", "_line", "_copy"], "left_anti")


@dataclass(frozen=True)
class Load:
    """The loading of one source in one run."""

    ctx: SourceContext
    plan: LoadPlan
    spark: SparkSession

    def run(self) -> None:
        """Load all days of the plan.

        Raises:
            UserError: a file is damaged, or a day may not be loaded. Days before it are loaded.
            IncompleteError: the run's own day is behind its watermark. Others are loaded.
        """
        for days in self.plan.batches():
            self._load(days)

    def _load(self, days: list[DayFiles]) -> None:
        batch = LandingBatch(self.spark, self.ctx.landing_source, self.ctx.table, tuple(d.day for d in days))
        try:
            self._load_batch(batch, days)
        except FileDamaged as e:
            damaged = e
        else:
            return
        before = [day for day in days if day.ds < damaged.ds]
        if before:
            self._load(before)
        raise UserError(
            f"landing file {damaged.file.name} cannot be read: {damaged.cause}. Nothing of {damaged.ds} was loaded; "
            f"deliver the file again"
        )

    def _load_batch(self, batch: LandingBatch, days: list[DayFiles]) -> None:
        tick = time.perf_counter()
        with self._staging() as staging:
            rows = self._read(batch, staging / "rows")
            files = profiles(rows, batch.table, batch)
            found, left_out = len(days), self._behind(days, files)
            days = [d for d in days if d.ds not in left_out]
            if len(days) < found:
                rows = rows.where(~F.col("_ds").isin(sorted(left_out)))
            deleted = _Dropped.stage(withheld_rows(self.ctx, self.plan, rows, days), staging / "deleted")
            remaining = deleted.without(rows)
            duplicates = _Dropped.stage(self._duplicates(remaining, batch.days, left_out), staging / "duplicates")
            read = sum(f.read for f in files)
            seconds = time.perf_counter() - tick
            _LOG.info(
                "read %s rows of %d files in %.1f s (%s rows/s)",
                f"{read:,}",
                len(files),
                seconds,
                f"{read / max(seconds, 1e-9):,.0f}",
            )
            checked, stopped = self._check_days(days, files, duplicates, deleted)
            if checked:
                any_bad = any(c.record.rows["quarantined"] for c in checked)
                self._commit_quarantine(rows, [c.day for c in checked], any_bad)
            for c in checked:
                of_day = remaining if deleted.counts.get(c.day.ds) else rows
                self._commit_events(duplicates.without(of_day, c.day.ds), c)
            if stopped is not None:
                raise stopped
            if self.ctx.ds in left_out:
                raise incomplete(self.ctx, self.ctx.ds, [left_out[self.ctx.ds]])

    def _behind(self, days: list[DayFiles], files: list[FileProfile]) -> dict[str, str]:
        """Days that are behind their watermark, and how far."""
        found = {}
        for day in days:
            greatest = max((f.watermark for f in files if f.ds == day.ds and f.watermark), default=None)
            why = behind(self.ctx.source, day.ds, greatest)
            if why is not None:
                found[day.ds] = why
                if day.ds != self.ctx.ds:
                    warn_left_out(day.ds, why)
        return found

    def _check_days(
        self, days: list[DayFiles], files: list[FileProfile], duplicates: _Dropped, deleted: _Dropped
    ) -> tuple[list[_CheckedDay], UserError | None]:
        """The days up to the first that may not be loaded, and why not."""
        checked: list[_CheckedDay] = []
        existing = DeltaLog(self.ctx.events).columns()
        for day in days:
            try:
                of_day = [f for f in files if f.ds == day.ds]
                counts = duplicates.counts.get(day.ds, 0), deleted.counts.get(day.ds, 0)
                record, extra = assess_day(self.ctx, self.plan, day, of_day, *counts, existing)
            except UserError as e:
                return checked, e
            checked.append(_CheckedDay(day.day, record, extra))
            existing |= dict.fromkeys(extra, "string")
        return checked, None

    @contextmanager
    def _staging(self) -> Iterator[Location]:
        """A folder for rows on their way, gone at the end (a killed run's goes here)."""
        folder = self.ctx.staging
        folder.remove_quietly()
        folder.make_dir()
        try:
            yield folder
        finally:
            folder.remove()

    def _read(self, batch: LandingBatch, folder: Location) -> DataFrame:
        """The typed rows of a batch, as Parquet files: one a landing file.

        Not Spark's cache: a plan that reads files is a short one, and this one is planned again for each commit.
        """
        source = _source_format(batch)
        with one_file_a_task(self.spark), damaged_file_named(batch):
            frames = [typed(frame, batch.source, batch.table) for frame in source.read(batch)]
            rows = _stage(self.spark, reduce(DataFrame.unionByName, frames), folder / "lines")
        return rows if source.finish is None else _stage(self.spark, source.finish(rows, batch), folder / "finished")

    def _duplicates(self, rows: DataFrame, days: tuple[LandingDay, ...], left_out: Collection[str]) -> DataFrame | None:
        table = self.ctx.table
        if not table.keys:
            return None
        loaded = None
        if self.ctx.source.daily:
            late = table.late_days
            near = self.spark.read.format("delta").load(str(self.ctx.events))
            near = near.where(F.col("ds").between(following(days[0].ds, -late), following(days[-1].ds, late)))
            # Days that are loaded and stay: those still to be loaded again are compared when their turn comes.
            pending = {d.ds for d in self.plan.days if d.ds >= days[0].ds} - set(left_out)
            near = near.where(~F.col("ds").isin(sorted(pending)))
            loaded = near.select(*(F.col(k) for k in quoted(table.keys)), "ds")
        return deduplicate.duplicates(rows, loaded, table)

    def _commit_quarantine(self, rows: DataFrame, days: list[LandingDay], any_bad: bool) -> None:
        """Bad rows of all the days, in one commit: what a kill before the events' commits leaves is replaced again."""
        for day in days:
            _check_unchanged(day)
        names = [day.ds for day in days]
        if not any_bad and not may_have_rows(self.ctx.quarantine, names):
            return
        bad = rows.where((F.col("_state") == BAD) & F.col("_ds").isin(names))
        line = F.col("_line").alias("_source_line")
        bad = bad.select("_source_file", line, "_raw", "_reason", F.col("_ds").alias("ds"))
        replace_days(bad, self.ctx.quarantine, names, "")

    def _commit_events(self, rows: DataFrame, checked: _CheckedDay) -> None:
        tick = time.perf_counter()
        day = checked.day
        _check_unchanged(day)
        good = rows.where((F.col("_ds") == day.ds) & (F.col("_state") == GOOD))
        good = good.select(
            *quoted([c.name for c in self.ctx.table.columns]),
            *(F.try_element_at("_extra", F.lit(name)).alias(name) for name in checked.extra),
            "_source_file",
            F.col("_line").alias("_source_line"),
            F.col("_ds").alias("ds"),
        )
        record = replace(checked.record, quarantine=_newest(self.ctx.quarantine))
        replace_days(good, self.ctx.events, [day.ds], record.metadata())
        counts = ", ".join(f"{name} {n:,}" for name, n in record.rows.items())
        _LOG.info("%s: %s; committed in %.1f s", day.ds, counts, time.perf_counter() - tick)


def _newest(table: Location) -> int:
    version = DeltaLog(table).version
    assert version is not None
    return version


def _source_format(batch: LandingBatch) -> SourceFormat:
    found = FORMATS[batch.source.format]
    declared = {c.name for c in batch.table.columns}
    for name in found.columns:
        if name not in declared:
            raise UserError(f"source.format '{batch.source.format}' needs column '{name}' in table.columns")
    for c in batch.table.columns:
        if c.path is not None and not found.paths:
            raise UserError(
                f"table.columns: '{c.name}' has a path, but the fields of '{batch.source.format}' have none"
            )
    return found


def _stage(spark: SparkSession, frame: DataFrame, folder: Location) -> DataFrame:
    frame.write.parquet(str(folder))
    return spark.read.schema(frame.schema).parquet(str(folder))


def _check_unchanged(day: LandingDay) -> None:
    for file in day.files:
        if not file.unchanged():
            raise UserError(
                f"landing file {file.name} changed while it was read; nothing of {day.ds} was loaded. Run again when "
                f"it is complete"
            )
