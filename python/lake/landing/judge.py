"""Judgement of rows by Spark: values of the declared types, and the reasons why a row is no row of the table.

headrace.lake.values says which text is readable as which type.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace import schema
from headrace.config import AnySource, Table
from headrace.lake.faults import (
    BAD,
    FORGOTTEN,
    GOOD,
    SHOWN_CHARACTERS,
    SKIPPED,
    a_type,
    kind_empty,
    kind_missing,
    kind_nul,
    kind_outside,
    kind_unreadable,
    most_bytes,
    span_outside,
    untimely_faults,
)
from headrace.lake.forgotten import ForgottenValues
from headrace.lake.landing.frame import mask_names
from headrace.lake.values import from_text, list_from_texts
from headrace.schema import TableColumn, quoted_names
from headrace.schema import TableColumn as Declared

_NUL = "\0"


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


def typed(
    frame: DataFrame, source: AnySource, table: Table, ids: Collection[str], forgotten: ForgottenValues | None = None
) -> DataFrame:
    """Return a reader's frame with its columns typed and the state of each row.

    Args:
        frame: a reader's.
        source: the spec's.
        table: the declaration.
        ids: declared text columns whose values are ids.
        forgotten: values whose rows must not come back, of declared columns.

    Returns:
        `_file`, `_ds`, `_source_file`, `_line`, `_copy`; `_state` int (GOOD, BAD, SKIPPED, FORGOTTEN); the declared
        columns; `_present<k>`, `_extra`, `_halves`; and, null where the row is not bad, `_raw` string, `_reason`
        string, `_kinds` array<struct<kind string, value string>>.
    """
    columns = table.columns
    values = [_cast(frame, i, c, source).alias(c.name) for i, c in enumerate(columns)]
    frame = frame.select("*", *values)
    wrong = _wrong(frame, source, table, ids)
    faults = F.col("_faults") if "_faults" in frame.columns else F.array().cast("array<string>")
    bad = F.col("_broken").isNotNull() | (F.size(faults) > 0)
    bad = reduce(lambda a, b: a | b, (w.when for w in wrong), bad)
    state = F.when(F.col("_skip"), SKIPPED)
    if forgotten is not None:
        state = state.when(_forgotten(forgotten, table), FORGOTTEN)
    state = state.when(F.coalesce(bad, F.lit(True)), BAD).otherwise(GOOD)
    frame = frame.select("*", state.alias("_state"))
    is_bad = F.col("_state") == BAD
    kinds = F.array_compact(
        F.array(*(F.when(w.when, F.struct(F.lit(w.kind).alias("kind"), w.value.alias("value"))) for w in wrong))
    )
    line = F.substring("_text", 1, SHOWN_CHARACTERS)
    kinds = F.concat(kinds, F.transform(faults, lambda f: F.struct(f.alias("kind"), line.alias("value"))))
    line_fault = F.array(F.struct(F.col("_broken").alias("kind"), line.alias("value")))
    reason = F.concat_ws("; ", *(F.when(w.when, w.reason) for w in wrong), faults)
    broken = F.col("_broken").isNotNull()
    return frame.select(
        "_file",
        "_ds",
        "_source_file",
        "_line",
        "_copy",
        "_state",
        *quoted_names([c.name for c in columns]),
        *mask_names(len(columns)),
        "_extra",
        F.col("_halves") if "_halves" in frame.columns else F.lit(None).cast("array<int>").alias("_halves"),
        F.when(is_bad, F.make_valid_utf8("_text")).alias("_raw"),
        F.when(is_bad, F.when(broken, F.col("_broken")).otherwise(reason)).alias("_reason"),
        F.when(is_bad, F.when(broken, line_fault).otherwise(kinds)).alias("_kinds"),
    )


def _forgotten(forgotten: ForgottenValues, table: Table) -> Column:
    """Return whether a row has a forgotten value: as it is typed, as it is written, or in a line that is no row."""
    places = {c.name: i for i, c in enumerate(table.columns)}
    is_forgotten = F.lit(False)
    for name in forgotten.columns:
        is_forgotten = (
            is_forgotten | forgotten.spark(name, column_of(name)) | forgotten.spark(name, F.col(f"_t{places[name]}"))
        )
        is_forgotten = is_forgotten | (F.col("_broken").isNotNull() & forgotten.spark_line(name, F.col("_text")))
    return is_forgotten


def _wrong(frame: DataFrame, source: AnySource, table: Table, ids: Collection[str]) -> list[Wrong]:
    faults = []
    columns = set(frame.columns)
    for i, c in enumerate(table.columns):
        text = F.col(f"_t{i}")
        example = F.substring(text, 1, SHOWN_CHARACTERS)
        name = F.lit(c.name)
        unread = _unread(i, c, f"_v{i}" in columns)
        if unread is not None:
            reason = F.concat(name, F.lit(": '"), example, F.lit(f"' is not {a_type(c.type)}"))
            faults.append(Wrong(unread, kind_unreadable(c), reason, example))
        if c.required:
            faults.append(missing(c, text.isNull(), example))
    return [*faults, *unfit_texts(table, ids), *out_of_range(table), *untimely(source, table)]


def _cast(frame: DataFrame, i: int, column: Declared, source: AnySource) -> Column:
    ready = F.col(f"_v{i}" if f"_v{i}" in frame.columns else f"_t{i}")
    if column.type.startswith("array"):
        return list_from_texts(ready, column.type, source)
    return from_text(ready, column.type, source, source.epoch_unit(column.name))


def _unread(i: int, column: Declared, has_value: bool) -> Column | None:
    """Return the condition that a text did not become a value; None where any text is one."""
    text, value = F.col(f"_t{i}"), column_of(column.name)
    if not column.type.startswith("array"):
        return None if column.type == "string" and not has_value else text.isNotNull() & value.isNull()
    items = F.col(f"_v{i}")
    unread = text.isNotNull() & value.isNull()
    if column.type == "array<string>":
        return unread
    lost = F.size(F.filter(items, F.isnull)) != F.size(F.filter(value, F.isnull))
    return unread | F.coalesce(lost, F.lit(False))
