"""lag: how a row differs from an earlier event of its key."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from headrace.features.functions.timestamps import DAY_MICROS, HOUR_MICROS
from headrace.features.table_ops.base import FILE, LINE, NUMBERS, SparkTableContext, TableSchema, scalar
from headrace.features.table_ops.earlier_events import EarlierEventsOp
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_UNITS = {"seconds": 1_000_000, "minutes": 60_000_000, "hours": HOUR_MICROS, "days": DAY_MICROS}


class Lag(EarlierEventsOp):
    """The difference to the key's event before, or the `shift`-th before: its values and its time.

    Those are the key's events at strictly earlier instants, at one instant in the order of source file and line; the
    newest is the first before, shift 1. Adds, NAME being the keys' names with `_` between them, or `prefix`:

    - `NAME_COLUMN_difference` (double) for each column: this row's value minus that event's; null where one is missing;
    - `NAME_since` (double): the time between them in the unit `since`; null without so many events before.

    With a shift above 1 the names end in it: `NAME_COLUMN_difference_2`, `NAME_since_2`.

    The label is refused: its difference would contain the row's own.

    Input: keys string, int, bigint, boolean or date; columns of numbers. Source: NVTabular's DifferenceLag with
    a positive shift; its negative ones look into the future and have no counterpart here.
    """

    name: ClassVar[str] = "lag"

    values: tuple[str, ...] = ()
    since: Literal["seconds", "minutes", "hours", "days"] | None = None
    #: How many events back.
    shift: int = Field(default=1, ge=1, le=1_000)
    prefix: str | None = None

    @model_validator(mode="after")
    def _something(self) -> Lag:
        if not self.values and self.since is None:
            raise ValueError("give `values` (columns), `since` (a unit of time) or both")
        if len(set(self.values)) < len(self.values):
            raise ValueError("a column is given twice")
        return self

    def _name(self, what: str) -> str:
        return "_".join([self.prefix or "_".join(self.keys), what, *([str(self.shift)] if self.shift > 1 else [])])

    def columns(self, schema: TableSchema) -> dict[str, ValueType]:
        self.check_keys(schema)
        schema.not_label(self.values, "the difference")
        for value in self.values:
            scalar(schema, value, NUMBERS, "values")
        new = {self._name(f"{v}_difference"): ValueType("double") for v in self.values}
        if self.since is not None:
            new[self._name("since")] = ValueType("double")
        return schema.adding(new)

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        from headrace.features.functions.spark_expressions import input_column
        from headrace.features.table_ops.spark_windows import (
            EVENT_MICROS,
            first_of_instant,
            has_key_and_time,
            is_event,
            newest_before,
            partition_columns,
            passthrough_columns,
            with_time,
        )

        types, columns = context.schema.types, frame.columns
        x = {v: input_column(v, types[v]) for v in self.values}
        numbers = {v: (c.cast("int") if types[v].element == "boolean" else c).cast("double") for v, c in x.items()}
        fields = [F.col(EVENT_MICROS).alias("t"), *[numbers[v].alias(f"v{i}") for i, v in enumerate(self.values)]]
        # An array of one struct stands for an event, an empty one for none.
        event = F.array(F.struct(*fields))
        kinds = ["t: bigint", *[f"v{i}: double" for i in range(len(self.values))]]
        empty = F.array().cast(f"array<struct<{', '.join(kinds)}>>")
        rows = with_time(frame, context, self.keys)
        rows = rows.withColumn(
            "__first",
            first_of_instant(Window.partitionBy(*partition_columns(self.keys)).orderBy(EVENT_MICROS, FILE, LINE)),
        )
        if self.shift > 1:
            # What later rows get of an event is the one so many events before it, among events alone.
            rows = rows.withColumn("__event", is_event(self.keys))
            events = Window.partitionBy(*partition_columns(self.keys), "__event").orderBy(EVENT_MICROS, FILE, LINE)
            event = F.coalesce(F.lag(event, self.shift - 1).over(events), empty)
        rows = newest_before(rows, self.keys, "__before", F.when(is_event(self.keys), event), empty)
        before = F.when(has_key_and_time(self.keys), F.get("__before", F.lit(0)))
        out = [(numbers[v] - before[f"v{i}"]).alias(self._name(f"{v}_difference")) for i, v in enumerate(self.values)]
        if self.since is not None:
            unit = F.lit(float(_UNITS[self.since]))
            out.append(((F.col(EVENT_MICROS) - before["t"]).cast("double") / unit).alias(self._name("since")))
        return rows.select(*passthrough_columns(rows, columns), *out)
