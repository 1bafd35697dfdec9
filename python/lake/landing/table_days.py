"""Days of a source table: which were taken before, what a run finds in their rows, and what its manifest says.

Records of taken days stand in the `userMetadata` of the commits to the quarantine table. The commit that says that a
day was taken is the one that has the rows of it that features must leave out. Rows have faults beside their
declaration; a day has a profile, and changes since it was taken.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import AnySource, Table, TableSource, schema
from headrace.config.schema import TableColumn, quoted_names
from headrace.config.source import days_of_run, midnight
from headrace.errors import UserError, known_keys
from headrace.lake.delta.log import DeltaLog
from headrace.lake.faults import (
    BAD,
    GOOD,
    SHOWN_CHARACTERS,
    kind_empty,
    kind_missing,
    kind_nul,
    kind_outside,
    most_bytes,
    span_outside,
    untimely_faults,
)
from headrace.lake.landing.expectations import FileProfile, summed
from headrace.lake.landing.source_context import SourceContext, incomplete, missing_markers, warn_left_out
from headrace.lake.spark.session import session
from headrace.lake.tables.change_feed import DELETE, INSERT, POSTIMAGE, TYPE
from headrace.lake.tables.days import day_limits
from headrace.lake.tables.declared import FAULTS
from headrace.lake.tables.opened import find_table, open_table, table_name
from headrace.lake.tables.snapshot import FILE, LINE, Snapshot, TablePlace
from headrace.lake.values import extract
from headrace.stage import Result
from headrace.stage.manifest import Input, Output, fingerprint

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: Characters of a row that the quarantine table keeps.
_RAW = 4_000
_KINDS = ("late", "updated", "deleted")
_NUL = "\0"


def judged(
    rows: DataFrame, source: TableSource, table: Table, ids: Collection[str], any_age: Collection[str] = ()
) -> DataFrame:
    """Return rows with their faults.

    Args:
        rows: of headrace.lake.tables.declared.table_rows.
        source: the spec's.
        table: the declaration.
        ids: declared text columns whose values are ids.
        any_age: days of which `table.late_days` asks nothing.

    Returns:
        `_ds`, `_file` string, `_line` bigint, `_copy` int 0, the declared columns, `_state` (GOOD or BAD), `_reason`
        string and `_kinds` array<string>, both null where the row is good.
    """
    names = quoted_names([c.name for c in table.columns])
    frame = rows.select(
        F.col("ds").alias("_ds"),
        F.col(FILE).alias("_file"),
        F.col(LINE).alias("_line"),
        F.lit(0).alias("_copy"),
        *names,
        FAULTS,
    )
    start, end = day_limits(source, table.late_days, table.clock_skew_seconds, any_age)
    frame = frame.select("*", start.alias("_from"), end.alias("_to"))
    wrong = [_missing(c) for c in table.columns if c.required]
    wrong += unfit_texts(table, ids) + out_of_range(table) + untimely(source, table)
    bad = reduce(lambda a, b: a | b, (w.when for w in wrong), F.size(FAULTS) > 0)
    frame = frame.select("*", F.when(bad, BAD).otherwise(GOOD).alias("_state"))
    is_bad = F.col("_state") == BAD
    more = F.array(*(F.when(w.when, F.lit(w.kind)) for w in wrong)).cast("array<string>")
    kinds = F.concat(F.transform(FAULTS, lambda f: f["kind"]), F.array_compact(more))
    unread = F.transform(FAULTS, lambda f: f["reason"])
    reason = F.concat_ws("; ", unread, *(F.when(w.when, w.reason) for w in wrong))
    return frame.select(
        "_ds",
        "_file",
        "_line",
        "_copy",
        *names,
        "_state",
        F.when(is_bad, reason).alias("_reason"),
        F.when(is_bad, kinds).alias("_kinds"),
    )


def profiles(rows: DataFrame, source: TableSource, table: Table, absent: frozenset[str]) -> dict[str, FileProfile]:
    """Return a profile of each day of `judged` rows. Days without rows are not in it.

    Args:
        rows: of `judged`.
        source: the spec's.
        table: the declaration.
        absent: declared columns that the table lacks.
    """
    good = F.col("_state") == GOOD
    null_columns, columns = list(table.expectations.null_rate), [c.name for c in table.columns]
    aggregates = [
        F.count(F.lit(1)).alias("read"),
        F.count_if(good).alias("good"),
        *(F.count_if(good & F.col(q).isNull()).alias(f"n{i}") for i, q in enumerate(quoted_names(null_columns))),
        *(F.count(q).alias(f"c{i}") for i, q in enumerate(quoted_names(columns))),
    ]
    if table.event_time:
        time = event_time(table.event_time, source)
        aggregates.append(F.max(F.when(good, F.unix_micros(time))).alias("newest"))
    by_day: dict[str, FileProfile] = {}
    for row in rows.groupBy("_ds").agg(*aggregates).collect():
        profile = by_day[row["_ds"]] = FileProfile(row["_ds"], source.title)
        profile.read, profile.good, profile.bad, profile.absent = (
            row["read"],
            row["good"],
            row["read"] - row["good"],
            absent,
        )
        profile.readable = {name: row[f"c{i}"] for i, name in enumerate(columns)}
        profile.nulls = {name: row[f"n{i}"] for i, name in enumerate(null_columns)}
        if table.event_time and row["newest"] is not None:
            profile.newest = datetime.fromtimestamp(row["newest"] / 1e6, UTC)
    bad = [ds for ds, profile in by_day.items() if profile.bad]
    if bad:
        # The first reason of each row, as for landing files.
        first = rows.where((F.col("_state") == BAD) & F.col("_ds").isin(bad))
        for row in first.groupBy("_ds", F.col("_kinds")[0].alias("kind")).count().orderBy("kind").collect():
            by_day[row["_ds"]].reasons[row["kind"]] = row["count"]
    return by_day


def newest(frame: DataFrame, column: TableColumn, source: TableSource) -> datetime | None:
    """Return the greatest value of a declared time column in rows of a table (UTC); None where there is none."""
    extracted = extract(column, frame.schema, source)
    if extracted is None:
        return None
    time = F.unix_micros(event_time(column.name, source))
    micros = frame.select(extracted.value.alias(column.name)).agg(F.max(time)).collect()[0][0]
    return None if micros is None else _EPOCH + timedelta(microseconds=micros)


def to_quarantine(rows: DataFrame, table: Table, reasons: DataFrame | None) -> DataFrame:
    """Return rows as the quarantine table has them.

    Args:
        rows: of `judged`.
        table: the declaration.
        reasons: `_ds`, `_file`, `_line` and `_why` of further rows to be left out; None: there are none.
    """
    reason = F.col("_reason")
    if reasons is not None:
        rows = rows.join(F.broadcast(reasons), ["_ds", "_file", "_line"], "left")
        reason = F.coalesce(reason, F.col("_why"))
    raw = F.substring(F.to_json(F.struct(*quoted_names([c.name for c in table.columns]))), 1, _RAW)
    return rows.where(reason.isNotNull()).select(
        F.col("_file").alias("_source_file"),
        F.col("_line").alias("_source_line"),
        raw.alias("_raw"),
        reason.alias("_reason"),
        F.col("_ds").alias("ds"),
    )


class Wrong:
    """One thing that can be wrong with a row: its condition, its kind (for counting), its reason, the value (text)."""

    def __init__(self, when: Column, kind: str, reason: Column, value: Column) -> None:
        self.when, self.kind, self.reason, self.value = when, kind, reason, value


def missing(column: TableColumn, when: Column, value: Column) -> Wrong:
    """Return the fault that a required column has no value."""
    kind = kind_missing(column)
    return Wrong(when, kind, F.lit(kind), value)


def out_of_range(table: Table) -> list[Wrong]:
    """Return the faults of values outside `expectations.ranges`."""
    faults = []
    for column, (low, high) in table.expectations.ranges.items():
        value = column_of(column)
        outside = F.lit(False)
        if low is not None:
            outside = outside | (value < F.lit(low))
        if high is not None:
            outside = outside | (value > F.lit(high))
        text = value.cast("string")
        reason = F.concat(F.lit(f"{column}: "), text, F.lit(f" is {span_outside(low, high)}"))
        faults.append(Wrong(F.coalesce(outside, F.lit(False)), kind_outside(column, low, high), reason, text))
    return faults


def unfit_texts(table: Table, ids: Collection[str]) -> list[Wrong]:
    """Return the faults of texts that `table.ids` and `table.text_nul` refuse.

    Args:
        table: the declaration.
        ids: declared text columns whose values are ids.
    """
    limits = table.ids
    faults: list[Wrong] = []
    for column in table.columns:
        name, value = column.name, column_of(column.name)
        if name in ids:
            if limits.max_bytes is not None:
                length, most = F.octet_length(value), most_bytes(limits.max_bytes)
                reason = F.concat(
                    F.lit(f"{name}: '"),
                    F.substring(value, 1, SHOWN_CHARACTERS),
                    F.lit("' has "),
                    length,
                    F.lit(f"; {most}"),
                )
                faults.append(_unfit(length > limits.max_bytes, f"{name}: {most}", reason, value))
            if limits.empty == "quarantine":
                faults.append(_unfit(value == "", kind_empty(name), None, value))
        if (limits.nul if name in ids else table.text_nul) == "quarantine":
            kind = kind_nul(name, name in ids)
            if column.type == "string":
                faults.append(_unfit(value.contains(_NUL), kind, None, value))
            elif column.type == "array<string>":
                faults.append(_unfit(F.exists(value, lambda e: e.contains(_NUL)), kind, None, F.to_json(value)))
    return faults


def _unfit(when: Column, kind: str, reason: Column | None, value: Column) -> Wrong:
    """Return the fault of a text that may be shown, but has no place in the table; null is none."""
    example = F.replace(F.substring(value, 1, SHOWN_CHARACTERS), F.lit(_NUL), F.lit("\\0"))
    text = F.lit(kind) if reason is None else F.replace(reason, F.lit(_NUL), F.lit("\\0"))
    return Wrong(F.coalesce(when, F.lit(False)), kind, text, example)


def untimely(source: AnySource, table: Table) -> list[Wrong]:
    """Return the faults of events that come too late, or from after their day: of rows with `_from` and `_to`."""
    if not table.event_time:
        return []
    column = table.event_time
    time = event_time(column, source)
    text = time.cast("string")
    late, future = F.coalesce(time < F.col("_from"), F.lit(False)), F.coalesce(time >= F.col("_to"), F.lit(False))
    too_late, too_early = untimely_faults(table.late_days)
    return [
        Wrong(when, f"{column}: {fault}", F.concat(F.lit(f"{column}: '"), text, F.lit(f"' is {fault}")), text)
        for when, fault in ((late, too_late), (future, too_early))
    ]


def event_time(column: str, source: AnySource) -> Column:
    """Return the instant of a row's event: a date's begins at midnight in the source's time zone."""
    value = column_of(column)
    if source.timezone == "UTC":
        return value.cast("timestamp")
    local = F.to_utc_timestamp(value.cast("timestamp"), F.lit(source.timezone))
    return F.when(F.typeof(value) == "date", local).otherwise(value.cast("timestamp"))


def column_of(name: str) -> Column:
    """Return a column by its name, whatever characters it has."""
    return schema.column(name)


def _missing(column: TableColumn) -> Wrong:
    value = column_of(column.name)
    is_missing = value.isNull() | F.isnan(value) if column.type in ("float", "double") else value.isNull()
    return missing(column, is_missing, F.lit(None).cast("string"))


def count_changes(old_rows: DataFrame, now: DataFrame, table: Table) -> dict[str, dict[str, int]]:
    """Count rows that were added, changed and removed, by day.

    With `table.keys` a row is its keys; without, its values, so that a change is one row less and one more.

    Args:
        old_rows: of headrace.lake.tables.declared.table_rows, at the older version.
        now: the same at the newer one.
        table: the declaration.

    Returns:
        by day: late, updated, deleted.
    """
    content = F.xxhash64(*quoted_names([c.name for c in table.columns])).alias("content")
    row = F.struct(*quoted_names(table.keys)).alias("row") if table.keys else content.alias("row")
    sides = [f.select("ds", row, content, F.lit(i).alias("side")) for i, f in enumerate((old_rows, now))]
    old, new = F.col("side") == 0, F.col("side") == 1
    wide = F.col("content").cast("decimal(20,0)")
    each = (
        sides[0]
        .unionByName(sides[1])
        .groupBy("ds", "row")
        .agg(
            F.count_if(old).alias("old"),
            F.count_if(new).alias("new"),
            F.sum(F.when(old, wide)).alias("then"),
            F.sum(F.when(new, wide)).alias("now"),
        )
    )
    updated = (F.col("old") == F.col("new")) & (F.col("then") != F.col("now"))
    counted = each.groupBy("ds").agg(
        F.sum(F.greatest(F.col("new") - F.col("old"), F.lit(0))).alias("late"),
        F.sum(F.when(updated, F.col("new")).otherwise(0)).alias("updated"),
        F.sum(F.greatest(F.col("old") - F.col("new"), F.lit(0))).alias("deleted"),
    )
    return {r["ds"]: {kind: int(r[kind]) for kind in _KINDS} for r in counted.collect()}


def count_feed(feed: DataFrame, ds: str, source: TableSource, table: Table) -> dict[str, int]:
    """Count the changes of a day in the change data feed, besides new events.

    Args:
        feed: of headrace.lake.tables.change_feed.ChangeFeed.changes.
        ds: the day.
        source: the spec's.
        table: the declaration.

    Returns:
        late: rows inserted whose event was before the day; updated, deleted.
    """
    late = F.lit(False)
    if table.event_time:
        declared = next(c for c in table.columns if c.name == table.event_time)
        extracted = extract(declared, feed.schema, source)
        if extracted is not None:
            feed = feed.select(TYPE, extracted.value.alias(table.event_time))
            start = F.lit(round(midnight(source, ds).timestamp() * 1e6))
            late = F.unix_micros(event_time(table.event_time, source)) < start
    kind = F.col(TYPE)
    counted = feed.agg(
        F.count_if((kind == INSERT) & late).alias("late"),
        F.count_if(kind == POSTIMAGE).alias("updated"),
        F.count_if(kind == DELETE).alias("deleted"),
    ).collect()[0]
    return {name: int(counted[name]) for name in _KINDS}


def net_change(rows_before: int, now: int) -> dict[str, int]:
    """Return the least that must have changed, where the older version cannot be read any more."""
    return {"late": max(0, now - rows_before), "updated": 0, "deleted": max(0, rows_before - now)}


def refuse_changes(changes: Mapping[str, Mapping[str, int]], source: TableSource, section: str) -> None:
    """Stop where a day has changed in a way that the spec refuses.

    Args:
        changes: by day, of `count_changes`.
        source: the spec's.
        section: before `source` in a key of the spec.

    Raises:
        UserError: with the counts.
    """
    policy = source.changed_days
    refused = {"late": policy.late, "updated": policy.updates, "deleted": policy.deletes}
    refusals = [
        f"{ds}: {n:,} {kind}"
        for ds, counts in sorted(changes.items())
        for kind, n in counts.items()
        if n and refused[kind] == "refuse"
    ]
    if refusals:
        raise UserError(
            f"rows of {source.title} have changed since their days were taken: {'; '.join(refusals)}. Nothing was "
            f"taken anew; {section}source.changed_days says what is accepted (late, updates, deletes)"
        )


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
    # Before the version is pinned: see headrace.lake.landing.source_context.
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
