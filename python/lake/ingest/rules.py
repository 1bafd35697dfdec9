"""What the declaration of a table asks of a row whose values have their types: ranges, times, values that must be."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

from headrace.config import AnySource, Table
from headrace.lake.sources.frame import quoted
from headrace.schema import TableColumn


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
    return F.col(quoted([name])[0])
