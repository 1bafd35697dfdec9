"""Days of a source table: which were taken before, what a run finds, and what its manifest says.

Records of taken days stand in the `userMetadata` of the commits to the quarantine table. The commit that says that a
day was taken is the one that has the rows of it that features must leave out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pyspark.sql import SparkSession

from headrace.config import TableSource
from headrace.errors import UserError
from headrace.lake.calendar import days_of_run
from headrace.lake.delta.log import DeltaLog
from headrace.lake.landing.completeness import incomplete, missing_markers, warn_left_out
from headrace.lake.landing.expectations import summed
from headrace.lake.landing.source_context import SourceContext
from headrace.lake.spark.session import session
from headrace.lake.tables.opened import find_table, open_table, table_name
from headrace.lake.tables.snapshot import Snapshot, TablePlace
from headrace.manifest import Input, Output, fingerprint
from headrace.stage import Result
from headrace.storage.own_records import known_keys

_MARK = "headrace.ingest.table"
#: Version of a day that was taken and has no rows any more.
NO_ROWS = ""


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
    #: Fingerprints of the declaration, see headrace.lake.landing.load_history.LoadRecord.
    declared: str
    judged: str
    #: read, kept, quarantined, duplicates; where there are such: forgotten (headrace.lake.forgotten).
    rows: dict[str, int]
    drift: list[dict[str, Any]] = field(default_factory=list)
    expectations: list[dict[str, Any]] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    #: Rows that came, changed and went since the day was taken before: late, updated, deleted. Empty the first time.
    changes: dict[str, int] = field(default_factory=dict)
    #: By name: files that may hold its rows and cannot be read, and why (`expectations.max_bad_files`).
    bad_files: dict[str, str] = field(default_factory=dict)

    @property
    def left_out(self) -> int:
        """Rows of the day that are in the quarantine table."""
        return self.rows["read"] - self.rows["kept"] - self.rows.get("forgotten", 0)


_KEYS = frozenset(f.name for f in fields(TakenDay))


@dataclass(frozen=True)
class TakenDays:
    """Records in the log of a quarantine table."""

    days: Mapping[str, TakenDay]
    #: Where the table was (headrace.lake.tables.snapshot.TablePlace).
    place: Mapping[str, Any] | None
    #: Its columns, name to type, when a day was taken last.
    columns: Mapping[str, str] | None
    #: Version of the quarantine table whose commit is the newest of ours; None before any.
    version: int | None

    @staticmethod
    def read(log: DeltaLog) -> TakenDays:
        """Return the newest record of each day. Raises UserError where a newer release has written one."""
        days: dict[str, TakenDay] = {}
        place = columns = newest = None
        for version, text in log.user_metadata():
            try:
                stored = json.loads(text)[_MARK]
            except (ValueError, KeyError, TypeError):
                continue
            record_name = f"the record of days that were taken (version {version} of the quarantine table)"
            known_keys(stored, ("place", "columns", "days"), record_name)
            if newest is None:
                newest, place, columns = version, stored["place"], stored["columns"]
            for day in stored["days"]:
                days.setdefault(day["ds"], TakenDay(**known_keys(day, _KEYS, record_name)))
        return TakenDays(days, place, columns, newest)


def metadata(days: Sequence[TakenDay], place: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    """Return the text for `userMetadata`."""
    stored = [asdict(d) for d in days]
    for day in stored:
        if not day["bad_files"]:  # releases that do not know the key read the record
            del day["bad_files"]
    document = {"place": dict(place), "columns": dict(columns), "days": stored}
    return json.dumps({_MARK: document}, separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True)
class TableLook:
    """A source table as a run finds it."""

    ctx: SourceContext
    source: TableSource
    place: TablePlace
    snapshot: Snapshot
    taken: TakenDays
    #: Of each day up to the run's own that the run covers or that was taken: Snapshot.day_versions, NO_ROWS where it
    #: has no rows any more.
    versions: Mapping[str, str]

    def inputs(self) -> Iterator[Input]:
        """Yield an input for each covered day, and one for all earlier days that were taken."""
        name = table_name(self.source, self.ctx.ws, self.place)
        covered = set(days_of_run(self.source, self.ctx.ds))
        earlier = {ds: version for ds, version in self.versions.items() if ds not in covered}
        if earlier:
            yield Input(kind="table", name=f"{name}/before", version=fingerprint(earlier))
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
    # Before the version is pinned: see headrace.lake.landing.completeness.
    lacks = {ds: missing_markers(source, ctx.ws, ds) for ds in days_of_run(source, ctx.ds) if ds not in taken.days}
    if lacks.get(ctx.ds):
        raise incomplete(ctx, ctx.ds, lacks[ctx.ds])
    place = find_table(source, ctx.ws, spark)
    if place is None and taken.place is not None and (old_place := TablePlace(**taken.place)).is_still_valid(source):
        place = old_place
    if place is None:
        with session(ctx.run.spec.spark, ctx.ws, f"ingest {ctx.pipeline} {ctx.ds}") as started:
            place = find_table(source, ctx.ws, started)
    assert place is not None
    if source.day is not None and source.day.changes and taken.place not in (None, place.facts()):
        raise UserError(
            f"{ctx.key_prefix}source: days were taken by the versions of the table at {(taken.place or {})['path']} "
            f"before; name that one, or give the pipeline another name"
        )
    snapshot = open_table(source, ctx.table, place, {ds: day.files for ds, day in taken.days.items()})
    days = {ds for ds in days_of_run(source, ctx.ds) if not lacks.get(ds)}
    days |= {ds for ds in taken.days if source.daily and ds <= ctx.ds}
    incomplete_days = [ds for ds, lacks_of_day in lacks.items() if lacks_of_day]
    for ds in snapshot.day_versions(incomplete_days):
        warn_left_out(ds, "; ".join(lacks[ds]))
    day_versions = snapshot.day_versions(days)
    if ctx.ds not in day_versions and ctx.ds not in taken.days:
        reason = snapshot.why_no_rows(ctx.ds)
        raise UserError(f"{ctx.key_prefix}source: {source.title} has no rows of {ctx.ds}: {reason}")
    versions = {ds: day_versions.get(ds, NO_ROWS) for ds in sorted(days) if ds in day_versions or ds in taken.days}
    return TableLook(ctx, source, place, snapshot, taken, versions)


def table_result(seen: TableLook) -> Result:
    """Return what this run, its killed attempts included, has taken; else what the day was taken with."""
    ctx = seen.ctx
    taken = TakenDays.read(DeltaLog(ctx.quarantine))
    assert taken.version is not None
    days = {ds: taken.days[ds] for ds in seen.versions if ds in taken.days}
    own_days = [d for d in days.values() if d.key == ctx.key] or [days[ctx.ds]]
    rows = summed(d.rows for d in own_days)
    changed = [{"ds": d.ds, **d.changes} for d in own_days if any(d.changes.values())]
    name = table_name(seen.source, ctx.ws, seen.place)
    left_out = sorted({file for d in days.values() for file in d.bad_files})
    # A file whose days are not known is one of each day.
    bad_files = {
        file: {"ds": d.ds, "file": file, "reason": cause} for d in own_days for file, cause in d.bad_files.items()
    }
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
            "days": [d.ds for d in own_days],
            "drift": [x for d in own_days for x in d.drift],
            "expectations": [c for d in own_days for c in d.expectations],
            "reasons": summed(d.reasons for d in own_days),
            # What headrace.lake.tables.declared.PinnedTable is made from.
            "table": {
                "name": name,
                "place": seen.place.facts(),
                "days": {d.ds: [d.files, d.left_out] for d in days.values()},
                **({"bad_files": left_out} if left_out else {}),
            },
            **({"bad_files": [bad_files[file] | {"table": name} for file in sorted(bad_files)]} if bad_files else {}),
            **({"changed_days": changed} if changed else {}),
        },
    )


def why_gone(
    ctx: SourceContext, source: TableSource, outputs: Sequence[Output], facts: Mapping[str, Any]
) -> str | None:
    """Return why a manifest's statements on a source table do not hold any more, or None.

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
        was = {ds: files for ds, (files, _) in days.items()}
        snapshot = open_table(source, ctx.table, TablePlace(**facts["table"]["place"]), was, table.version)
        now = snapshot.day_versions(days)
    except UserError as e:
        return str(e)
    changed = [ds for ds, (files, _) in days.items() if now.get(ds, NO_ROWS) != files]
    if changed:
        return f"files of {table.name} of {changed[0]} are others"
    return snapshot.lost(ctx.ds)
