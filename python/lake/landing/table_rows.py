"""Rows of a source table beside their declaration: faults, a profile of each day, changes since it was taken."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace.config import Table, TableSource
from headrace.errors import UserError
from headrace.lake.calendar import midnight
from headrace.lake.faults import BAD, GOOD
from headrace.lake.landing.judge import Wrong, column_of, event_time, missing, out_of_range, unfit_texts, untimely
from headrace.lake.landing.profile import FileProfile
from headrace.lake.tables.change_feed import DELETE, INSERT, POSTIMAGE, TYPE
from headrace.lake.tables.days import day_limits
from headrace.lake.tables.declared import FAULTS
from headrace.lake.tables.snapshot import FILE, LINE
from headrace.lake.values import extract
from headrace.schema import TableColumn, quoted_names

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: Characters of a row that the quarantine table keeps.
_RAW = 4_000
_KINDS = ("late", "updated", "deleted")


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
