"""Loading days: read together, checked, and committed one by one to the tables `events` and `quarantine`.

A day is loaded in this order, so that a kill between any two steps is healed by running again:

1. its files are read once and typed into a staging folder; expectations can stop the day here;
2. bad rows replace the day's partition of the quarantine table;
3. good rows replace the day's partition of the events table. The same commit says which files it came from, so the
   day is loaded if and only if its rows are there.

Rows of a batch are what its tasks have read, without those that repeat others.
Both tables are partitioned by `ds`. Rows that others have deleted from the table stay out when their day is loaded
again from the same files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property, reduce

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Table
from headrace.config.schema import is_wider, quoted_names
from headrace.config.source import following
from headrace.errors import UserError
from headrace.lake.delta.data_files import WrittenFile, data_schema, ddl_fields, remove_files
from headrace.lake.delta.log import DeltaLog, check_files
from headrace.lake.delta.transaction import Transaction, create_table
from headrace.lake.delta.with_spark import broken_constraints, read_version, write_checkpoint
from headrace.lake.faults import GOOD, SKIPPED
from headrace.lake.landing.arrow_rows import ArrowRows, arrow_plan, read_by_arrow, spark_paths, typed_files
from headrace.lake.landing.expectations import FileProfile, assess_day, empty_profiles
from headrace.lake.landing.files import LandingDay
from headrace.lake.landing.formats import POSITION, FileDamaged, FileRefused, LandingBatch, checked_reader, reader_of
from headrace.lake.landing.load_history import LoadRecord, row_counts
from headrace.lake.landing.plan import DayFiles, LoadPlan
from headrace.lake.landing.repeats import repeated_rows
from headrace.lake.landing.source_context import SourceContext, behind_watermark, incomplete, warn_left_out
from headrace.lake.landing.write_rows import QUARANTINE, Dropped, TypedRowsTask, codec_of
from headrace.lake.spark.session import spark_settings
from headrace.lake.spark.tasks import run_tasks
from headrace.storage import Fence, Location, StoreRefused

_LOG = logging.getLogger("headrace.lake")

#: As few rows that were judged one by one are written by the driver.
_FEW = 50_000
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


@dataclass(frozen=True)
class Places:
    """Places of rows that are not loaded."""

    #: Parquet files with `_ds`, `_file`, `_line`, `_copy`; None: there are no such rows.
    folder: Location | None

    @staticmethod
    def stage(rows: DataFrame | None, folder: Location) -> Places:
        """Write the places to a folder, so that they are computed once."""
        if rows is None:
            return Places(None)
        rows.write.parquet(folder.spark_path)
        return Places(folder)

    @cached_property
    def table(self) -> pa.Table:
        """The places."""
        schema = pa.schema([("_ds", pa.string()), *((n, pa.int64()) for n in POSITION)])
        if self.folder is None:
            return schema.empty_table()
        return pq.read_table(self.folder.local_path(), partitioning=None).select(schema.names).cast(schema)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Rows by day."""
        days, rows = self.table.column("_ds").value_counts().flatten()
        return dict(zip(days.to_pylist(), rows.to_pylist(), strict=True))

    def exclude_from(self, rows: DataFrame) -> DataFrame:
        """Return the rows of a frame that stand at none of the places."""
        if self.folder is None or not self.table.num_rows:
            return rows
        places = rows.sparkSession.read.parquet(self.folder.spark_path).drop("_ds")
        return rows.join(places, list(POSITION), "left_anti")


@dataclass(frozen=True)
class JudgedRows:
    """The rows of a batch."""

    ctx: SourceContext
    plan: LoadPlan
    batch: LandingBatch
    #: Read by tasks.
    arrow: ArrowRows
    #: Whether those judged one by one are few: the driver itself writes them.
    few: bool
    #: Of a format that makes rows anew (`LandingReader.finish`): its rows, which `arrow` has as judged ones.
    finished: DataFrame | None = None

    def profiles(self) -> list[FileProfile]:
        """Return the profile of each file."""
        files = [self.arrow.profile(i, f) for i, f in enumerate(empty_profiles(self.ctx.table, self.batch))]
        if self.finished is not None:
            _recount(self.finished, self.batch, files)
        return files

    def duplicates(self, deleted: Places, left_out: Collection[str]) -> DataFrame | None:
        """Return the good rows to drop (headrace.lake.landing.repeats).

        Args:
            deleted: rows that are not loaded anyway.
            left_out: days that are not loaded.
        """
        table = self.ctx.table
        if not table.keys:
            return None
        near = _near_files(self.ctx, self.plan, self.batch.days, left_out)
        if near is None or deleted.table.num_rows:
            good_rows = self.good_rows(quoted_names(table.keys))
            if good_rows is None:
                return None
            rows = deleted.exclude_from(self._of_loaded_days(good_rows, left_out))
            return repeated_rows(rows, self._loaded(left_out), table)
        judged = self.arrow.judged_paths
        suspects = self.arrow.suspects(judged, near)
        if suspects is None:
            return None
        spark, keys = self.batch.spark, quoted_names(table.keys)
        frames: list[DataFrame] = []
        if suspects[0]:
            arrow_rows = spark.read.parquet(*spark_paths(suspects[0]))
            frames.append(arrow_rows.select("*", F.lit(0).alias("_copy"), F.lit(GOOD).alias("_state")))
        if judged:
            frame = spark.read.parquet(*spark_paths(judged))
            frames.append(frame.select(*keys, "_ds", "_file", "_line", "_copy", "_state"))
        new_rows = self._of_loaded_days(reduce(DataFrame.unionByName, frames), left_out)
        loaded = None
        if self.ctx.source.daily:
            none = new_rows.select(*keys, F.col("_ds").alias("ds")).limit(0)
            loaded = spark.read.parquet(*spark_paths(suspects[1])).select(*keys, "ds") if suspects[1] else none
        return repeated_rows(new_rows, loaded, table)

    def good_rows(self, columns: Sequence[str] = ()) -> DataFrame | None:
        """Return the good rows, see `ArrowRows.good_rows`."""
        return self.arrow.good_rows(self.batch, columns)

    def drop_rows(self, dropped: Dropped) -> JudgedRows:
        """Return the same batch; Arrow's data files lack some rows."""
        return replace(self, arrow=self.arrow.drop_rows(dropped))

    def write_typed(
        self,
        days: Sequence[str],
        table: Location,
        schema: pa.Schema,
        dropped: Dropped,
        extra: Sequence[str],
        bad: bool = False,
    ) -> list[WrittenFile]:
        """Write data files of the good rows that were judged one by one, or of the bad ones; no commit names them
        yet.
        """
        work = tuple((ds, file) for ds, file in self.arrow.judged_files if ds in days)
        task = TypedRowsTask(work, dropped, table, schema, extra, codec_of(self.batch.spark), bad)
        return [WrittenFile(**f) for f in run_tasks(None if self.few else self.batch.spark, len(work), task)]

    def _of_loaded_days(self, rows: DataFrame, left_out: Collection[str]) -> DataFrame:
        return rows.where(~F.col("_ds").isin(sorted(left_out))) if left_out else rows

    def _loaded(self, left_out: Collection[str]) -> DataFrame | None:
        """Return the keys of rows of the table that the batch's are compared with (see `_near_files`), by Spark."""
        if not self.ctx.source.daily:
            return None
        first, last, pending = _nearby(self.ctx, self.plan, self.batch.days, left_out)
        version = DeltaLog(self.ctx.events).version
        assert version is not None, "made before anything is loaded"
        near = read_version(self.batch.spark, self.ctx.events, version, _between(first, last, pending))
        near = near.where(F.col("ds").between(first, last) & ~F.col("ds").isin(sorted(pending)))
        return near.select(*(F.col(k) for k in quoted_names(self.ctx.table.keys)), "ds")


def _recount(rows: DataFrame, batch: LandingBatch, files: list[FileProfile]) -> None:
    """Count the rows of files anew that a format has made of judged ones (`LandingReader.finish`); bad rows stay.

    Args:
        rows: the rows.
        batch: of the files.
        files: their profiles, which are changed.
    """
    table = batch.table
    null_columns, columns = list(table.expectations.null_rate), [c.name for c in table.columns]
    good, is_row = F.col("_state") == GOOD, F.col("_state") != SKIPPED
    aggregates = [
        F.count_if(is_row & (F.col("_copy") == 0)).alias("read"),
        F.count_if(is_row & (F.col("_copy") > 0)).alias("expanded"),
        F.count_if(good).alias("good"),
        *(F.count_if(good & F.col(q).isNull()).alias(f"n{i}") for i, q in enumerate(quoted_names(null_columns))),
        *(F.count_if(is_row & F.col(q).isNotNull()).alias(f"c{i}") for i, q in enumerate(quoted_names(columns))),
    ]
    for row in rows.groupBy("_file").agg(*aggregates).collect():
        profile = files[row["_file"]]
        profile.read, profile.expanded = row["read"] + profile.forgotten, row["expanded"]
        profile.good = row["good"]
        profile.readable = {name: row[f"c{i}"] for i, name in enumerate(columns)}
        profile.nulls = {name: row[f"n{i}"] for i, name in enumerate(null_columns)}


def read_batch(ctx: SourceContext, plan: LoadPlan, batch: LandingBatch, staging: Location) -> JudgedRows:
    """Read the files of a batch once.

    Raises:
        FileDamaged: one cannot be read to its end.
        UserError: a header or a name that is refused, a declaration that does not suit the format.
    """
    reader = checked_reader(batch)
    declared = {c.name for c in batch.table.columns}
    columns = DeltaLog(ctx.events).columns()
    undeclared = [n for n, t in columns.items() if n not in declared and n != "ds" and not n.startswith("_")]
    read_plan = arrow_plan(batch, [n for n in undeclared if columns[n] == "string"])
    codec, folder = codec_of(batch.spark), staging / "arrow"
    arrow = read_by_arrow(batch, read_plan, ctx.events, folder, codec, ctx.forgotten)
    if not reader.remakes_rows or not arrow.judged_files:
        return JudgedRows(ctx, plan, batch, arrow, arrow.judged <= _FEW)
    rows = arrow.judged_rows(batch.spark)
    assert rows is not None
    finished = _stage(reader.finish(rows, batch), staging / "finished")
    files = typed_files(staging / "finished", [day.ds for day in batch.days])
    return JudgedRows(ctx, plan, batch, replace(arrow, judged_files=tuple(files)), arrow.judged <= _FEW, finished)


def _near_files(
    ctx: SourceContext, plan: LoadPlan, days: Sequence[LandingDay], left_out: Collection[str]
) -> list[tuple[str, Location]] | None:
    """Return (day, data file) of the rows that those of `days` are compared with: of loaded days nearby that stay.

    Those still to be loaded again are compared when their turn comes. None: Spark must read them.
    """
    if not ctx.table.keys or not ctx.source.daily:
        return []
    log = DeltaLog(ctx.events)
    files = log.plain_files(log.version) if log.version is not None else []
    if files is None:
        return None
    first, last, pending = _nearby(ctx, plan, days, left_out)
    near = [f for f in files if first <= str(f.partition.get("ds")) <= last and f.partition.get("ds") not in pending]
    check_files(ctx.events, near)
    return [(str(f.partition.get("ds")), f.path) for f in near]


def _between(first: str, last: str, pending: set[str]) -> Callable[[Mapping[str, str | None]], bool]:
    """Return a test of whether rows of a partition are compared with."""
    return lambda partition: first <= str(partition.get("ds")) <= last and partition.get("ds") not in pending


def _nearby(
    ctx: SourceContext, plan: LoadPlan, days: Sequence[LandingDay], left_out: Collection[str]
) -> tuple[str, str, set[str]]:
    """Return (first day, last day, those between that do not count)."""
    late = ctx.table.late_days
    pending = {d.ds for d in plan.days if d.ds >= days[0].ds} - set(left_out)
    return following(days[0].ds, -late), following(days[-1].ds, late), pending


def _stage(frame: DataFrame, folder: Location) -> DataFrame:
    spark = frame.sparkSession
    # As Arrow reads them; a time of 96 bits is Spark's own.
    with spark_settings(spark, {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}):
        frame.write.parquet(folder.spark_path)
    return spark.read.schema(frame.schema).parquet(folder.spark_path)


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
