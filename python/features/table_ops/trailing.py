"""Sums over a key's earlier events: trailing windows and target_encoding_past.

Sums come out the same whatever the order: they are integers, in two halves. An integer is summed as it is. A real
number is taken on a grid of 2**-20 (about a millionth), at most 2**42 (4.4e12) from zero; what is no finite number is
no value. Each is cut into q = high * 2**32 + low. Both halves of a thousand million values sum within 64 bits, so
adding and taking away again is exact, which a sum of doubles is not.

Not learn.exact_sums, whose digits lie where the data's least and greatest number put them: that takes a look at all
events before the first window, and a window sum for each digit, where one grid takes two and knows no data.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from headrace.features.functions.timestamps import DAY_MICROS, spark_micros
from headrace.features.table_ops.base import NUMBERS, QUERY, SparkTableContext, TableSchema, refuse, scalar
from headrace.features.table_ops.earlier_events import DelayedEventsOp, FilteredEventsOp
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_GRID = float(2**20)
_MOST = float(2**42)
_LOW = 2**32 - 1


def is_real(input_type: ValueType) -> bool:
    """Return whether a type is summed on the grid."""
    return input_type.element in ("float", "double", "decimal")


def to_grid(x: Column, input_type: ValueType) -> Column:
    """Return a number as a bigint on its grid; null where it is no finite number."""
    from pyspark.sql import functions as F

    if not is_real(input_type):
        return x.cast("int").cast("bigint") if input_type.element == "boolean" else x.cast("bigint")
    x = x.cast("double")
    infinity = F.lit(float("inf"))
    # NaN is above infinity in Spark's order.
    finite = F.when((x < infinity) & (x > -infinity), x)
    clipped = F.when(finite > _MOST, _MOST).when(finite < -_MOST, -_MOST).otherwise(finite)
    return F.rint(clipped * F.lit(_GRID)).cast("bigint")


def grid_halves(q: Column) -> tuple[Column, Column]:
    """(high, low) of a bigint."""
    from pyspark.sql import functions as F

    return F.shiftright(q, 32), q.bitwiseAND(F.lit(_LOW).cast("bigint"))


def from_halves(high: Column, low: Column, input_type: ValueType) -> Column:
    """Return the sum as a double, of the sums of the halves."""
    from pyspark.sql import functions as F

    total = high.cast("double") * F.lit(float(2**32)) + low.cast("double")
    return total * F.lit(1 / _GRID) if is_real(input_type) else total


Stat = Literal["count", "sum", "mean", "rate"]


class Trailing(FilteredEventsOp):
    """Aggregates over a key's events of the last days before each row, the row itself and its instant left out.

    A window of w days at time t holds the events at u with t - w <= u < t (with `delay_hours` d:
    t - d - w <= u < t - d). Adds, for each window (`7d`, or `all`: since the first event read):

    - `<NAME>_count_7d` (bigint): events, with `where` those for which it is true;
    - `<NAME>_<COLUMN>_sum_7d` (double): of the values that are finite; 0 without any;
    - `<NAME>_<COLUMN>_mean_7d` (double): the same by their number; null without any;
    - `<NAME>_<COLUMN>_rate_7d` (double): the share of 1 among the values; null without any.

    NAME is the keys' names (and that of `from`) with `_` between them, or `prefix`. Sums are exact on a grid (see
    table_ops.trailing) and do not depend on partitioning. A null key or time has no past: counts and sums are 0,
    the others null.

    With `from: purchases` the events are those of that source, with its columns in `values` and `where`, and the row is
    none of them: "what this user has bought in the seven days before" is

        trailing: {from: purchases, keys: [user_id], windows: [7], values: [amount], stats: [count, sum]}

    A label is known only some time after its event, and the row's own is never used: give `delay_hours`.

    Input: keys string, int, bigint, boolean or date; columns of numbers. Source: time-window aggregates of
    point-in-time feature stores; NVTabular has JoinGroupby, which sees the future.
    """

    name: ClassVar[str] = "trailing"

    #: Days, or `all`.
    windows: tuple[float | Literal["all"], ...] = Field(min_length=1)
    #: Numbers to aggregate; `count` needs none.
    values: tuple[str, ...] = ()
    stats: tuple[Stat, ...] = ("count",)
    prefix: str | None = None

    @field_validator("windows")
    @classmethod
    def _windows(cls, windows: tuple[float | Literal["all"], ...]) -> tuple[float | Literal["all"], ...]:
        for w in windows:
            if w != "all" and not 0 < w <= 36_500:
                raise ValueError(f"a window is a number of days above 0, or all; not {w}")
        if len({str(w) for w in windows}) < len(windows):
            raise ValueError("a window is given twice")
        return windows

    @model_validator(mode="after")
    def _needs(self) -> Trailing:
        if not self.stats:
            raise ValueError("give stats: count, sum, mean, rate")
        if {"sum", "mean", "rate"} & set(self.stats) and not self.values:
            raise ValueError(f"stats {', '.join(self.stats)} need `values`: the columns to aggregate")
        if self.values and set(self.stats) == {"count"}:
            raise ValueError("`values` are given, but no stat that uses them: sum, mean, rate")
        return self

    def reach(self) -> int | None:
        bounded = [w for w in self._micros if w is not None]
        if self.from_ is not None and len(bounded) < len(self._micros):
            return None
        return self.delay + max(bounded, default=0)

    @property
    def _micros(self) -> list[int | None]:
        return [None if w == "all" else round(w * DAY_MICROS) for w in self.windows]

    def _name(self, stat: Stat, value: str | None, window: int) -> str:
        w = self.windows[window]
        days = "all" if w == "all" else f"{w:g}d"
        return "_".join([self.prefix or self.key_name, *([value] if value else []), stat, days])

    def event_columns(self, schema: TableSchema) -> tuple[str, ...]:
        return (*self.values, *self.columns_of_where(schema))

    def columns(self, schema: TableSchema) -> dict[str, ValueType]:
        self.check_keys(schema)
        events = self.events_schema(schema)
        for value in self.values:
            scalar(events, value, NUMBERS, "values")
        self.check_where(schema)
        new = {}
        for i in range(len(self.windows)):
            if "count" in self.stats:
                new[self._name("count", None, i)] = ValueType("bigint")
            for value in self.values:
                new |= {self._name(s, value, i): ValueType("double") for s in self.stats if s != "count"}
        return schema.adding(new)

    def _atoms(self) -> dict[str, tuple[str, str]]:
        """Return the columns to sum: name -> (kind, column)."""
        out = {"count": ("count", "")} if "count" in self.stats else {}
        for i, value in enumerate(self.values):
            if {"mean", "rate"} & set(self.stats):
                out[f"n{i}"] = ("values", value)
            if {"sum", "mean"} & set(self.stats):
                out |= {f"h{i}": ("high", value), f"l{i}": ("low", value)}
            if "rate" in self.stats:
                out[f"o{i}"] = ("ones", value)
        return out

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        from pyspark.sql import functions as F

        from headrace.features.functions.spark_expressions import col
        from headrace.features.table_ops.spark_windows import Sums, passthrough_columns, window_sums

        types = self.events_schema(context.schema).types
        ok = self.spark_condition(context)
        values: dict[str, Column] = {}
        for name, (kind, column) in self._atoms().items():
            x = F.lit(1).cast("bigint") if kind == "count" else to_grid(col(column), types[column])
            if kind == "values":
                x = F.when(x.isNotNull(), F.lit(1)).otherwise(F.lit(0)).cast("bigint")
            elif kind == "ones":
                x = F.when(x == (1 << 20 if is_real(types[column]) else 1), F.lit(1))
                x = x.otherwise(F.lit(0)).cast("bigint")
            elif kind in ("high", "low"):
                x = grid_halves(x)[kind == "low"]
            values[name] = F.when(ok, x)
        both, values = self.with_events(frame, context, values)
        sums = Sums(values, self._micros, self.delay)
        rows = self.rows_without_source(window_sums(both, context, self.keys, sums))
        out = []
        for w in range(len(self.windows)):
            if "count" in self.stats:
                out.append(F.col(sums.column("count", w)).alias(self._name("count", None, w)))
            for i, value in enumerate(self.values):

                def column_at(atom: str, i: int = i, w: int = w) -> Column:
                    return F.col(sums.column(f"{atom}{i}", w))

                for stat in self.stats:
                    if stat == "count":
                        continue
                    x = (
                        column_at("o").cast("double")
                        if stat == "rate"
                        else from_halves(column_at("h"), column_at("l"), types[value])
                    )
                    if stat != "sum":
                        x = F.when(column_at("n") > 0, x / column_at("n").cast("double"))
                    out.append(x.alias(self._name(stat, value, w)))
        return rows.select(*passthrough_columns(rows, frame.columns), *out)


class TargetEncodingPast(DelayedEventsOp):
    """The smoothed mean of the label over the key's events whose labels were known before the row.

    The label of an event at u is known from u + delay on; at time t the events with u + delay < t count, so neither the
    row's own label nor that of its instant does. With n of them and the sum y of their labels:

        (y + smoothing * prior) / (n + smoothing)

    (Micci-Barreca, 2001, with the m-estimate). The prior is a number, or by default the mean label of all events whose
    labels were known before the row's day (UTC) began. Where there is none yet, the encoding is y / n; null where n
    is 0 too. Time-ordered like CatBoost's ordered target statistics (Prokhorenkova et al., 2018), but by real time.

    Adds `<NAME>_target` (double), NAME being the keys' names (and that of `from`) with `_` between them, or `prefix`.

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

    def event_columns(self, schema: TableSchema) -> tuple[str, ...]:
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
        q = to_grid(col(target), type_)
        high, low = grid_halves(q)
        n = F.when(q.isNotNull(), F.lit(1)).otherwise(F.lit(0)).cast("bigint")
        if self.prior is None:
            frame = context.materialize(frame)
        both, values = self.with_events(frame, context, {"n": n, "h": high, "l": low})
        sums = Sums(values, [None], self.delay)
        rows = self.rows_without_source(window_sums(both, context, self.keys, sums))
        if self.prior is None:
            rows = self._with_prior(rows, frame, context)
            prior = F.col("__prior")
        else:
            prior = F.lit(float(self.prior))
        y = from_halves(F.col(sums.column("h", 0)), F.col(sums.column("l", 0)), type_)
        count = F.col(sums.column("n", 0)).cast("double")
        m = F.lit(float(self.smoothing))
        smooth = F.when(count + m > 0, (y + m * prior) / (count + m))
        alone = F.when(count > 0, y / count)
        return rows.select(
            *passthrough_columns(rows, columns), F.when(prior.isNull(), alone).otherwise(smooth).alias(self._name)
        )

    def _with_prior(self, rows: DataFrame, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        """Return the rows with `__prior`: a table of days, each with the mean of what was known before."""
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        from headrace.features.functions.spark_expressions import col
        from headrace.features.table_ops.spark_windows import EVENT_MICROS, running

        schema, read = context.schema, self.source()
        time, target = schema.needs_time(), self.target or schema.label
        type_ = self.events_schema(schema).types[target]
        t = spark_micros(col(time), schema.types[time])
        q = to_grid(col(target), type_)

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
        high, low = grid_halves(F.col("r.q"))
        days = both.groupBy(F.col("r.day").alias("__day")).agg(
            F.count("r.q").alias("n"),
            F.coalesce(F.sum(high), F.lit(0)).alias("h"),
            F.coalesce(F.sum(low), F.lit(0)).alias("l"),
            F.min(F.lit(0)).alias("__all"),
        )
        # One row a day: this window is small.
        order = running(Window.partitionBy("__all").orderBy("__day"))
        sums_before = {c: F.sum(c).over(order) - F.col(c) for c in ("n", "h", "l")}
        days = days.select("__day", *[x.alias(f"__{c}") for c, x in sums_before.items()])
        y = from_halves(F.col("__h"), F.col("__l"), type_)
        days = days.select("__day", F.when(F.col("__n") > 0, y / F.col("__n").cast("double")).alias("__prior"))
        rows = rows.withColumn("__day", day(t))
        return rows.join(F.broadcast(days), "__day", "left")
