"""Events of a named source beside the rows that ask for them: one frame, in which the rows are query rows.

All that is known of what was before a row (spark_windows) then holds of another source's events: strictly earlier
instants, delays, windows, nothing at or after the row's own time.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.features.functions.spark_expressions import col
from headrace.features.table_ops.base import FILE, LINE, QUERY, SourceRead, SparkTableContext
from headrace.features.table_ops.spark_windows import EVENT_MICROS, with_time

#: True of the rows, null of the events; what the rows' QUERY was.
_ASKS, _OWN = "__asks", "__own_query"


def with_source_events(
    frame: DataFrame,
    context: SparkTableContext,
    keys: Mapping[str, str],
    read: SourceRead,
    values: Mapping[str, Column],
) -> tuple[DataFrame, dict[str, Column]]:
    """The rows, and the source's events that have their keys and a time; and where `values` of these are found.

    Args:
        keys: column of the rows -> column of the source, of one type.
        values: expressions over the source's columns; null in the rows.
    """
    rows = with_time(frame, context, keys).withColumnRenamed(QUERY, _OWN)
    rows = rows.withColumns({QUERY: F.lit("asks"), _ASKS: F.lit(True)})
    events = context.source(read)
    there = F.col(EVENT_MICROS).isNotNull()
    for theirs in keys.values():
        there = there & col(theirs).isNotNull()
    found = {name: f"__x_{name}" for name in values}
    events = events.where(there).select(
        *[col(theirs).alias(ours) for ours, theirs in keys.items()],
        EVENT_MICROS,
        FILE,
        LINE,
        F.lit(None).cast("string").alias(QUERY),
        *[value.alias(found[name]) for name, value in values.items()],
    )
    return rows.unionByName(events, allowMissingColumns=True), {name: F.col(c) for name, c in found.items()}


def asking_rows(both: DataFrame) -> DataFrame:
    """The rows alone, as they were."""
    return both.where(F.col(_ASKS)).drop(QUERY, _ASKS).withColumnRenamed(_OWN, QUERY)
