"""What the declaration of a table asks of a row whose values have their types: ranges, times, values that must be."""

from __future__ import annotations

from collections.abc import Collection

from pyspark.sql import Column
from pyspark.sql import functions as F

from headrace import identifiers
from headrace.config import AnySource, Table
from headrace.schema import TableColumn

#: Characters of a value that a reason quotes.
SHOWN = 100
_NUL = "\0"


class Wrong:
    """One thing that can be wrong with a row: when, its kind (for counting), its reason, the value (text)."""

    def __init__(self, when: Column, kind: str, reason: Column, value: Column) -> None:
        self.when, self.kind, self.reason, self.value = when, kind, reason, value


def missing(column: TableColumn, when: Column, value: Column) -> Wrong:
    """A required column has no value."""
    kind = f"{column.name}: required, but null"
    return Wrong(when, kind, F.lit(kind), value)


def out_of_range(table: Table) -> list[Wrong]:
    """Values outside `expectations.ranges`."""
    found = []
    for column, (low, high) in table.expectations.ranges.items():
        value = column_of(column)
        outside = F.lit(False)
        if low is not None:
            outside = outside | (value < F.lit(low))
        if high is not None:
            outside = outside | (value > F.lit(high))
        span = f"outside [{'' if low is None else f'{low:g}'}, {'' if high is None else f'{high:g}'}]"
        text = value.cast("string")
        reason = F.concat(F.lit(f"{column}: "), text, F.lit(f" is {span}"))
        found.append(Wrong(F.coalesce(outside, F.lit(False)), f"{column}: {span}", reason, text))
    return found


def unfit_texts(table: Table, ids: Collection[str]) -> list[Wrong]:
    """Texts that `table.ids` and `table.text_nul` refuse.

    Args:
        table: the declaration.
        ids: declared text columns whose values are ids.
    """
    limits = table.ids
    found: list[Wrong] = []
    for column in table.columns:
        name, value = column.name, column_of(column.name)
        if name in ids:
            if limits.max_bytes is not None:
                length, most = F.octet_length(value), f"an id has at most {limits.max_bytes:,} bytes"
                reason = F.concat(
                    F.lit(f"{name}: '"), F.substring(value, 1, SHOWN), F.lit("' has "), length, F.lit(f"; {most}")
                )
                found.append(_unfit(length > limits.max_bytes, f"{name}: {most}", reason, value))
            if limits.empty == "quarantine":
                found.append(_unfit(value == "", f"{name}: an id is empty", None, value))
        if (limits.nul if name in ids else table.text_nul) == "quarantine":
            kind = f"{name}: {'an id' if name in ids else 'a text'} has a NUL character"
            if column.type == "string":
                found.append(_unfit(value.contains(_NUL), kind, None, value))
            elif column.type == "array<string>":
                found.append(_unfit(F.exists(value, lambda e: e.contains(_NUL)), kind, None, F.to_json(value)))
    return found


def _unfit(when: Column, kind: str, reason: Column | None, value: Column) -> Wrong:
    """A text of a row that may be shown, but has no place in the table; null is none."""
    shown = F.replace(F.substring(value, 1, SHOWN), F.lit(_NUL), F.lit("\\0"))
    told = F.lit(kind) if reason is None else F.replace(reason, F.lit(_NUL), F.lit("\\0"))
    return Wrong(F.coalesce(when, F.lit(False)), kind, told, shown)


def untimely(source: AnySource, table: Table) -> list[Wrong]:
    """Events that come too late, or from after their day: of rows with the columns `_from` and `_to`."""
    if not table.event_time:
        return []
    column, late_days = table.event_time, table.late_days
    time = event_time(column, source)
    text = time.cast("string")
    late, future = F.coalesce(time < F.col("_from"), F.lit(False)), F.coalesce(time >= F.col("_to"), F.lit(False))
    too_late, too_early = f"more than {late_days} day{'' if late_days == 1 else 's'} late", "after the end of the day"
    return [
        Wrong(when, f"{column}: {what}", F.concat(F.lit(f"{column}: '"), text, F.lit(f"' is {what}")), text)
        for when, what in ((late, too_late), (future, too_early))
    ]


def event_time(column: str, source: AnySource) -> Column:
    """The instant of a row's event: a date's begins at midnight in the source's time zone."""
    value = column_of(column)
    if source.timezone == "UTC":
        return value.cast("timestamp")
    local = F.to_utc_timestamp(value.cast("timestamp"), F.lit(source.timezone))
    return F.when(F.typeof(value) == "date", local).otherwise(value.cast("timestamp"))


def column_of(name: str) -> Column:
    """A column by its name, whatever characters it has."""
    return identifiers.column(name)
