"""Days of a source table: of a file by its partition or statistics, of a row by a column."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from headrace.config import TableSource
from headrace.config.schema import quoted_names
from headrace.config.section import day_groups, day_regex
from headrace.config.source import following, midnight
from headrace.errors import UserError, nearest
from headrace.lake.tables.snapshot import DAY, FIRST, LAST, WHOLE_TABLE, StoredRows, TableFile, uri_path
from headrace.lake.values import stored_name

_DAY = re.compile(r"(\d{4})-(\d{2})-(\d{2})|(\d{4})(\d{2})(\d{2})")
#: Delta's statistics cut times off after the milliseconds.
_CUT = timedelta(milliseconds=1)

Bounds = tuple[Any, Any]


def partition_day(text: str | None, where_from: str) -> str:
    """Return the day that a partition's value names; FIRST for null.

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
        f"source.day.partition: {where_from} has the value '{text}', which is no day such as 2026-01-31 or 20260131; "
        f"name a time column instead (source.day.time)"
    )


def _joined(parts: Sequence[str | None]) -> str | None:
    """Year, month and day as one text; a value of one column as it is."""
    if len(parts) == 1 or None in parts:
        return None if None in parts else parts[0]
    year, *rest = map(str, parts)
    return "-".join([year.zfill(4), *(part.zfill(2) for part in rest)])


def path_day(source: TableSource, name: str) -> str | None:
    """Return the day that a file's path in its table names by `day.path`, None where there is no `day.path`.

    Raises:
        UserError: it names none.
    """
    if source.day is None or (pattern := source.day.path) is None:
        return None
    match = re.match(day_regex(pattern, lambda text: text), name)
    if match is not None:
        with suppress(ValueError):
            return date(*(int(match[group]) for group in day_groups(pattern))).isoformat()
    raise UserError(
        f"source.day.path: the file {name} of {source.title} is not as '{pattern}' says; change it, or move the file "
        f"away"
    )


def path_day_column(source: TableSource, file: Column) -> Column:
    """Return the same for Spark, of a column of paths as `_source_file` has them."""
    assert source.day is not None
    assert source.day.path is not None
    regex = f"^{day_regex(source.day.path, uri_path)}"
    year, month, day = (F.regexp_extract(file, regex, group) for group in day_groups(source.day.path))
    return F.concat_ws("-", year, F.lpad(month, 2, "0"), F.lpad(day, 2, "0"))


def days_of_file(source: TableSource, partition: Mapping[str, str | None], bounds: Bounds | None) -> tuple[str, str]:
    """Return the first and last day of which a file may hold rows.

    Args:
        source: says what a day is.
        partition: text of each partition column by its lower-case name.
        bounds: least and greatest value of `day.time` in it: ISO text, date or datetime; None: not known, or beyond the
            years 1 to 9999.

    Raises:
        UserError: the table has no such partition, or its value names no day.
    """
    day = source.day
    if day is None or day.changes:
        return FIRST, LAST
    if day.partitions:
        for name in day.partitions:
            if name.lower() not in partition:
                raise UserError(
                    f"source.day.partition: {source.title} is not partitioned by '{name}'{nearest(name, partition)}; "
                    f"name a time column instead (source.day.time)"
                )
        texts = [partition[name.lower()] for name in day.partitions]
        shown_columns = f"partition column{'s' if len(texts) > 1 else ''} {', '.join(map(repr, day.partitions))}"
        ds = partition_day(_joined(texts), f"{shown_columns} of {source.title}")
        return ds, ds
    if bounds is None:
        return FIRST, LAST
    low, high = (_day_of(v, source.timezone, late) for v, late in zip(bounds, (timedelta(0), _CUT), strict=True))
    return low or FIRST, high or LAST


def _day_of(value: Any, timezone: str, later: timedelta) -> str | None:
    """Return the day of a date or an instant; None where it cannot be told."""
    if isinstance(value, str):
        try:
            value = date.fromisoformat(value) if len(value) == 10 else datetime.fromisoformat(value)
        except ValueError:
            return None
    if isinstance(value, datetime):
        # A time without a zone is in the source's time zone.
        try:
            local = value if value.tzinfo is None else value.astimezone(ZoneInfo(timezone))
            return (local + later).date().isoformat()
        except OverflowError:  # the first or the last day of Python's calendar
            return None
    return value.isoformat() if isinstance(value, date) else None


def day_column(part: StoredRows, source: TableSource) -> Column:
    """Return the day (yyyy-MM-dd) of each row; null for rows of no day.

    Raises:
        UserError: no such column, or it is no time.
    """
    assert source.day is not None
    if source.day.changes or source.day.path:
        return F.col(DAY)
    if len(source.day.partitions) > 1:
        parts = [
            _column_and_type(part.frame, source, name, part.place)[0].cast("string") for name in source.day.partitions
        ]
        return F.concat_ws("-", *(F.lpad(p, n, "0") for p, n in zip(parts, (4, 2, 2), strict=True)))
    name = next(iter(source.day.partitions), source.day.time)
    assert name is not None
    column, type_ = _column_and_type(part.frame, source, name, part.place)
    if isinstance(type_, T.NullType):
        return F.lit(None).cast("string")
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
            f"source.day.time: column '{name}' of {source.title} is {type_.simpleString()}, not a timestamp or date"
            f"{_in_file(part.place)}"
        )
    return F.date_format(local, "yyyy-MM-dd")


def with_day_filter(
    frame: DataFrame, source: TableSource, files: Sequence[TableFile], days: Collection[str]
) -> DataFrame:
    """Return the frame with a predicate by which Spark reads only what may hold rows of the days."""
    if source.day is None or source.day.changes or not days:
        return frame
    if source.day.partitions:
        read = [f for f in files if any(f.may_hold(ds) for ds in days)]
        for partition in source.day.partitions:
            column, type_ = _column_and_type(frame, source, partition)
            texts = sorted({_text(f, partition) or "" for f in read})
            frame = frame.where(column.isin([F.lit(t).cast(type_) for t in texts]))
        return frame
    name = source.day.time
    assert name is not None
    column, type_ = _column_and_type(frame, source, name)
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
    """`_from` and `_to` of rows with `_ds`, see headrace.lake.landing.table_days.untimely.

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


def _column_and_type(
    frame: DataFrame, source: TableSource, name: str, place: str = WHOLE_TABLE
) -> tuple[Column, T.DataType]:
    for field in sorted(frame.schema.fields, key=lambda f: stored_name(f) != name):
        if stored_name(field).lower() == name.lower():
            return F.col(quoted_names([field.name])[0]), field.dataType
    raise UserError(f"source.day: {source.title} has no column '{name}'{_in_file(place)}{nearest(name, frame.columns)}")


def _in_file(place: str) -> str:
    return "" if place == WHOLE_TABLE else f" in {place}"


def _text(file: TableFile, name: str) -> str | None:
    return (file.partition or {}).get(name.lower())


def _instant(when: datetime) -> Column:
    return F.lit(when.astimezone(UTC).isoformat()).cast("timestamp")
