"""Loading days: read together, checked, and committed one by one to the tables `events` and `quarantine`.

A day is loaded in this order, so that a kill between any two steps is healed by running again:

1. its files are read once and typed into a staging folder; expectations can stop the day here;
2. bad rows replace the day's partition of the quarantine table;
3. good rows replace the day's partition of the events table. The same commit says which files it came from, so the
   day is loaded if and only if its rows are there.

Both tables are partitioned by `ds`. Rows that others have deleted from the table stay out when their day is loaded
again from the same files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from functools import reduce

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Table
from headrace.config.schema import is_wider, quoted_names
from headrace.errors import UserError
from headrace.lake.delta.data_files import WrittenFile, data_schema, ddl_fields, remove_files
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import Transaction, create_table
from headrace.lake.delta.with_spark import broken_constraints, read_version, write_checkpoint
from headrace.lake.landing.batch_rows import JudgedRows, Places, read_batch
from headrace.lake.landing.expectations import FileProfile, assess_day
from headrace.lake.landing.files import LandingDay
from headrace.lake.landing.formats import FileDamaged, FileRefused, LandingBatch, reader_of
from headrace.lake.landing.load_history import LoadRecord, row_counts
from headrace.lake.landing.plan import DayFiles, LoadPlan
from headrace.lake.landing.source_context import SourceContext, behind_watermark, incomplete, warn_left_out
from headrace.lake.landing.write_rows import QUARANTINE, Dropped
from headrace.storage import Fence, Location, StoreRefused

_LOG = logging.getLogger("headrace.lake")

#: Columns of the table of bad rows.
_QUARANTINE_COLUMNS = "_source_file string, _source_line bigint, _raw string, _reason string, ds string"


def create_tables(table: Table, events: Location, quarantine: Location) -> None:
    """Make both tables, empty, where they are not there. Needs an active session, which reads the declaration."""
    create_quarantine(quarantine)
    _create(events, f"{table.spark_schema}, _source_file string, _source_line bigint, ds string")


def create_quarantine(quarantine: Location) -> None:
    """Make the table of bad rows, empty, where it is not there. Needs an active session."""
    _create(quarantine, _QUARANTINE_COLUMNS)


def _create(path: Location, ddl: str) -> None:
    if DeltaLog(path).version is None:
        create_table(path, [f.jsonValue() for f in ddl_fields(ddl)], ["ds"])


def check_columns(table: Table, events: Location, section: str = "") -> None:
    """Compare the declared columns with those of the table, whose types may become wider by the load.

    Args:
        table: the declaration.
        events: the table's folder.
        section: before `table` in a key of the spec.

    Raises:
        UserError: the table has a declared column as a type that is neither the declared one nor a narrower one.
    """
    existing = {name.lower(): (name, type_) for name, type_ in DeltaLog(events).column_types().items()}
    for c in table.columns:
        name, type_ = existing.get(c.name.lower(), (c.name, c.stored_type))
        if name == c.name and is_wider(c.stored_type, type_):
            _LOG.info("%s: column '%s' becomes %s, and was %s; loaded days stay", events, name, c.stored_type, type_)
        elif name != c.name or type_ != c.stored_type:
            raise UserError(
                f"{section}table.columns declares '{c.name}' as {c.type}, but {events} has '{name}' as {type_}, and a "
                f"type can only become wider (int to bigint, float to double, decimals with more digits); give the "
                f"column another name, or the pipeline, or move that table away to load everything again"
            )


def may_have_rows(table: Location, days: Collection[str]) -> bool:
    """Return whether a table has, or may have, rows of the days."""
    log = DeltaLog(table)
    files = log.files(log.version) if log.version is not None else []
    return files is None or any(f.partition.get("ds") in days for f in files)


def commit_files(
    spark: SparkSession,
    table: Location,
    days: Sequence[str],
    files: Sequence[WrittenFile],
    metadata: str,
    columns: str = "",
    fence: Fence | None = None,
    since: int | None = None,
    local: Collection[int] = (),
) -> int:
    """Replace the days' partitions by data files, in one commit: also where there are none, and were none.

    Args:
        spark: the session, which is asked only where others have given the table constraints, and for checkpoints.
        table: its folder.
        days: ISO days.
        files: of these days, in the table's folder.
        metadata: the commit's userMetadata.
        columns: that the table has afterwards, in Spark's DDL; those that it lacks are added.
        fence: of the holder of the lease under which the table is written.
        since: version of the table on which the rows rest, -1 where there was no table; None: on none.
        local: versions since then that this run has committed itself.

    Returns:
        The version that was committed.

    Raises:
        TransactionOvertaken: another writer has changed rows of these days since then, or these days or the table
            itself since the commit began.
        UserError: rows break a constraint that others have given the table; a table that must not be written without
            Spark.
        LeaseLost: a later holder of the lease has committed.
    """
    transaction = Transaction(table, fence=fence)
    _check(spark, table, transaction.constraints, files)
    values = [date.fromisoformat(ds).isoformat() for ds in days]
    fields = [f.jsonValue() for f in ddl_fields(columns)] if columns else []
    if since is not None:
        transaction.refuse_changes_since(since, "ds", values, local)
    version = transaction.replace("ds", values, [f.add_action() for f in files], metadata, fields)
    if transaction.wants_checkpoint(version):
        write_checkpoint(spark, table)
    return version


@contextmanager
def forgotten_unless_refused(written: list[WrittenFile], committed: Sequence[WrittenFile]) -> Iterator[None]:
    """Take committed files off the list of files to remove, unless the commit was refused.

    Of a commit whose answer is lost nobody knows here whether the log names the files; neither where the process is
    interrupted. Files that it does not name take room until VACUUM; files that it names must be there.

    Args:
        written: files that no commit names; changed in place.
        committed: those that this commit names.
    """
    try:
        yield
    except UserError as e:
        if isinstance(e, StoreRefused):
            _forget(written, committed)
        raise
    except BaseException:
        _forget(written, committed)
        raise
    _forget(written, committed)


def _forget(written: list[WrittenFile], committed: Sequence[WrittenFile]) -> None:
    paths = {f.path for f in committed}
    written[:] = [f for f in written if f.path not in paths]


def _check(spark: SparkSession, table: Location, constraints: dict[str, str], files: Sequence[WrittenFile]) -> None:
    """Raise UserError where rows break a constraint."""
    for ds in sorted({f.ds for f in files}) if constraints else ():
        rows = spark.read.parquet(*(str(table / f.path) for f in files if f.ds == ds)).withColumn("ds", F.lit(ds))
        for name, broken in broken_constraints(rows, constraints):
            raise UserError(
                f"{broken:,} rows of {ds} break the constraint '{name}' of {table}; nothing of the day was loaded. "
                f"Drop the constraint, or keep such rows out by table.expectations.ranges"
            )


def withheld_rows(ctx: SourceContext, plan: LoadPlan, rows: JudgedRows, days: list[DayFiles]) -> DataFrame | None:
    """Return the good rows of unchanged files that are neither in the events nor in the quarantine.

    Deleted ones, that is, and those that were dropped as duplicates: of a deleted one, perhaps. Needs no version of the
    table from before the deletion, which a VACUUM takes away.

    Args:
        ctx: of the source.
        plan: of the run.
        rows: those of the batch.
        days: whose they are.

    Returns:
        `_ds`, `_file`, `_line`, `_copy`; None where no such day is among `days`.

    Raises:
        UserError: a format that makes several rows of a line, of which some may be deleted.
    """
    withheld_days = [d for d in days if d.ds in plan.withhold]
    good = rows.good_rows() if withheld_days else None
    if good is None:
        return None
    spark = rows.batch.spark
    if reader_of(ctx.landing_source).remakes_rows:
        raise UserError(
            f"rows of {withheld_days[0].ds} were deleted from {ctx.events}, and format "
            f"'{ctx.landing_source.format}' draws rows anew when it is loaded again: deleted ones could come back. "
            f"Deliver landing files without them"
        )
    unchanged = [(d.ds, name) for d in withheld_days for name in sorted(d.unchanged)]
    files = spark.createDataFrame(unchanged, "_ds string, _source_file string")
    known = [_positions(spark, ctx.events, None, withheld_days)]
    for day in withheld_days:
        # The version of the load, where it is there: a run that was killed has written a newer one.
        version = day.record.quarantine if day.record is not None else -1
        is_kept = version >= 0 and row_counts(DeltaLog(ctx.quarantine), version, {day.ds}) is not None
        known.append(_positions(spark, ctx.quarantine, version if is_kept else None, [day]))
    good = good.where(F.col("_ds").isin([d.ds for d in withheld_days]))
    good = good.join(F.broadcast(files), ["_ds", "_source_file"], "left_semi")
    good = good.join(reduce(DataFrame.unionByName, known), ["_ds", "_source_file", "_line"], "left_anti")
    return good.select("_ds", "_file", "_line", "_copy")


def _positions(spark: SparkSession, table: Location, version: int | None, days: list[DayFiles]) -> DataFrame:
    """Return the landing lines of a table's rows."""
    names = [d.ds for d in days]
    newest = DeltaLog(table).version if version is None else version
    assert newest is not None, "the day was loaded before"
    rows = read_version(spark, table, newest, lambda partition: partition.get("ds") in names)
    rows = rows.where(F.col("ds").isin(names))
    return rows.select(F.col("ds").alias("_ds"), "_source_file", F.col("_source_line").alias("_line"))


@dataclass(frozen=True)
class _CheckedDay:
    """A day that may be committed."""

    day: LandingDay
    record: LoadRecord
    #: Undeclared columns that the table has or gets.
    extra: list[str]


@dataclass
class _Written:
    """Data files that no commit names yet."""

    events: list[WrittenFile] = field(default_factory=list)
    quarantine: list[WrittenFile] = field(default_factory=list)


@dataclass(frozen=True)
class Load:
    """The loading of one source in one run."""

    ctx: SourceContext
    plan: LoadPlan
    spark: SparkSession
    #: Versions of the events' table that this load has committed.
    committed: set[int] = field(default_factory=set)
    #: By day and file: why files are left out that cannot be read.
    bad_files: dict[str, dict[str, str]] = field(default_factory=dict)

    def run(self) -> None:
        """Load all days of the plan.

        Raises:
            TransactionOvertaken: others have changed rows of a day since the plan was made. Days before it are loaded.
            UserError: more files of a day are damaged than it may have, or it may not be loaded. Days before it are
                loaded.
            IncompleteError: the run's own day is behind its watermark. Others are loaded.
        """
        for days in self.plan.batches():
            self._load(days)

    def _load(self, days: list[DayFiles]) -> None:
        ctx = self.ctx
        while True:
            readable = tuple(self._readable(d.day) for d in days)
            batch = LandingBatch(self.spark, ctx.landing_source, ctx.table, readable, ids=ctx.ids)
            try:
                return self._load_batch(batch, days)
            except (FileDamaged, FileRefused) as e:
                error, file = e, e.file
            ds = next(ds for ds, day_or_file in batch.files if day_or_file == file)
            message, is_of_content = str(error), True
            if isinstance(error, FileDamaged):
                message, is_of_content = f"landing file {file.name} cannot be read: {error.cause}", error.is_of_content
            bad = self.bad_files.setdefault(ds, {})
            # A day needs one file that can be read.
            is_last = sum(day_or_file == ds for day_or_file, _ in batch.files) == 1
            if not is_of_content or is_last or len(bad) >= ctx.table.expectations.max_bad_files:
                break
            bad[file.name] = message.removeprefix(f"landing file {file.name}").lstrip(": ")
            _LOG.warning("%s: %s; it is left out, and the day goes on", ds, message)
        earlier = [day for day in days if day.ds < ds]
        if earlier:
            self._load(earlier)
        more = f"; nor can {', '.join(sorted(bad))}" if bad else ""
        raise UserError(
            f"{message}{more}. Nothing of {ds} was loaded; deliver the file again, or say how many files of a day may "
            f"be left out ({ctx.key_prefix}table.expectations.max_bad_files)"
        ) from error

    def _readable(self, day: LandingDay) -> LandingDay:
        """Return a day without the files that are left out."""
        bad = self.bad_files.get(day.ds, {})
        return replace(day, files=tuple(f for f in day.files if f.name not in bad))

    def _load_batch(self, batch: LandingBatch, days: list[DayFiles]) -> None:
        tick = time.perf_counter()
        with self.ctx.staging() as staging, self._uncommitted() as written:
            rows = read_batch(self.ctx, self.plan, batch, staging)
            written.events = rows.arrow.written
            files = rows.profiles()
            files += [
                FileProfile(d.ds, name, fault=reason)
                for d in days
                for name, reason in self.bad_files.get(d.ds, {}).items()
            ]
            left_out = self._days_behind(days, files)
            days = [d for d in days if d.ds not in left_out]
            withheld = withheld_rows(self.ctx, self.plan, rows, days)
            deleted = Places.stage(withheld, staging / "deleted")
            duplicates = Places.stage(rows.duplicates(deleted, left_out), staging / "duplicates")
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
                self._commit_quarantine(rows, [c.day for c in checked], any_bad, written)
                dropped = Dropped.save(pa.concat_tables([deleted.table, duplicates.table]), staging / "dropped.npz")
                rows = rows.drop_rows(dropped)
                written.events = rows.arrow.written
                for c in checked:
                    self._commit_events(rows, c, dropped, written)
            if stopped is not None:
                raise stopped
            if self.ctx.ds in left_out:
                raise incomplete(self.ctx, self.ctx.ds, [left_out[self.ctx.ds]])

    def _days_behind(self, days: list[DayFiles], files: list[FileProfile]) -> dict[str, str]:
        """Return the days that are behind their watermark, and how far."""
        behind_days = {}
        for day in days:
            greatest = max((f.watermark for f in files if f.ds == day.ds and f.watermark), default=None)
            reason = behind_watermark(self.ctx.source, day.ds, greatest)
            if reason is not None:
                behind_days[day.ds] = reason
                if day.ds != self.ctx.ds:
                    warn_left_out(day.ds, reason)
        return behind_days

    def _check_days(
        self, days: list[DayFiles], files: list[FileProfile], duplicates: Places, deleted: Places
    ) -> tuple[list[_CheckedDay], UserError | None]:
        """Return the days up to the first that may not be loaded, and why not."""
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
    def _uncommitted(self) -> Iterator[_Written]:
        """Record the data files that are written; at the end, remove those that no commit names."""
        written = _Written()
        # What a killed run was writing.
        for table in (self.ctx.events, self.ctx.quarantine):
            for day in self.plan.days:
                (table / f"ds={day.ds}").discard_unfinished()
        try:
            yield written
        finally:
            remove_files(self.ctx.events, written.events)
            remove_files(self.ctx.quarantine, written.quarantine)

    def _commit_quarantine(self, rows: JudgedRows, days: list[LandingDay], any_bad: bool, written: _Written) -> None:
        """Commit the bad rows of all days at once: what a kill before the events' commits leaves is replaced again."""
        for day in days:
            _check_unchanged(day)
        names = [day.ds for day in days]
        table = self.ctx.quarantine
        if not any_bad and not may_have_rows(table, names):
            return
        if any_bad:
            written.quarantine = rows.write_typed(names, table, QUARANTINE, Dropped(None), [], bad=True)
        with forgotten_unless_refused(written.quarantine, list(written.quarantine)):
            commit_files(self.spark, table, names, written.quarantine, "", fence=self.ctx.run.fence)

    def _commit_events(self, rows: JudgedRows, checked: _CheckedDay, dropped: Dropped, written: _Written) -> None:
        tick = time.perf_counter()
        day, table = checked.day, self.ctx.table
        _check_unchanged(day)
        columns = ", ".join([table.spark_schema, *(f"{name} string" for name in quoted_names(checked.extra))])
        schema = data_schema(columns)
        written.events += rows.write_typed([day.ds], self.ctx.events, schema, dropped, checked.extra)
        files_of_day = [f for f in written.events if f.ds == day.ds]
        record = replace(checked.record, quarantine=_newest(self.ctx.quarantine))
        with forgotten_unless_refused(written.events, files_of_day):
            version = commit_files(
                self.spark,
                self.ctx.events,
                [day.ds],
                files_of_day,
                record.metadata(),
                columns,
                self.ctx.run.fence,
                self.plan.version,
                self.committed,
            )
        self.committed.add(version)
        counts = ", ".join(f"{name} {n:,}" for name, n in record.rows.items())
        _LOG.info("%s: %s; committed in %.1f s", day.ds, counts, time.perf_counter() - tick)


def _newest(table: Location) -> int:
    version = DeltaLog(table).version
    assert version is not None
    return version


def _check_unchanged(day: LandingDay) -> None:
    for file in day.files:
        if not file.unchanged():
            raise UserError(
                f"landing file {file.name} changed while it was read; nothing of {day.ds} was loaded. Run again when "
                f"it is complete"
            )
