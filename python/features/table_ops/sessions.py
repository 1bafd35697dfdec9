"""sessions: which visit of a key an event belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from headrace.features.table_ops.base import SparkTableContext, TableSchema
from headrace.features.table_ops.earlier_events import EarlierEventsOp
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MINUTE = 60_000_000
_BETWEEN = "\x1f"


class Sessions(EarlierEventsOp):
    """Cuts the events of a key into sessions: a new one begins where the event before is more than a gap away.

    Adds, with NAME = `session` or `prefix`:

    - `NAME_id` (bigint): xxhash64 of the key and the session's first instant. It is known at the first event and never
      changes; null where a key or the time is null;
    - `NAME_position` (bigint): how many events of the session were before this row; 0 for the first and without a key;
    - `NAME_age` (double): seconds since the session's first event; 0 for the first, null without a key.

    What was before in the session is asked for by the operators that follow, with `keys: [NAME_id]`: `history` for the
    list, `trailing` with `windows: [all]` for counts and means. NVTabular's Groupby aggregates whole sessions, the
    events after a row among them; these do not.

    Input: keys string, int or bigint. Source: NVTabular's Groupby; session-parallel batches of Hidasi et al. (2016).
    """

    name: ClassVar[str] = "sessions"

    gap_minutes: float = Field(default=30, gt=0, le=60 * 24 * 366)
    prefix: str = "session"

    @property
    def _gap(self) -> int:
        return round(self.gap_minutes * _MINUTE)

    def columns(self, schema: TableSchema) -> dict[str, ValueType]:
        self.check_keys(schema, ("string", "int", "bigint"))
        p = self.prefix
        return schema.adding(
            {f"{p}_id": ValueType("bigint"), f"{p}_position": ValueType("bigint"), f"{p}_age": ValueType("double")}
        )

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        from headrace.features.functions.spark_expressions import col
        from headrace.features.table_ops.spark_windows import (
            EVENT_MICROS,
            has_key_and_time,
            is_event,
            partition_columns,
            passthrough_columns,
            running,
            sums_before,
            with_time,
        )

        columns, zero = frame.columns, F.lit(0).cast("bigint")
        rows = with_time(frame, context, self.keys)
        order = Window.partitionBy(*partition_columns(self.keys)).orderBy(EVENT_MICROS)
        instant = Window.partitionBy(*partition_columns(self.keys), F.col(EVENT_MICROS))
        # The time of the event before: known at the first row of an instant, then passed to all rows of it.
        rows = rows.withColumn("__newest", F.max(F.when(is_event(self.keys), F.col(EVENT_MICROS))).over(running(order)))
        rows = rows.withColumn("__earlier", F.lag("__newest", 1).over(order))
        rows = rows.withColumn(
            "__p", F.max(F.when(F.col("__earlier") < F.col(EVENT_MICROS), F.col("__earlier"))).over(instant)
        )
        rows = sums_before(
            rows, self.keys, {"__c": F.when(is_event(self.keys), F.lit(1).cast("bigint")).otherwise(zero)}
        )
        new = F.col("__p").isNull() | (F.col(EVENT_MICROS) - F.col("__p") > self._gap)
        begins = new & is_event(self.keys)
        # Times and counts grow along a key, so the newest session's are the largest.
        rows = rows.withColumn("__new", new).withColumns(
            {
                "__start": F.max(F.when(begins, F.col(EVENT_MICROS))).over(running(order)),
                "__base": F.max(F.when(begins, F.col("__c"))).over(running(order)),
            }
        )
        start = F.when(F.col("__new"), F.col(EVENT_MICROS)).otherwise(F.col("__start"))
        there = has_key_and_time(self.keys)
        text = [part for k in self.keys for part in (col(k).cast("string"), F.lit(_BETWEEN))]
        p, passed = self.prefix, F.col("__c") - F.col("__base")
        return rows.select(
            *passthrough_columns(rows, columns),
            F.when(there, F.xxhash64(F.concat(*text, start.cast("string")))).alias(f"{p}_id"),
            F.when(there & ~F.col("__new"), passed).otherwise(zero).alias(f"{p}_position"),
            F.when(there, (F.col(EVENT_MICROS) - start).cast("double") / F.lit(1e6)).alias(f"{p}_age"),
        )
