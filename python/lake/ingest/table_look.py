"""A source table as a run of ingest finds it: which version it pins, and which days it covers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pyspark.sql import SparkSession

from headrace.config import TableSource
from headrace.errors import UserError
from headrace.lake import landing
from headrace.lake.delta.log import DeltaLog
from headrace.lake.ingest.completeness import incomplete, lacking, warn_left_out
from headrace.lake.ingest.source_context import SourceContext
from headrace.lake.ingest.taken_days import TakenDays
from headrace.lake.spark.session import session
from headrace.lake.tables.opened import TablePlace, find_table, open_table, table_name
from headrace.lake.tables.snapshot import Snapshot
from headrace.manifest import Input, fingerprint

#: Version of a day that was taken and has no rows any more.
GONE = ""


@dataclass(frozen=True)
class TableLook:
    """A source table as a run finds it."""

    ctx: SourceContext
    source: TableSource
    place: TablePlace
    snapshot: Snapshot
    taken: TakenDays
    #: Of each day that the run covers or that was taken: Snapshot.day_versions, GONE where it has no rows any more. Up
    #: to the run's own.
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
    """Pin the version that a run reads. A catalog is asked where none was asked before, where it alone knows the newest
    version (Iceberg), or with `spark`.

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
    if place is None and taken.place is not None and (kept := TablePlace(**taken.place)).stands(source):
        place = kept
    if place is None:
        with session(ctx.run.spec.spark, ctx.ws, f"ingest {ctx.pipeline} {ctx.ds}") as started:
            place = find_table(source, ctx.ws, started)
    assert place is not None
    if source.day is not None and source.day.changes and taken.place not in (None, place.facts()):
        raise UserError(
            f"{ctx.where}source: days were taken by the versions of the table at {(taken.place or {})['path']} before; "
            f"name that one, or give the pipeline another name"
        )
    snapshot = open_table(source, ctx.table, place, {ds: day.files for ds, day in taken.days.items()})
    days = {ds for ds in landing.covered(source, ctx.ds) if not lacks.get(ds)}
    days |= {ds for ds in taken.days if source.daily and ds <= ctx.ds}
    incomplete_days = [ds for ds, what in lacks.items() if what]
    for ds in snapshot.day_versions(incomplete_days):
        warn_left_out(ds, "; ".join(lacks[ds]))
    found = snapshot.day_versions(days)
    if ctx.ds not in found and ctx.ds not in taken.days:
        why = snapshot.why_no_rows(ctx.ds)
        raise UserError(f"{ctx.where}source: {source.shown} has no rows of {ctx.ds}: {why}")
    versions = {ds: found.get(ds, GONE) for ds in sorted(days) if ds in found or ds in taken.days}
    return TableLook(ctx, source, place, snapshot, taken, versions)
