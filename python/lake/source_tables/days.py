"""What a day of a source table is: of a file by its partition or statistics, of a row by a column."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from headrace.config import TableSource
from headrace.errors import UserError, nearest
from headrace.lake.landing import following, midnight
from headrace.lake.source_tables.snapshot import DAY, FIRST, LAST, TableFile
from headrace.lake.sources.frame import quoted

_DAY = re.compile(r"(\d{4})-(\d{2})-(\d{2})|(\d{4})(\d{2})(\d{2})")
#: Delta's statistics cut times off after the milliseconds.
_CUT = timedelta(milliseconds=1)

Bounds = tuple[Any, Any]


def partition_day(text: str | None, shown: str) -> str:
    """The day that a partition's value names; FIRST for null.

    Raises:
        UserError: it names none.
    """
    if text is None:
        return FIRST
    match = _DAY.fullmatch(text)
    if match is not None:
        parts = [p for p in match.groups() if p]
        try:
            return date(*map(int, parts)).isoformat()
        except ValueError:
            pass
    raise UserError(
        f"source.day.partition: {shown} has the value '{text}', which is no day such as 2026-01-31 or 20260131; name a "
        f"time column instead (source.day.time)"
    )


def days_of_file(source: TableSource, partition: Mapping[str, str | None], bounds: Bounds | None) -> tuple[str, str]:
    """The first and last day of which a file may hold rows.

    Args:
        source: says what a day is.
        partition: text of each partition column by its lower-case name.
        bounds: least and greatest value of `day.time` in it: ISO text, date or datetime; None: not known.

    Raises:
        UserError: the table has no such partition, or its value names no day.
    """
    day = source.day
    if day is None or day.changes:
        return FIRST, LAST
    if day.partition is not None:
        name = day.partition
        if name.lower() not in partition:
            raise UserError(
                f"source.day.partition: {source.shown} is not partitioned by '{name}'{nearest(name, partition)}; name "
                f"a time column instead (source.day.time)"
            )
        ds = partition_day(partition[name.lower()], f"partition column '{name}' of {source.shown}")
        return ds, ds
    if bounds is None:
        return FIRST, LAST
    low, high = (_day_of(v, source.timezone, late) for v, late in zip(bounds, (timedelta(0), _CUT), strict=True))
    return low or FIRST, high or LAST


def _day_of(value: Any, timezone: str, later: timedelta) -> str | None:
    """The day of a date or an instant; None where it cannot be told."""
    if isinstance(value, str):
        try:
            value = date.fromisoformat(value) if len(value) == 10 else datetime.fromisoformat(value)
        except ValueError:
            return None
    if isinstance(value, datetime):
        # Without a zone: of the source's.
        here = value if value.tzinfo is None else value.astimezone(ZoneInfo(timezone))
        return (here + later).date().isoformat()
    return value.isoformat() if isinstance(value, date) else None


def day_column(frame: DataFrame, source: TableSource) -> Column:
    """The day (yyyy-MM-dd) of each row; null for rows of no day.

    Raises:
        UserError: no such column, or it is no time.
    """
    assert source.day is not None
    if source.day.changes:
        return F.col(DAY)
    name = source.day.partition or source.day.time
    assert name is not None
    column, type_ = _found(frame, source, name)
    if source.day.partition is not None:
        text = column.cast("string")
        parts = [F.substring(text, start, length) for start, length in ((1, 4), (5, 2), (7, 2))]
        return F.when(F.length(text) == 8, F.concat_ws("-", *parts)).otherwise(text)
    if isinstance(type_, T.DateType):
        return column.cast("string")
    if isinstance(type_, T.TimestampType):
        local = column if source.timezone == "UTC" else F.from_utc_timestamp(column, source.timezone)
    elif isinstance(type_, T.TimestampNTZType):
        local = column
    else:
        raise UserError(
            f"source.day.time: column '{name}' of {source.shown} is {type_.simpleString()}, not a timestamp or date"
        )
    return F.date_format(local, "yyyy-MM-dd")


def within(frame: DataFrame, source: TableSource, files: Sequence[TableFile], days: Collection[str]) -> DataFrame:
    """The frame with a predicate by which Spark reads only what may hold rows of the days."""
    if source.day is None or source.day.changes or not days:
        return frame
    name = source.day.partition or source.day.time
    assert name is not None
    column, type_ = _found(frame, source, name)
    if source.day.partition is not None:
        texts = sorted({_text(f, name) or "" for f in files if any(f.may_hold(ds) for ds in days)})
        return frame.where(column.isin([F.lit(t).cast(type_) for t in texts]))
    first, last = min(days), max(days)
    if isinstance(type_, T.DateType):
        return frame.where((column >= F.lit(first).cast("date")) & (column <= F.lit(last).cast("date")))
    if isinstance(type_, T.TimestampNTZType):
        return frame.where((column >= F.lit(first).cast(type_)) & (column < F.lit(following(last)).cast(type_)))
    start, end = midnight(source, first), midnight(source, following(last))
    return frame.where((column >= _instant(start)) & (column < _instant(end)))


def day_limits(
    source: TableSource, late_days: int, skew_seconds: int, any_age: Collection[str] = ()
) -> tuple[Column, Column]:
    """`_from` and `_to` of rows with `_ds`, see headrace.lake.ingest.rules.untimely.

    Args:
        source: says what a day is.
        late_days: events of a day may be this much older.
        skew_seconds: events of a day may be this much newer than it.
        any_age: days whose events may be as old as they are.
    """
    day = F.col("_ds").cast("date")
    start = F.to_utc_timestamp(F.date_sub(day, late_days).cast("timestamp"), source.timezone)
    end = F.to_utc_timestamp(F.date_add(day, 1).cast("timestamp"), source.timezone)
    none = F.lit(None).cast("timestamp")
    if any_age:
        start = F.when(~F.col("_ds").isin(sorted(any_age)), start)
    return (start if source.daily else none), end + F.expr(f"interval {skew_seconds} seconds")


def _found(frame: DataFrame, source: TableSource, name: str) -> tuple[Column, T.DataType]:
    for field in frame.schema.fields:
        if field.name.lower() == name.lower():
            return F.col(quoted([field.name])[0]), field.dataType
    raise UserError(f"source.day: {source.shown} has no column '{name}'{nearest(name, frame.columns)}")


def _text(file: TableFile, name: str) -> str | None:
    return (file.partition or {}).get(name.lower())


def _instant(when: datetime) -> Column:
    return F.lit(when.astimezone(UTC).isoformat()).cast("timestamp")
