"""Small tables with a declared schema, for plans that are looked at and not for what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa

from headrace.features.types import ValueType, declared
from headrace.schema import TableColumn

ROWS = 240


def made_rows(
    columns: Sequence[TableColumn], label: str, first: str, days: int, time: str | None = None, split: str | None = None
) -> pa.Table:
    """`ROWS` rows: every 11th value is missing where it may be, labels are 0 and 1, times go over `days` days.

    Args:
        first: the first day; times begin there and end `days` days later.
        time: the column of the event's time, never missing.
        split: a column that holds `train`, `valid` and `rank`.
    """
    start = datetime.fromisoformat(first).replace(tzinfo=UTC)
    times = [start + timedelta(days=days) * i / ROWS for i in range(ROWS)]
    out = {}
    for place, column in enumerate(columns):
        type_ = declared(column)
        values = [None if (i + place) % 11 == 0 else _value(type_, i, place, times) for i in range(ROWS)]
        if column.name == label:
            values = [type_.arrow.to_pandas_dtype()(i % 2) for i in range(ROWS)]
        elif column.name == time or column.required:
            values = [_value(type_, i, place if column.name != time else 0, times) for i in range(ROWS)]
        if column.name == split:
            values = [("train", "train", "valid", "rank")[i % 4] for i in range(ROWS)]
        out[column.name] = pa.array(values, type_.arrow)
    out["_source_file"] = pa.array([f"rows/part-{i % 3}" for i in range(ROWS)])
    out["_source_line"] = pa.array([i // 3 for i in range(ROWS)], pa.int64())
    return pa.table(out)


def _value(type_: ValueType, i: int, place: int, times: list[datetime]) -> Any:
    if type_.is_list:
        element = ValueType(type_.element)
        return [_value(element, i + j, place, times) for j in range((i + place) % 4)]
    number = (7 * i + place) % 23
    if type_.element == "string":
        return f"v{number}"
    if type_.element == "boolean":
        return number % 2 == 0
    if type_.element in ("float", "double"):
        return number / 2
    if type_.element == "timestamp":
        return times[i % ROWS] - timedelta(hours=place)
    if type_.element == "date":
        moment: date = times[i % ROWS].date()
        return moment
    return number
