"""Ingest of a source table: its version is pinned, its days are checked, and rows that break the declaration noted.

Nothing of the table is copied. One commit to the quarantine table has the rows that later stages must leave out, and
says which days were taken at which version: so a day is taken if and only if its bad rows are known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Table, TableSource
from headrace.config.source import following, midnight
from headrace.errors import UserError
from headrace.errors.translate import UnreadableDataFile, own_error
from headrace.lake.delta.data_files import WrittenFile, remove_files
from headrace.lake.landing import expectations
from headrace.lake.landing.expectations import FileProfile
from headrace.lake.landing.load import commit_files, create_quarantine, forgotten_unless_refused
from headrace.lake.landing.plan import declaration
from headrace.lake.landing.repeats import repeated_rows
from headrace.lake.landing.source_context import (
    SourceContext,
    behind_watermark,
    declared_rows,
    incomplete,
    warn_left_out,
)
from headrace.lake.landing.table_days import (
    TableLook,
    TakenDay,
    count_changes,
    count_feed,
    judged,
    metadata,
    net_change,
    newest,
    profiles,
    refuse_changes,
    to_quarantine,
)
from headrace.lake.landing.write_rows import QUARANTINE, frame_files
from headrace.lake.tables.change_feed import ChangeFeed
from headrace.lake.tables.declared import StoredColumns, table_rows
from headrace.lake.tables.folder import FolderSnapshot
from headrace.lake.tables.opened import open_table
from headrace.lake.tables.snapshot import FILE, LINE, FileSnapshot, Snapshot, files_of, is_at
from headrace.stage.manifest import fingerprint
from headrace.storage import StoreError, StoreRefused

_LOG = logging.getLogger("headrace.lake")


@dataclass(frozen=True)
class DaysCheck:
    """The check of some days, which are taken together."""

    seen: TableLook
    #: What of the table they are checked by.
    snapshot: Snapshot
    #: Oldest first.
    days: Sequence[str]
    #: Days that this run has taken already.
    taken_now: Collection[str]
    #: Fingerprints of the declaration, see headrace.lake.landing.load_history.LoadRecord.
    declared: str
    judged: str
    #: By name: files of the days that cannot be read, and why.
    bad_files: Mapping[str, str] = field(default_factory=dict)

    @property
    def ctx(self) -> SourceContext:
        return self.seen.ctx

    @property
    def source(self) -> TableSource:
        return self.seen.source

    @property
    def table(self) -> Table:
        return self.ctx.table

    def run(self, spark: SparkSession) -> None:
        """Take the days up to the first that may not be taken, in one commit.

        Raises:
            UserError: a type is not as declared, a day breaks an expectation, or has changed in a way that is refused.
        """
        tick = time.perf_counter()
        rows, stored = self._rows(spark, self.snapshot, self.days)
        self._check_columns(stored)
        rows = judged(rows, self.source, self.table, self.ctx.ids, self._any_age())
        profile_of = profiles(rows, self.source, self.table, stored.missing)
        self._count_forgotten(spark, profile_of)
        changes = self._changes(spark, profile_of)
        refuse_changes(self._without_repaired(changes), self.source, self.ctx.key_prefix)
        repeated = self._duplicates(spark, rows, stored)
        try:
            by_day = [] if repeated is None else repeated.groupBy("_ds").count().collect()
            counts = {r["_ds"]: int(r["count"]) for r in by_day}
            records, stopped = self._assess(profile_of, counts, changes, stored)
            if records:
                self._commit(spark, rows, records, repeated if counts else None, stored)
        finally:
            if repeated is not None:
                repeated.unpersist()
        read = sum(f.read for f in profile_of.values())
        seconds = time.perf_counter() - tick
        rate = f"{read / max(seconds, 1e-9):,.0f}"
        _LOG.info("checked %s rows of %d days in %.1f s (%s rows/s)", f"{read:,}", len(self.days), seconds, rate)
        if stopped is not None:
            raise stopped

    def _rows(self, spark: SparkSession, snapshot: Snapshot, days: Sequence[str]) -> tuple[DataFrame, StoredColumns]:
        return table_rows(spark, snapshot, self.table, self.source, days, self.ctx.ds, self.ctx.forgotten)

    def _count_forgotten(self, spark: SparkSession, profile_of: dict[str, FileProfile]) -> None:
        """Count the rows of each day that the list of `headrace forget` keeps out, by a second look at the table."""
        if self.ctx.forgotten is None:
            return
        all_rows, _ = table_rows(spark, self.snapshot, self.table, self.source, self.days, self.ctx.ds)
        for row in all_rows.groupBy("ds").count().collect():
            profile = profile_of.setdefault(row["ds"], FileProfile(row["ds"], self.source.title))
            profile.forgotten = row["count"] - profile.read
            profile.read = row["count"]

    def _check_columns(self, stored: StoredColumns) -> None:
        missing = [c.name for c in self.table.columns if c.required and c.name in stored.missing]
        if missing:
            raise UserError(
                f"{self.source.title} has no column '{missing[0]}', which {self.ctx.key_prefix}table.columns declares "
                f"as required; it has {', '.join(sorted(stored.types))}"
            )

    def _changes(self, spark: SparkSession, profile_of: Mapping[str, FileProfile]) -> dict[str, dict[str, int]]:
        """Return the changes of days that were taken before and have different files now; of a feed, those it names."""
        if isinstance(self.snapshot, ChangeFeed):
            feed = {ds: self.snapshot.changes(spark, ds) for ds in self.days}
            return {ds: count_feed(f, ds, self.source, self.table) for ds, f in feed.items() if f is not None}
        taken = self.seen.taken.days
        days = [ds for ds in self.days if ds in taken and taken[ds].files != self.seen.versions[ds]]
        changes: dict[str, dict[str, int]] = {}
        for version in sorted({taken[ds].table_version for ds in days}):
            same_version = [ds for ds in days if taken[ds].table_version == version]
            net = {
                ds: net_change(taken[ds].rows["read"], profile_of[ds].read if ds in profile_of else 0)
                for ds in same_version
            }
            if not self.snapshot.versioned:
                changes |= net
                continue
            try:
                old_rows = self._rows(
                    spark, open_table(self.source, self.table, self.seen.place, {}, version), same_version
                )[0]
                counted = count_changes(old_rows, self._rows(spark, self.snapshot, same_version)[0], self.table)
                changes |= {ds: counted.get(ds, net_change(0, 0)) for ds in same_version}
            except (UserError, PySparkException, Py4JJavaError) as e:
                # Of a store that is away, refuses or fails nothing is known, which is no reason to count less.
                if isinstance(own_error(e), (StoreError, StoreRefused)):
                    raise
                # Its files may have been removed by VACUUM.
                _LOG.debug("version %s cannot be compared: %s", version, e)
                changes |= net
        for ds, counts in changes.items():
            if any(counts.values()):
                shown_counts = ", ".join(f"{n:,} {kind}" for kind, n in counts.items() if n)
                _LOG.warning("%s: rows have changed since the day was taken: %s", ds, shown_counts)
        return changes

    def _without_repaired(self, changes: Mapping[str, dict[str, int]]) -> dict[str, dict[str, int]]:
        """Return changes without the late rows of days that had a damaged file: they are of the file, repaired."""
        taken = self.seen.taken.days
        return {
            ds: counts | {"late": 0} if ds in taken and taken[ds].bad_files else counts
            for ds, counts in changes.items()
        }

    def _bad_files_of(self, ds: str) -> dict[str, str]:
        holding = {f.name for f in files_of(self.snapshot, [ds])} if self.bad_files else set()
        return {name: cause for name, cause in self.bad_files.items() if name in holding}

    def _any_age(self) -> set[str]:
        """Return days whose events may be of any age: the first day of a feed has all earlier rows."""
        return {self.snapshot.first_day or ""} if isinstance(self.snapshot, ChangeFeed) else set()

    def _duplicates(self, spark: SparkSession, rows: DataFrame, stored: StoredColumns) -> DataFrame | None:
        if not self.table.keys:
            return None
        loaded = None
        if self.source.daily:
            late = self.table.late_days
            near = {following(ds, k) for ds in self.days for k in range(-late, late + 1)} - set(self.days)
            staying = sorted(near & {*self.seen.taken.days, *self.taken_now} & self.seen.versions.keys())
            if staying:
                loaded = self._rows(spark, self.snapshot, staying)[0]
                bad = spark.read.format("delta").load(str(self.ctx.quarantine)).where(F.col("ds").isin(staying))
                loaded = loaded.join(bad.select(FILE, LINE), [FILE, LINE], "left_anti")
            else:
                loaded = self._rows(spark, self.snapshot, self.days)[0].where(F.lit(False))
        repeated = repeated_rows(rows, loaded, self.table).persist()
        if not stored.positions and not repeated.isEmpty():
            repeated.unpersist()
            raise UserError(
                f"{self.ctx.key_prefix}table.keys do not tell the rows of {self.source.title} apart, and Spark gives "
                f"no positions of them: remove the repeated rows, or declare further keys"
            )
        return repeated

    def _assess(
        self,
        profile_of: Mapping[str, FileProfile],
        repeated: Mapping[str, int],
        changes: Mapping[str, Mapping[str, int]],
        stored: StoredColumns,
    ) -> tuple[list[TakenDay], UserError | None]:
        """Return records of the days up to the first that may not be taken, and why it may not."""
        records: list[TakenDay] = []
        for ds in self.days:
            profile, previous = profile_of.get(ds), self.seen.taken.days.get(ds)
            if profile is None and previous is None and ds != self.ctx.ds and not isinstance(self.snapshot, ChangeFeed):
                continue  # a file without statistics might have had rows of it
            profile = profile or FileProfile(ds, self.source.title)
            duplicates = repeated.get(ds, 0)
            drift, bad_files = self._drift(profile, stored), self._bad_files_of(ds)
            checks = []
            if profile.read or ds == self.ctx.ds:
                end = midnight(self.source, following(ds))
                files = [profile, *(FileProfile(ds, name, fault=cause) for name, cause in bad_files.items())]
                checks = expectations.check_limits(ds, end, files, duplicates, self.table.expectations)
            try:
                if previous is None and (control_rows := declared_rows(self.source, self.ctx.ws, ds)) is not None:
                    checks.append(
                        expectations.ExpectationCheck(
                            ds, "control_rows", profile.read, control_rows, profile.read == control_rows
                        )
                    )
                expectations.refuse_columns([profile], self.table, drift)
                expectations.enforce(checks, drift, profile.reasons, duplicates)
            except UserError as e:
                return records, e
            rows = {
                "read": profile.read,
                "kept": profile.good - duplicates,
                "quarantined": profile.bad,
                "duplicates": duplicates,
                **({"forgotten": profile.forgotten} if profile.forgotten else {}),
            }
            records.append(
                TakenDay(
                    ds=ds,
                    key=self.ctx.key,
                    files=self.seen.versions[ds],
                    table_version=self.snapshot.pin(self.seen.versions),
                    declared=self.declared,
                    judged=self.judged,
                    rows=rows,
                    drift=expectations.as_facts(drift),
                    expectations=expectations.as_facts(checks),
                    reasons=profile.reasons,
                    changes=dict(changes.get(ds, {})),
                    bad_files=bad_files,
                )
            )
            counts = ", ".join(f"{name} {n:,}" for name, n in rows.items())
            _LOG.info("%s: %s; %s at version %s", ds, counts, self.source.title, self.snapshot.pin(self.seen.versions))
        return records, None

    def _drift(self, profile: FileProfile, stored: StoredColumns) -> list[expectations.Drift]:
        """Return the columns that are missing, and those that are new since a day was taken last."""
        known = self.seen.taken.columns
        declared = {c.name.lower() for c in self.table.columns}
        new = sorted(n for n in stored.types if known is not None and n not in known and n.lower() not in declared)
        drifts = [
            expectations.Drift(profile.ds, n, "new", f"in {self.source.title}, as {stored.types[n]}") for n in new
        ]
        if self.table.new_columns == "accept":
            drifts = []
        missing = sorted(stored.missing)
        drifts += [expectations.Drift(profile.ds, n, "missing", f"in {self.source.title}") for n in missing]
        for d in drifts:
            _LOG.warning("%s: column '%s' is %s: %s", d.ds, d.column, d.change, d.detail)
        return drifts

    def _commit(
        self,
        spark: SparkSession,
        rows: DataFrame,
        records: Sequence[TakenDay],
        repeated: DataFrame | None,
        stored: StoredColumns,
    ) -> None:
        days = [r.ds for r in records]
        create_quarantine(self.ctx.quarantine)
        files = list[WrittenFile]()
        try:
            if any(r.left_out for r in records):
                if repeated is not None:
                    reason = f"repeats a row with the same {', '.join(self.table.keys)}"
                    repeated = repeated.select("_ds", "_file", "_line", F.lit(reason).alias("_why"))
                out = to_quarantine(rows.where(F.col("_ds").isin(days)), self.table, repeated)
                with self.ctx.staging() as staging:
                    files = frame_files(out, self.ctx.quarantine, QUARANTINE, staging / "quarantine")
            facts = metadata(records, self.seen.place.facts(), stored.types)
            with forgotten_unless_refused(files, list(files)):
                commit_files(spark, self.ctx.quarantine, days, files, facts, fence=self.ctx.run.fence)
        finally:
            remove_files(self.ctx.quarantine, files)


class TableCheck:
    """The days of a source table that a run has to check."""

    def __init__(self, seen: TableLook, version: int) -> None:
        """Find the days to check. `version`: of the stage ingest."""
        self.seen, self.ctx, self.source, self.table = seen, seen.ctx, seen.source, seen.ctx.table
        self.declared = declaration(self.source, self.table, version)
        self.judged = fingerprint(self.table.model_dump(mode="json"))
        #: By name: files that Spark has come upon and cannot read, and why.
        self._damaged: dict[str, str] = {}
        #: Oldest first.
        self.days = self._to_check()

    def _to_check(self) -> list[str]:
        taken, run_day = self.seen.taken.days, self.ctx.ds
        days = set()
        for ds, version in self.seen.versions.items():
            record = taken.get(ds)
            same = record is not None and record.files == version and record.declared == self.declared
            if not same or (ds == run_day and record is not None and record.judged != self.judged):
                days.add(ds)
        if self.source.daily and self.table.keys:
            # Their duplicates were own by what is checked anew.
            late = self.table.late_days
            near = {following(ds, k) for ds in days if ds in taken for k in range(1, late + 1)}
            days |= near & taken.keys() & self.seen.versions.keys()
        return sorted(days)

    def run(self, spark: SparkSession) -> None:
        """Check the days, and take those up to the first that may not be taken: in one commit, of a feed in one a day.

        Raises:
            UserError: a type is not as declared, a day breaks an expectation, or has changed in a way that is refused.
            IncompleteError: the run's own day is behind its watermark. Others are taken.
        """
        left_out = self._days_behind(spark)
        self.days = [ds for ds in self.days if ds not in left_out]
        done: list[str] = []
        for days, snapshot in self._views():
            self._check_files(snapshot, days)
            if isinstance(snapshot, FolderSnapshot):
                self._take_from_folder(spark, snapshot, days, done)
            else:
                with self._naming(snapshot):
                    DaysCheck(self.seen, snapshot, days, tuple(done), self.declared, self.judged).run(spark)
            done += days
        if self.ctx.ds in left_out:
            raise incomplete(self.ctx, self.ctx.ds, [left_out[self.ctx.ds]])

    def _take_from_folder(
        self, spark: SparkSession, folder: FolderSnapshot, days: Sequence[str], done: Sequence[str]
    ) -> None:
        """Take days up to the first with more damaged files than `max_bad_files`; rows of damaged files are left out.

        Raises:
            UserError: as of `run`; or names the damaged files.
        """
        while True:
            faults = folder.faults(spark, days if self.source.daily else None) | self._damaged
            taken, stopped = self._readable_days(folder, days, faults)
            other_days = (d for d in self.seen.taken.days.values() if d.ds not in days)
            snapshot = folder.leaving_out({*faults, *(name for d in other_days for name in d.bad_files)})
            try:
                if taken:
                    check = DaysCheck(self.seen, snapshot, taken, tuple(done), self.declared, self.judged, faults)
                    check.run(spark)
                break
            except (UserError, PySparkException, Py4JJavaError) as e:
                cause = own_error(e)
                if not isinstance(cause, UnreadableDataFile) or cause.damage is None:
                    raise
                name = next((f.name for f in snapshot.files if is_at(f.path, cause.path)), None)
                if name is None or name in faults:
                    raise
                self._damaged[name] = cause.damage
        for name in sorted({name for d in taken for name in _bad_files_of(folder, d, faults)}):
            _LOG.warning("file %s of %s cannot be read: %s; its rows are left out", name, folder.folder, faults[name])
        if stopped is not None:
            raise stopped

    def _readable_days(
        self, folder: FolderSnapshot, days: Sequence[str], faults: Mapping[str, str]
    ) -> tuple[list[str], UserError | None]:
        """Return the days up to the first that has too many damaged files, and why that one is not taken."""
        readable = list[str]()
        for ds in days:
            files = files_of(folder, [ds])
            bad = [f for f in files if f.name in faults]
            is_known = any(f.first == f.last for f in bad) or ds == self.ctx.ds or ds in self.seen.taken.days
            if len(bad) == len(files) and bad and not is_known:
                continue  # nobody knows of which days its rows are
            if len(bad) > self.table.expectations.max_bad_files or (bad and len(bad) == len(files)):
                first, *further = bad
                more = f"; nor can {', '.join(str(f.path) for f in further)}" if further else ""
                return readable, UserError(
                    f"{self.ctx.key_prefix}source: {self.source.title}: {first.path} cannot be read: "
                    f"{faults[first.name]}{more}. Nothing of {ds} was taken; deliver the file again, move it away "
                    f"(names that begin with _ or . are left out), or say how many files of a day may be left out "
                    f"({self.ctx.key_prefix}table.expectations.max_bad_files)"
                )
            readable.append(ds)
        return readable, None

    @contextmanager
    def _naming(self, snapshot: Snapshot) -> Iterator[None]:
        """Raise the error of a damaged data file with the table and its version, which has all of its files."""
        try:
            yield
        except (UserError, PySparkException, Py4JJavaError) as e:
            if not isinstance(cause := own_error(e), UnreadableDataFile):
                raise
            version = snapshot.pin(self.seen.versions)
            raise UserError(
                f"{self.ctx.key_prefix}source: {self.source.title} cannot be read at version {version}: {cause}"
            ) from e

    def _check_files(self, snapshot: Snapshot, days: Collection[str]) -> None:
        """Raise UserError where a file is not the one that the table's log names: Spark reads an empty one as no rows.

        A folder's files are as they are listed.
        """
        if not isinstance(snapshot, FileSnapshot) or not snapshot.versioned:
            return
        damage = snapshot.damage(days if self.source.daily else None)
        if damage is not None:
            raise UserError(
                f"{self.ctx.key_prefix}source: {self.source.title} cannot be read at version {snapshot.pin({})}: "
                f"{damage}. Restore that file, or have the table written again"
            )

    def _views(self) -> Iterator[tuple[list[str], Snapshot]]:
        """Yield days that are taken together, and the snapshot that they are checked by.

        A day of a feed is checked as it was when it ended, whatever was updated or deleted since: so days that are
        taken in one run are what they are day by day.
        """
        snapshot = self.seen.snapshot
        if not isinstance(snapshot, ChangeFeed):
            yield from [(self.days, snapshot)] if self.days else ()
            return
        for ds in self.days:
            yield [ds], snapshot.as_of_day(ds, self.seen.versions)

    def _days_behind(self, spark: SparkSession) -> dict[str, str]:
        """Return days to take for the first time that the table's watermark has not reached yet, and how far it is."""
        watermark = self.source.complete and self.source.complete.watermark
        new = [ds for ds in self.days if ds not in self.seen.taken.days]
        if not watermark or not new:
            return {}
        column = next(c for c in self.table.columns if c.name == watermark.column)
        snapshot = self.seen.snapshot
        if isinstance(snapshot, FolderSnapshot):
            snapshot = snapshot.leaving_out(snapshot.faults(spark, None))
        parts = snapshot.stored_rows(spark, None, [column.steps])
        reached = (newest(part.frame, column, self.source) for part in parts)
        greatest = max((moment for moment in reached if moment is not None), default=None)
        behind_days = {ds: reason for ds in new if (reason := behind_watermark(self.source, ds, greatest)) is not None}
        for ds, reason in behind_days.items():
            if ds != self.ctx.ds:
                warn_left_out(ds, reason)
        return behind_days


def _bad_files_of(folder: FolderSnapshot, ds: str, faults: Mapping[str, str]) -> list[str]:
    return [f.name for f in files_of(folder, [ds]) if f.name in faults]
