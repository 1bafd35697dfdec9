"""Ingest of a source table: its version is pinned, its days are checked, and rows that break the declaration noted.

Nothing of the table is copied. One commit to the quarantine table has the rows that later stages must leave out, and
says which days were taken at which version: so a day is taken if and only if its bad rows are known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import TableSource
from headrace.errors import UserError
from headrace.lake import landing
from headrace.lake.delta.log import DeltaLog
from headrace.lake.ingest import deduplicate, expectations
from headrace.lake.ingest.assess import summed
from headrace.lake.ingest.changed_days import count_changes, net_change, refuse_changes
from headrace.lake.ingest.commit import commit_files
from headrace.lake.ingest.completeness import behind, declared_rows, incomplete, lacking, warn_left_out
from headrace.lake.ingest.data_file import WrittenFile, remove_files
from headrace.lake.ingest.judged_rows import judged, newest, profiles, to_quarantine
from headrace.lake.ingest.plan import declaration, declared_table
from headrace.lake.ingest.profile import FileProfile
from headrace.lake.ingest.source_context import SourceContext
from headrace.lake.ingest.tables import create_quarantine
from headrace.lake.ingest.taken_days import TakenDay, TakenDays, metadata
from headrace.lake.ingest.write_rows import QUARANTINE, frame_files
from headrace.lake.session import session
from headrace.lake.source_tables.declared import StoredColumns, table_rows
from headrace.lake.source_tables.opened import TablePlace, find_table, open_table, table_name
from headrace.lake.source_tables.snapshot import FILE, LINE, Snapshot, day_versions
from headrace.manifest import Input, Output, fingerprint
from headrace.stage import Result

_LOG = logging.getLogger("headrace.lake")

_GONE = ""


@dataclass(frozen=True)
class TableLook:
    """A source table as a run finds it."""

    ctx: SourceContext
    source: TableSource
    place: TablePlace
    snapshot: Snapshot
    taken: TakenDays
    #: Of each day that the run covers or that was taken: a fingerprint of its files, _GONE where there are none any
    #: more. Up to the run's own.
    versions: Mapping[str, str]

    def inputs(self) -> Iterator[Input]:
        """One a covered day, and one for all earlier days that were taken."""
        name = table_name(self.source, self.ctx.ws, self.place)
        covered = set(landing.covered(self.source, self.ctx.ds))
        before = {ds: version for ds, version in self.versions.items() if ds not in covered}
        if before:
            yield Input(kind="table", name=f"{name}/before", version=fingerprint(before))
        for ds, version in self.versions.items():
            if ds in covered:
                yield Input(kind="table", name=f"{name}/{ds}", version=version or "gone")


def look(ctx: SourceContext, source: TableSource, spark: SparkSession | None = None) -> TableLook:
    """Pin the version that a run reads. A catalog is asked where none was asked before, or with `spark`.

    Raises:
        UserError: there is no such table, or it has no rows of the run's day.
        IncompleteError: the run's own day lacks a marker that `source.complete` asks for. Days before it that do, and
            were not taken, are left out.
    """
    taken = TakenDays.read(DeltaLog(ctx.quarantine))
    # Before the version is pinned: see headrace.lake.ingest.completeness.
    lacks = {ds: lacking(source, ctx.ws, ds) for ds in landing.covered(source, ctx.ds) if ds not in taken.days}
    if lacks.get(ctx.ds):
        raise incomplete(ctx, ctx.ds, lacks[ctx.ds])
    place = find_table(source, ctx.ws, spark)
    if place is None and taken.place is not None:
        place = TablePlace(**taken.place)
    if place is None:
        with session(ctx.run.spec.spark, ctx.ws, f"ingest {ctx.pipeline} {ctx.ds}") as started:
            place = find_table(source, ctx.ws, started)
    assert place is not None
    snapshot = open_table(source, place)
    days = {ds for ds in landing.covered(source, ctx.ds) if not lacks.get(ds)}
    days |= {ds for ds in taken.days if source.daily and ds <= ctx.ds}
    found = day_versions(snapshot, {*days, *lacks})
    for ds, what in lacks.items():
        if what and ds in found:
            warn_left_out(ds, "; ".join(what))
    if ctx.ds not in found and ctx.ds not in taken.days:
        known = sorted(f.last for f in snapshot.files if f.first and f.first == f.last)
        has = f"its days are {known[0]} to {known[-1]}" if known else "it has no files of that day"
        raise UserError(f"{ctx.where}source: {source.shown} has no rows of {ctx.ds}: {has}")
    versions = {ds: found.get(ds, _GONE) for ds in sorted(days) if ds in found or ds in taken.days}
    return TableLook(ctx, source, place, snapshot, taken, versions)


class TableCheck:
    """The days of a source table that a run has to check."""

    def __init__(self, seen: TableLook, version: int) -> None:
        """`version`: of the stage ingest."""
        self.seen, self.ctx, self.source, self.table = seen, seen.ctx, seen.source, seen.ctx.table
        self.declared = declaration(self.source, self.table, version)
        self.judged = fingerprint(declared_table(self.table))
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
        """Check them, and take those up to the first that may not be taken, in one commit.

        Raises:
            UserError: a type is not as declared, a day breaks an expectation, or has changed in a way that is refused.
            IncompleteError: the run's own day is behind its watermark. Others are taken.
        """
        left_out = self._behind(spark)
        self.days = [ds for ds in self.days if ds not in left_out]
        if self.days:
            self._take(spark)
        if self.ctx.ds in left_out:
            raise incomplete(self.ctx, self.ctx.ds, [left_out[self.ctx.ds]])

    def _take(self, spark: SparkSession) -> None:
        tick = time.perf_counter()
        rows, stored = self._rows(spark, self.seen.snapshot, self.days)
        self._check_columns(stored)
        rows = judged(rows, self.source, self.table)
        found = profiles(rows, self.source, self.table, stored.missing)
        changes = self._changes(spark, found)
        refuse_changes(changes, self.source, self.ctx.where)
        repeated = self._duplicates(spark, rows, stored)
        try:
            by_day = [] if repeated is None else repeated.groupBy("_ds").count().collect()
            counts = {r["_ds"]: int(r["count"]) for r in by_day}
            records, stopped = self._assess(found, counts, changes, stored)
            if records:
                self._commit(spark, rows, records, repeated if counts else None, stored)
        finally:
            if repeated is not None:
                repeated.unpersist()
        read = sum(f.read for f in found.values())
        seconds = time.perf_counter() - tick
        rate = f"{read / max(seconds, 1e-9):,.0f}"
        _LOG.info("checked %s rows of %d days in %.1f s (%s rows/s)", f"{read:,}", len(self.days), seconds, rate)
        if stopped is not None:
            raise stopped

    def _behind(self, spark: SparkSession) -> dict[str, str]:
        """Days to be taken for the first time that the table's watermark has not reached yet, and how far it is."""
        watermark = self.source.complete and self.source.complete.watermark
        new = [ds for ds in self.days if ds not in self.seen.taken.days]
        if not watermark or not new:
            return {}
        greatest = newest(self.seen.snapshot.rows(spark, None), self.table, self.source, watermark.column)
        found = {ds: why for ds in new if (why := behind(self.source, ds, greatest)) is not None}
        for ds, why in found.items():
            if ds != self.ctx.ds:
                warn_left_out(ds, why)
        return found

    def _rows(self, spark: SparkSession, snapshot: Snapshot, days: Sequence[str]) -> tuple[DataFrame, StoredColumns]:
        return table_rows(spark, snapshot, self.table, self.source, days, self.ctx.ds)

    def _check_columns(self, stored: StoredColumns) -> None:
        gone = [c.name for c in self.table.columns if c.required and c.name in stored.missing]
        if gone:
            raise UserError(
                f"{self.source.shown} has no column '{gone[0]}', which {self.ctx.where}table.columns declares as "
                f"required; it has {', '.join(sorted(stored.types))}"
            )

    def _changes(self, spark: SparkSession, found: Mapping[str, FileProfile]) -> dict[str, dict[str, int]]:
        """Of days that were taken before and have other files now."""
        taken = self.seen.taken.days
        days = [ds for ds in self.days if ds in taken and taken[ds].files != self.seen.versions[ds]]
        changes: dict[str, dict[str, int]] = {}
        for version in sorted({taken[ds].table_version for ds in days}):
            mine = [ds for ds in days if taken[ds].table_version == version]
            net = {ds: net_change(taken[ds].rows["read"], found[ds].read if ds in found else 0) for ds in mine}
            if not self.seen.snapshot.versioned:
                changes |= net
                continue
            try:
                before = self._rows(spark, open_table(self.source, self.seen.place, version), mine)[0]
                counted = count_changes(before, self._rows(spark, self.seen.snapshot, mine)[0], self.table)
                changes |= {ds: counted.get(ds, net_change(0, 0)) for ds in mine}
            except (UserError, PySparkException, Py4JJavaError) as e:
                # Its files may have been removed by VACUUM.
                _LOG.debug("version %s cannot be compared: %s", version, e)
                changes |= net
        for ds, counts in changes.items():
            if any(counts.values()):
                said = ", ".join(f"{n:,} {kind}" for kind, n in counts.items() if n)
                _LOG.warning("%s: rows have changed since the day was taken: %s", ds, said)
        return changes

    def _duplicates(self, spark: SparkSession, rows: DataFrame, stored: StoredColumns) -> DataFrame | None:
        if not self.table.keys:
            return None
        loaded = None
        if self.source.daily:
            late = self.table.late_days
            near = {landing.following(ds, k) for ds in self.days for k in range(-late, late + 1)} - set(self.days)
            staying = sorted(near & self.seen.taken.days.keys() & self.seen.versions.keys())
            if staying:
                loaded = self._rows(spark, self.seen.snapshot, staying)[0]
                bad = spark.read.format("delta").load(str(self.ctx.quarantine)).where(F.col("ds").isin(staying))
                loaded = loaded.join(bad.select(FILE, LINE), [FILE, LINE], "left_anti")
            else:
                loaded = self._rows(spark, self.seen.snapshot, self.days)[0].where(F.lit(False))
        found = deduplicate.duplicates(rows, loaded, self.table).persist()
        if not stored.positions and not found.isEmpty():
            found.unpersist()
            raise UserError(
                f"{self.ctx.where}table.keys do not tell the rows of {self.source.shown} apart, and Spark gives no "
                f"positions of them: remove the repeated rows, or declare further keys"
            )
        return found

    def _assess(
        self,
        found: Mapping[str, FileProfile],
        repeated: Mapping[str, int],
        changes: Mapping[str, Mapping[str, int]],
        stored: StoredColumns,
    ) -> tuple[list[TakenDay], UserError | None]:
        """Records of the days up to the first that may not be taken, and why it may not."""
        records: list[TakenDay] = []
        for ds in self.days:
            profile, before = found.get(ds), self.seen.taken.days.get(ds)
            if profile is None and before is None and ds != self.ctx.ds:
                continue  # a file without statistics might have had rows of it
            profile = profile or FileProfile(ds, self.source.shown)
            duplicates = repeated.get(ds, 0)
            drift = self._drift(profile, stored)
            checks = []
            if profile.read or ds == self.ctx.ds:
                end = landing.midnight(self.source, landing.following(ds))
                checks = expectations.check(ds, end, [profile], duplicates, self.table.expectations)
            try:
                if before is None and (wanted := declared_rows(self.source, self.ctx.ws, ds)) is not None:
                    checks.append(expectations.Check(ds, "control_rows", profile.read, wanted, profile.read == wanted))
                expectations.refuse([profile], self.table, drift)
                expectations.enforce(checks, drift, profile.reasons, duplicates)
            except UserError as e:
                return records, e
            rows = {
                "read": profile.read,
                "kept": profile.good - duplicates,
                "quarantined": profile.bad,
                "duplicates": duplicates,
            }
            records.append(
                TakenDay(
                    ds=ds,
                    key=self.ctx.key,
                    files=self.seen.versions[ds],
                    table_version=self.seen.snapshot.pin(self.seen.versions),
                    declared=self.declared,
                    judged=self.judged,
                    rows=rows,
                    drift=expectations.as_facts(drift),
                    expectations=expectations.as_facts(checks),
                    reasons=profile.reasons,
                    changes=dict(changes.get(ds, {})),
                )
            )
            counts = ", ".join(f"{name} {n:,}" for name, n in rows.items())
            _LOG.info("%s: %s; %s at version %s", ds, counts, self.source.shown, self.seen.snapshot.pin({}))
        return records, None

    def _drift(self, profile: FileProfile, stored: StoredColumns) -> list[expectations.Drift]:
        """Columns that are missing, and those that are new since a day was taken last."""
        known = self.seen.taken.columns
        declared = {c.name.lower() for c in self.table.columns}
        new = sorted(n for n in stored.types if known is not None and n not in known and n.lower() not in declared)
        found = [expectations.Drift(profile.ds, n, "new", f"in {self.source.shown}, as {stored.types[n]}") for n in new]
        if self.table.new_columns == "accept":
            found = []
        gone = sorted(stored.missing)
        found += [expectations.Drift(profile.ds, n, "missing", f"in {self.source.shown}") for n in gone]
        for d in found:
            _LOG.warning("%s: column '%s' is %s: %s", d.ds, d.column, d.change, d.detail)
        return found

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
        staging, files = self.ctx.staging, list[WrittenFile]()
        staging.remove_quietly()
        try:
            if any(r.left_out for r in records):
                if repeated is not None:
                    why = f"repeats a row with the same {', '.join(self.table.keys)}"
                    repeated = repeated.select("_ds", "_file", "_line", F.lit(why).alias("_why"))
                out = to_quarantine(rows.where(F.col("_ds").isin(days)), self.table, repeated)
                files = frame_files(out, self.ctx.quarantine, QUARANTINE, staging / "quarantine")
            facts = metadata(records, self.seen.place.facts(), stored.types)
            commit_files(spark, self.ctx.quarantine, days, files, facts)
            files = []
        finally:
            remove_files(self.ctx.quarantine, files)
            staging.remove_quietly()


def table_result(seen: TableLook) -> Result:
    """What this run, its killed attempts included, has taken; else what the day was taken with."""
    ctx = seen.ctx
    taken = TakenDays.read(DeltaLog(ctx.quarantine))
    assert taken.version is not None
    days = {ds: taken.days[ds] for ds in seen.versions if ds in taken.days}
    mine = [d for d in days.values() if d.key == ctx.key] or [days[ctx.ds]]
    rows = summed(d.rows for d in mine)
    changed = [{"ds": d.ds, **d.changes} for d in mine if any(d.changes.values())]
    name = table_name(seen.source, ctx.ws, seen.place)
    return Result(
        outputs=(
            Output(kind="table", name=name, version=seen.snapshot.pin(seen.versions), rows=rows["kept"]),
            Output(
                kind="quarantine",
                name=ctx.ws.name_of(ctx.quarantine),
                version=str(taken.version),
                rows=rows["quarantined"],
            ),
        ),
        rows=rows,
        facts={
            "days": [d.ds for d in mine],
            "drift": [x for d in mine for x in d.drift],
            "expectations": [c for d in mine for c in d.expectations],
            "reasons": summed(d.reasons for d in mine),
            # What headrace.lake.source_tables.taken.PinnedTable is made from.
            "table": {
                "name": name,
                "place": seen.place.facts(),
                "days": {d.ds: [d.files, d.left_out] for d in days.values()},
            },
            **({"changed_days": changed} if changed else {}),
        },
    )


def why_gone(
    ctx: SourceContext, source: TableSource, outputs: Sequence[Output], facts: Mapping[str, Any]
) -> str | None:
    """Why what a manifest says of a source table does not hold any more, or None.

    Args:
        ctx: of the source.
        source: the table.
        outputs: of the source, in the manifest.
        facts: of the source, in the manifest.
    """
    table, quarantine = outputs
    if not DeltaLog(ctx.quarantine).has(int(quarantine.version)):
        return f"version {quarantine.version} of {quarantine.name} is gone"
    days = facts["table"]["days"]
    try:
        snapshot = open_table(source, TablePlace(**facts["table"]["place"]), table.version)
        now = day_versions(snapshot, days)
    except UserError as e:
        return str(e)
    changed = [ds for ds, (files, _) in days.items() if now.get(ds, _GONE) != files]
    if changed:
        return f"files of {table.name} of {changed[0]} are others"
    lost = next((f for f in snapshot.files if f.may_hold(ctx.ds) and not f.path.is_file()), None)
    return None if lost is None else f"{lost.path} is gone"
