"""target_encoding_past: the mean label of a key's earlier events, in order of time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, field_validator

from headrace.features.functions.timestamps import DAY_MICROS, spark_micros
from headrace.features.table_ops import fixed_point
from headrace.features.table_ops.base import NUMBERS, QUERY, SparkTableContext, TableSchema, refuse, scalar
from headrace.features.table_ops.earlier_events import DelayedEventsOp
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


class TargetEncodingPast(DelayedEventsOp):
    """The smoothed mean of the label over the key's events whose labels were known before the row.

    The label of an event at u is known from u + delay on; at time t the events with u + delay < t count, so neither the
    row's own label nor that of its instant does. With n of them and the sum y of their labels:

        (y + smoothing * prior) / (n + smoothing)

    (Micci-Barreca, 2001, with the m-estimate). The prior is a number, or by default the mean label of all events whose
    labels were known before the row's day (UTC) began. Where there is none yet, the encoding is y / n; null where n
    is 0 too. Time-ordered like CatBoost's ordered target statistics (Prokhorenkova et al., 2018), but by real time.

    Adds `NAME_target` (double), NAME being the keys' names (and that of `from`) with `_` between them, or `prefix`.

    With `from: purchases` the events are those of that source, and `target` is a number of theirs.

    `delay_hours` has no default: how late labels arrive is a fact about the log. With 0, an event's label is known
    before the next instant.

    Input: keys string, int, bigint, boolean or date, jointly. Source: NVTabular's TargetEncoding, with random folds.
    """

    name: ClassVar[str] = "target_encoding_past"

    #: Hours after which an event's label is known: no default.
    delay_hours: float = Field(ge=0, le=24 * 3650)
    smoothing: float = Field(default=20, ge=0, allow_inf_nan=False)
    prior: float | None = None
    #: Another number than the label.
    target: str | None = None
    prefix: str | None = None

    @field_validator("prior")
    @classmethod
    def _finite(cls, prior: float | None) -> float | None:
        if prior is not None and not math.isfinite(prior):
            raise ValueError("must be finite")
        return prior

    @property
    def _name(self) -> str:
        return f"{self.prefix or self.key_name}_target"

    def looked_at(self, schema: TableSchema) -> tuple[str, ...]:
        return (self.target or schema.label,)

    def columns(self, schema: TableSchema) -> dict[str, ValueType]:
        self.check_keys(schema)
        schema.not_label(list(self.keys), "the key")
        events = self.events_schema(schema)
        refuse(self.from_ is not None and self.target is None, f"give `target`: the column of source '{self.from_}'")
        scalar(events, self.target or schema.label, NUMBERS, "target")
        return schema.adding({self._name: ValueType("double")})

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        from pyspark.sql import functions as F

        from headrace.features.functions.spark_expressions import col
        from headrace.features.table_ops.spark_windows import Sums, passthrough_columns, window_sums

        schema, columns = context.schema, frame.columns
        target = self.target or schema.label
        type_ = self.events_schema(schema).types[target]
        q = fixed_point.whole(col(target), type_)
        high, low = fixed_point.halves(q)
        n = F.when(q.isNotNull(), F.lit(1)).otherwise(F.lit(0)).cast("bigint")
        if self.prior is None:
            frame = context.materialize(frame)
        both, values = self.with_events(frame, context, {"n": n, "h": high, "l": low})
        sums = Sums(values, [None], self.delay)
        rows = self.asking_rows(window_sums(both, context, self.keys, sums))
        if self.prior is None:
            rows = self._with_prior(rows, frame, context)
            prior = F.col("__prior")
        else:
            prior = F.lit(float(self.prior))
        y = fixed_point.joined(F.col(sums.column("h", 0)), F.col(sums.column("l", 0)), type_)
        count = F.col(sums.column("n", 0)).cast("double")
        m = F.lit(float(self.smoothing))
        smooth = F.when(count + m > 0, (y + m * prior) / (count + m))
        alone = F.when(count > 0, y / count)
        return rows.select(
            *passthrough_columns(rows, columns), F.when(prior.isNull(), alone).otherwise(smooth).alias(self._name)
        )

    def _with_prior(self, rows: DataFrame, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        """The rows with `__prior`: a table of days, each with the mean of what was known before."""
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        from headrace.features.functions.spark_expressions import col
        from headrace.features.table_ops.spark_windows import EVENT_MICROS, running

        schema, read = context.schema, self.source()
        time, target = schema.needs_time(), self.target or schema.label
        type_ = self.events_schema(schema).types[target]
        t = spark_micros(col(time), schema.types[time])
        q = fixed_point.whole(col(target), type_)

        def day(x: Column) -> Column:
            return ((x - F.pmod(x, F.lit(DAY_MICROS))) / F.lit(DAY_MICROS)).cast("int")

        none = F.lit(None).cast("bigint")
        # A row asks for its day, and adds to the day on which its label is known.
        asks = F.struct(day(t).alias("day"), none.alias("q"))

        def adds(u: Column, number: Column) -> Column:
            return F.struct(day(u + F.lit(self.delay)).alias("day"), number.alias("q"))

        rows_of = frame.where(t.isNotNull())
        if read is None:
            of_event = adds(t, F.when(F.col(QUERY).isNull(), q))
            both = rows_of.select(F.explode(F.array(asks, of_event)).alias("r"))
        else:
            known = context.source(read).where(F.col(EVENT_MICROS).isNotNull())
            both = rows_of.select(asks.alias("r")).unionByName(known.select(adds(F.col(EVENT_MICROS), q).alias("r")))
        high, low = fixed_point.halves(F.col("r.q"))
        days = both.groupBy(F.col("r.day").alias("__day")).agg(
            F.count("r.q").alias("n"),
            F.coalesce(F.sum(high), F.lit(0)).alias("h"),
            F.coalesce(F.sum(low), F.lit(0)).alias("l"),
            F.min(F.lit(0)).alias("__all"),
        )
        # One row a day: this window is small.
        order = running(Window.partitionBy("__all").orderBy("__day"))
        before = {c: F.sum(c).over(order) - F.col(c) for c in ("n", "h", "l")}
        days = days.select("__day", *[x.alias(f"__{c}") for c, x in before.items()])
        y = fixed_point.joined(F.col("__h"), F.col("__l"), type_)
        days = days.select("__day", F.when(F.col("__n") > 0, y / F.col("__n").cast("double")).alias("__prior"))
        rows = rows.withColumn("__day", day(t))
        return rows.join(F.broadcast(days), "__day", "left")
