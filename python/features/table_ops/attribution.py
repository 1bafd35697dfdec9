"""attribution: a label from another source's events within some time after the row's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from headrace.features.functions.timestamps import micros_of_duration
from headrace.features.table_ops.base import LABEL_KNOWN, SourceRead, SparkTableContext, TableOp, TableSchema, refuse
from headrace.features.table_ops.earlier_events import check_source_keys, keys_as_mapping
from headrace.features.table_ops.predicate import Predicate
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: Microseconds, written `30 minutes`, `7 days`.
Duration = Annotated[int, BeforeValidator(micros_of_duration, json_schema_input_type=str | int)]
#: After all instants.
_NEVER = 1 << 62


class Attribution(TableOp):
    """The label: 1 where a named source has an event of the row's key within some time after it, else 0.

        attribution: {from: clicks, keys: [impression_id], within: 30 minutes, add: clicked}
        attribution: {from: purchases, keys: [user_id, item_id], within: 7 days, credit: last, add: bought}

    An event of the source at u counts for a row at t if t <= u < t + within: at the row's own instant it is after the
    row, as operators that look at the past see none of it (u < t). `where` is a condition on the source's events.
    `credit` says for which rows one such event counts where it is within the time of several of its key:

    - `every`: for all of them;
    - `last` (last touch): for the newest that is not after it;
    - `first` (first touch): for the oldest.

    Rows of one key and instant are alike: all of them get the label or none. Null keys and times have label 0.

    A label is known when its time is over, and `wait` longer for events that land late: a dataset of ds ends that long
    before the end of ds, so that no row is called a 0 too early. Operators that look at earlier labels must wait as
    long (`delay_hours`). Put it before them.

    Input: keys string, int, bigint, boolean or date. Adds one int column, which `features.label` names.
    Source: conversion windows and last-touch attribution of ad platforms.
    """

    name: ClassVar[str] = "attribution"
    first_because: ClassVar[str] = "the label comes first"
    #: Rows that are scored are none of the events, and have no label.
    rowwise: ClassVar[bool] = True

    #: The named source.
    from_: str = Field(alias="from")
    #: Names of the key in both, or column -> column of the source.
    keys: Mapping[str, str] = Field(min_length=1)
    within: Duration = Field(gt=0)
    #: The column that is added.
    add: str
    where: str | None = None
    credit: Literal["every", "last", "first"] = "every"
    wait: Duration = Field(default=0, ge=0)

    @field_validator("keys", mode="before", json_schema_input_type=tuple[str, ...] | Mapping[str, str])
    @classmethod
    def _as_mapping(cls, value: Any) -> Any:
        return keys_as_mapping(value)

    def columns(self, schema: TableSchema) -> dict[str, ValueType]:
        schema.needs_time()
        refuse(self.add != schema.label, f"adds '{self.add}', which is not the label: set features.label to it")
        source = check_source_keys(schema, self.from_, self.keys)
        if self.where is not None:
            Predicate(self.where, source.types)
        return schema.adding({self.add: ValueType("int")})

    def source(self) -> SourceRead:
        # Nothing before the first row counts for any.
        return SourceRead(self.from_, "events", 0)

    def lookback(self) -> int:
        return self.within if self.credit == "first" else 0

    def label_source(self) -> str | None:
        return self.from_

    def label_wait(self) -> int:
        return self.within + self.wait

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        from pyspark.sql import functions as F

        from headrace.features.table_ops.spark_windows import (
            EVENT_MICROS,
            has_key_and_time,
            is_event,
            passthrough_columns,
            rows_without_source,
            with_source_events,
            with_time,
        )

        known = self._known(frame, context)
        rows = with_time(frame, context, self.keys)
        t = F.col(EVENT_MICROS)
        begin, end = t, t + F.lit(self.within)
        if self.credit != "every":
            rows = _neighbour(rows.withColumn("__is_event", is_event(self.keys)), self.keys, self.credit == "last")
            near = F.col("__near")
            if self.credit == "last":
                end = F.least(end, F.coalesce(near, F.lit(_NEVER)))
            else:
                begin = F.greatest(begin, F.coalesce(near, F.lit(-_NEVER)) + F.lit(self.within))
        rows = rows.withColumns({"__begin": begin, "__end": end})
        chosen = self._chosen(context)
        both, values = with_source_events(rows, context, self.keys, self.source(), {"u": F.when(chosen, F.lit(1))})
        both = _next_event(both, self.keys, values["u"])
        hit = F.coalesce(F.col("__next") < F.col("__end"), F.lit(False)) & has_key_and_time(self.keys)
        rows = rows_without_source(both)
        return rows.select(
            *passthrough_columns(rows, frame.columns),
            F.when(hit, 1).otherwise(0).alias(self.add),
            F.coalesce(t + F.lit(self.label_wait()) < known, F.lit(False)).alias(LABEL_KNOWN),
        )

    def _chosen(self, context: SparkTableContext) -> Column:
        from pyspark.sql import functions as F

        if self.where is None:
            return F.lit(True)
        return Predicate(self.where, context.schema.of_source(self.from_).types).spark()

    def _known(self, frame: DataFrame, context: SparkTableContext) -> Column:
        """Return the instant up to which all has been seen: that of the run, or of the newest row of a snapshot."""
        from pyspark.sql import functions as F

        from headrace.features.functions.spark_expressions import col
        from headrace.features.functions.timestamps import spark_micros
        from headrace.features.table_ops.spark_windows import EVENT_MICROS

        if context.seen_until is not None:
            return F.lit(context.seen_until)
        time = context.schema.needs_time()
        micros = spark_micros(col(time), context.schema.types[time])
        newest = [
            frame.agg(F.max(micros)).collect()[0][0],
            context.source(self.source()).agg(F.max(EVENT_MICROS)).collect()[0][0],
        ]
        return F.lit(max((n for n in newest if n is not None), default=0)).cast("bigint")


def _neighbour(rows: DataFrame, keys: Mapping[str, str], later: bool) -> DataFrame:
    """Return the rows with `__near`: the next instant at which the key has an event, or the one before; null without
    one.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    from headrace.features.table_ops.spark_windows import EVENT_MICROS, first_of_instant, partition_columns, running

    rows = rows.withColumn("__along", -F.col(EVENT_MICROS) if later else F.col(EVENT_MICROS))
    order = Window.partitionBy(*partition_columns(keys)).orderBy("__along")
    rows = rows.withColumns(
        {
            "__seen": F.last(F.when(F.col("__is_event"), F.col(EVENT_MICROS)), ignorenulls=True).over(running(order)),
            "__first": first_of_instant(order, "__along"),
        }
    )
    # At the first row of an instant, what the row before it had seen was at another instant. -1: nothing.
    none = F.lit(-_NEVER)
    rows = rows.withColumn("__at_first", F.when(F.col("__first"), F.coalesce(F.lag("__seen", 1).over(order), none)))
    instant = Window.partitionBy(*partition_columns(keys), F.col("__along"))
    near = F.max("__at_first").over(instant)
    return rows.withColumn("__near", F.when(near != none, near))


def _next_event(both: DataFrame, keys: Mapping[str, str], is_chosen: Column) -> DataFrame:
    """Return rows and a source's events with `__next`: for a row, the instant of the first chosen event from `__begin`
    on.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    from headrace.features.table_ops.spark_windows import EVENT_MICROS, partition_columns, running

    # Backwards in time; at one instant the events before the rows that ask.
    begin = F.coalesce(F.col("__begin"), F.col(EVENT_MICROS))
    both = both.withColumns({"__back": -begin, "__asking": F.col("__begin").isNotNull()})
    order = Window.partitionBy(*partition_columns(keys)).orderBy("__back", "__asking")
    event = F.when(is_chosen == 1, F.col(EVENT_MICROS))
    return both.withColumn("__next", F.last(event, ignorenulls=True).over(running(order)))
