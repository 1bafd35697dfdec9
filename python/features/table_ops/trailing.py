"""trailing: what a key's events were over the last days, as of each event's time."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from headrace.features.functions.timestamps import DAY_MICROS
from headrace.features.table_ops import fixed_point
from headrace.features.table_ops.base import NUMBERS, SparkTableContext, TableSchema, scalar
from headrace.features.table_ops.earlier_events import FilteredEventsOp
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Stat = Literal["count", "sum", "mean", "rate"]


class Trailing(FilteredEventsOp):
    """Aggregates over a key's events of the last days before each row, the row itself and its instant left out.

    A window of w days at time t holds the events at u with t - w <= u < t (with `delay_hours` d:
    t - d - w <= u < t - d). Adds, for each window (`7d`, or `all`: since the first event read):

    - `NAME_count_7d` (bigint): events, with `where` those for which it is true;
    - `NAME_COLUMN_sum_7d` (double): of the values that are finite; 0 without any;
    - `NAME_COLUMN_mean_7d` (double): the same by their number; null without any;
    - `NAME_COLUMN_rate_7d` (double): the share of 1 among the values; null without any.

    NAME is the keys' names (and that of `from`) with `_` between them, or `prefix`. Sums are exact on a grid (see
    table_ops.fixed_point) and do not depend on partitioning. A null key or time has no past: counts and sums are 0,
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

    def looked_at(self, schema: TableSchema) -> tuple[str, ...]:
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
        """What is summed: name -> (kind, column)."""
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
        ok = self.spark_chosen(context)
        values: dict[str, Column] = {}
        for name, (kind, column) in self._atoms().items():
            x = F.lit(1).cast("bigint") if kind == "count" else fixed_point.whole(col(column), types[column])
            if kind == "values":
                x = F.when(x.isNotNull(), F.lit(1)).otherwise(F.lit(0)).cast("bigint")
            elif kind == "ones":
                x = F.when(x == (1 << 20 if fixed_point.is_real(types[column]) else 1), F.lit(1))
                x = x.otherwise(F.lit(0)).cast("bigint")
            elif kind in ("high", "low"):
                x = fixed_point.halves(x)[kind == "low"]
            values[name] = F.when(ok, x)
        both, values = self.with_events(frame, context, values)
        sums = Sums(values, self._micros, self.delay)
        rows = self.asking_rows(window_sums(both, context, self.keys, sums))
        out = []
        for w in range(len(self.windows)):
            if "count" in self.stats:
                out.append(F.col(sums.column("count", w)).alias(self._name("count", None, w)))
            for i, value in enumerate(self.values):

                def at(atom: str, i: int = i, w: int = w) -> Column:
                    return F.col(sums.column(f"{atom}{i}", w))

                for stat in self.stats:
                    if stat == "count":
                        continue
                    x = at("o").cast("double") if stat == "rate" else fixed_point.joined(at("h"), at("l"), types[value])
                    if stat != "sum":
                        x = F.when(at("n") > 0, x / at("n").cast("double"))
                    out.append(x.alias(self._name(stat, value, w)))
        return rows.select(*passthrough_columns(rows, frame.columns), *out)
