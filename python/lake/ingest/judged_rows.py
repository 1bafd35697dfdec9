"""Rows of a source table against their declaration: what is wrong with them, and a profile of each day."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace.config import Table, TableSource
from headrace.lake.ingest.profile import FileProfile
from headrace.lake.ingest.rules import Wrong, column_of, event_time, missing, out_of_range, unfit_texts, untimely
from headrace.lake.sources.frame import BAD, GOOD, quoted
from headrace.lake.sources.values import extract
from headrace.lake.tables.days import day_limits
from headrace.lake.tables.declared import FAULTS
from headrace.lake.tables.snapshot import FILE, LINE
from headrace.schema import TableColumn

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: Characters of a row that the quarantine table keeps.
_RAW = 4_000


def judged(
    rows: DataFrame, source: TableSource, table: Table, ids: Collection[str], any_age: Collection[str] = ()
) -> DataFrame:
    """Rows with what is wrong with them.

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
    names = quoted([c.name for c in table.columns])
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
    """A profile of each day of `judged` rows. Days without rows are not in it.

    Args:
        rows: of `judged`.
        source: the spec's.
        table: the declaration.
        absent: declared columns that the table lacks.
    """
    good = F.col("_state") == GOOD
    wanted, columns = list(table.expectations.null_rate), [c.name for c in table.columns]
    aggregates = [
        F.count(F.lit(1)).alias("read"),
        F.count_if(good).alias("good"),
        *(F.count_if(good & F.col(q).isNull()).alias(f"n{i}") for i, q in enumerate(quoted(wanted))),
        *(F.count(q).alias(f"c{i}") for i, q in enumerate(quoted(columns))),
    ]
    if table.event_time:
        time = event_time(table.event_time, source)
        aggregates.append(F.max(F.when(good, F.unix_micros(time))).alias("newest"))
    found: dict[str, FileProfile] = {}
    for row in rows.groupBy("_ds").agg(*aggregates).collect():
        one = found[row["_ds"]] = FileProfile(row["_ds"], source.shown)
        one.read, one.good, one.bad, one.absent = row["read"], row["good"], row["read"] - row["good"], absent
        one.readable = {name: row[f"c{i}"] for i, name in enumerate(columns)}
        one.nulls = {name: row[f"n{i}"] for i, name in enumerate(wanted)}
        if table.event_time and row["newest"] is not None:
            one.newest = datetime.fromtimestamp(row["newest"] / 1e6, UTC)
    bad = [ds for ds, one in found.items() if one.bad]
    if bad:
        # The first reason of each row, as for landing files.
        first = rows.where((F.col("_state") == BAD) & F.col("_ds").isin(bad))
        for row in first.groupBy("_ds", F.col("_kinds")[0].alias("kind")).count().orderBy("kind").collect():
            found[row["_ds"]].reasons[row["kind"]] = row["count"]
    return found


def newest(frame: DataFrame, column: TableColumn, source: TableSource) -> datetime | None:
    """The greatest value of a declared time column in rows of a table (UTC); None where there is none."""
    found = extract(column, frame.schema, source)
    if found is None:
        return None
    time = F.unix_micros(event_time(column.name, source))
    micros = frame.select(found.value.alias(column.name)).agg(F.max(time)).collect()[0][0]
    return None if micros is None else _EPOCH + timedelta(microseconds=micros)


def to_quarantine(rows: DataFrame, table: Table, reasons: DataFrame | None) -> DataFrame:
    """Rows as the quarantine table has them.

    Args:
        rows: of `judged`.
        table: the declaration.
        reasons: `_ds`, `_file`, `_line` and `_why` of further rows to be left out; None: there are none.
    """
    reason = F.col("_reason")
    if reasons is not None:
        rows = rows.join(F.broadcast(reasons), ["_ds", "_file", "_line"], "left")
        reason = F.coalesce(reason, F.col("_why"))
    raw = F.substring(F.to_json(F.struct(*quoted([c.name for c in table.columns]))), 1, _RAW)
    return rows.where(reason.isNotNull()).select(
        F.col("_file").alias("_source_file"),
        F.col("_line").alias("_source_line"),
        raw.alias("_raw"),
        reason.alias("_reason"),
        F.col("_ds").alias("ds"),
    )


def _missing(column: TableColumn) -> Wrong:
    value = column_of(column.name)
    gone = value.isNull() | F.isnan(value) if column.type in ("float", "double") else value.isNull()
    return missing(column, gone, F.lit(None).cast("string"))
