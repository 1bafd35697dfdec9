"""history: the last values of a key's earlier events, as a list."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from headrace.features.table_ops.base import FILE, LINE, SparkTableContext, TableSchema, scalar
from headrace.features.table_ops.earlier_events import FilteredEventsOp
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, WindowSpec

#: Spark takes this many values by one expression each, and more by lists of so many: generated code has bounds.
_CHUNK = 32
#: Types whose lists a table may have (headrace.schema.ColumnType).
_ELEMENTS = ("string", "int", "bigint", "float", "double")


class History(FilteredEventsOp):
    """The last `length` values of columns over a key's events at strictly earlier instants, each as a list.

    Adds for each column `COLUMN_history` (or another `suffix`), a list of the column's type without nulls, as long
    as there were values, `length` at most: empty for a first event, a null key or a null time. Events whose value is
    null, or for which `where` is not true, are passed over: the list goes further back for others. At one instant
    events follow each other by source file and line. End the chain with `pad`; to share a vocabulary with the column
    itself, name it in both `categorify`.

    With `from: purchases` the events are those of that source, with its columns in `values` and `where`; the lists are
    called `purchases_COLUMN_history`.

    `where: clicked = 1` with the label needs `delay_hours`: a label is known only some time after its event.

    Input: keys string, int, bigint, boolean or date; columns string, int, bigint, float, double. Source: NVTabular's
    Groupby with `list` aggregation and ListSlice; the histories of Zhou et al., Deep Interest Network (2018).
    """

    name: ClassVar[str] = "history"

    #: The columns whose values are listed: each on its own.
    values: tuple[str, ...] = Field(min_length=1)
    length: int = Field(default=10, ge=1, le=4_096)
    #: Which end of the list is the newest event.
    newest: Literal["last", "first"] = "last"
    suffix: str = "history"

    @field_validator("values")
    @classmethod
    def _once(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(values)) < len(values):
            raise ValueError("a column is given twice")
        return values

    def looked_at(self, schema: TableSchema) -> tuple[str, ...]:
        return (*self.values, *self.columns_of_where(schema))

    def columns(self, schema: TableSchema) -> dict[str, ValueType]:
        self.check_keys(schema)
        self.check_where(schema)
        events, new = self.events_schema(schema), {}
        for value in self.values:
            type_ = scalar(events, value, _ELEMENTS, "values")
            new[self._name(value)] = ValueType(type_.element, is_list=True)
        return schema.adding(new)

    def _name(self, value: str) -> str:
        return "_".join([*([self.from_] if self.from_ is not None else []), value, self.suffix])

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        from headrace.features.functions.spark_expressions import input_column
        from headrace.features.table_ops.spark_windows import (
            COPY,
            SHIFTED_MICROS,
            first_of_instant,
            has_key_and_time,
            is_event,
            newest_before,
            partition_columns,
            passthrough_columns,
            shifted,
            with_time,
        )

        types, given, keys = self.events_schema(context.schema).types, frame.columns, self.keys
        ok = self.spark_chosen(context)
        values = {f"h{i}": F.when(ok, input_column(v, types[v])) for i, v in enumerate(self.values)}
        both, values = self.with_events(frame, context, values)
        columns = both.columns
        rows = with_time(both, context, keys)
        inputs = {f"__{name}": F.when(is_event(keys), value) for name, value in values.items()}
        rows = shifted(rows.withColumns(inputs), columns, keys, [self.delay] if self.delay else [])
        enters = F.col(COPY) == (1 if self.delay else 0)
        # First of all by the keys alone: rows that are together by them are together by them and `__has`.
        by_time = Window.partitionBy(*partition_columns(keys)).orderBy(SHIFTED_MICROS, FILE, LINE)
        rows = rows.withColumn("__first", first_of_instant(by_time, SHIFTED_MICROS))
        found = []
        for i, value in enumerate(self.values):
            x = f"__h{i}"
            there = enters & F.col(x).isNotNull()
            # Among rows that have a value, the last ones are the last values.
            order = Window.partitionBy(*partition_columns(keys), "__has").orderBy(SHIFTED_MICROS, FILE, LINE)
            rows = rows.withColumn("__has", there)
            empty = F.array().cast(f"array<{types[value].element}>")
            rows = _with_last(rows, x, self.length, order, empty)
            rows = rows.withColumn("__list", F.when(F.col("__has"), F.col("__list")))
            rows = newest_before(rows, keys, f"__f{i}", F.col("__list"), empty, SHIFTED_MICROS)
            past = F.when(has_key_and_time(keys), F.col(f"__f{i}")).otherwise(empty)
            past = F.reverse(past) if self.newest == "first" else past
            found.append(past.alias(self._name(value)))
        rows = self.asking_rows(rows.where(F.col(COPY) == 0))
        return rows.select(*passthrough_columns(rows, given), *found)


def _with_last(rows: DataFrame, column: str, length: int, order: WindowSpec, empty: Column) -> DataFrame:
    """The rows with `__list`: the last `length` values of a column up to each row, in order, nulls left out.

    Not collect_list over a frame, which RAPIDS has switched off: its lists may grow with their square. A long list is
    the newest values and, put before them, the lists that earlier rows have of theirs.
    """
    from pyspark.sql import functions as F

    chunk = min(length, _CHUNK)
    whole, rest = divmod(length, chunk)
    back = {f"__b{n}": F.lag(column, n).over(order) for n in range(1, chunk)}
    rows = rows.withColumns(back)

    def last(count: int) -> Column:
        values = [*(f"__b{n}" for n in range(count - 1, 0, -1)), column]
        return F.filter(F.array(*values), lambda v: v.isNotNull())

    rows = rows.withColumns({"__list": last(chunk), **({"__rest": last(rest)} if rest else {})})
    parts = [F.lag("__list", n * chunk).over(order) for n in range(whole - 1, 0, -1)]
    if rest:
        parts.insert(0, F.lag("__rest", whole * chunk).over(order))
    if parts:
        rows = rows.withColumns({f"__p{n}": F.coalesce(part, empty) for n, part in enumerate(parts)})
        rows = rows.withColumn("__list", F.concat(*[F.col(f"__p{n}") for n in range(len(parts))], F.col("__list")))
    return rows.drop(*back, "__rest", *(f"__p{n}" for n in range(len(parts))))
