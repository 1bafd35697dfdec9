"""Operators over a key's earlier events in their order: lag, history, sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from headrace.features.functions.timestamps import DAY_MICROS, HOUR_MICROS
from headrace.features.table_ops.base import FILE, LINE, NUMBERS, SparkTableContext, TableSchema, scalar
from headrace.features.table_ops.earlier_events import EarlierEventsOp, FilteredEventsOp
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, WindowSpec

_UNITS = {"seconds": 1_000_000, "minutes": 60_000_000, "hours": HOUR_MICROS, "days": DAY_MICROS}


class Lag(EarlierEventsOp):
    """The difference to the key's event before, or the `shift`-th before: its values and its time.

    Those are the key's events at strictly earlier instants, at one instant in the order of source file and line; the
    newest is the first before, shift 1. Adds, NAME being the keys' names with `_` between them, or `prefix`:

    - `<NAME>_<COLUMN>_difference` (double) for each column: this row's value minus that event's; null where one is
      missing;
    - `<NAME>_since` (double): the time between them in the unit `since`; null without so many events before.

    With a shift above 1 the names end in it: `<NAME>_<COLUMN>_difference_2`, `<NAME>_since_2`.

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

    def _name(self, part: str) -> str:
        return "_".join([self.prefix or "_".join(self.keys), part, *([str(self.shift)] if self.shift > 1 else [])])

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
        row_before = F.when(has_key_and_time(self.keys), F.get("__before", F.lit(0)))
        out = [
            (numbers[v] - row_before[f"v{i}"]).alias(self._name(f"{v}_difference")) for i, v in enumerate(self.values)
        ]
        if self.since is not None:
            unit = F.lit(float(_UNITS[self.since]))
            out.append(((F.col(EVENT_MICROS) - row_before["t"]).cast("double") / unit).alias(self._name("since")))
        return rows.select(*passthrough_columns(rows, columns), *out)


#: Spark takes this many values by one expression each, and more by lists of so many: generated code has bounds.
_CHUNK = 32
#: Types whose lists a table may have (headrace.config.schema.ColumnType).
_ELEMENTS = ("string", "int", "bigint", "float", "double")


class History(FilteredEventsOp):
    """The last `length` values of columns over a key's events at strictly earlier instants, each as a list.

    Adds for each column `<COLUMN>_history` (or another `suffix`), a list of the column's type without nulls, as long
    as there were values, `length` at most: empty for a first event, a null key or a null time. Events whose value is
    null, or for which `where` is not true, are passed over: the list goes further back for others. At one instant
    events follow each other by source file and line. End the chain with `pad`; to share a vocabulary with the column
    itself, name it in both `categorify`.

    With `from: purchases` the events are those of that source, with its columns in `values` and `where`; the lists are
    called `purchases_<COLUMN>_history`.

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

    def event_columns(self, schema: TableSchema) -> tuple[str, ...]:
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

        types, input_columns, keys = self.events_schema(context.schema).types, frame.columns, self.keys
        ok = self.spark_condition(context)
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
        histories = []
        for i, value in enumerate(self.values):
            x = f"__h{i}"
            has_value = enters & F.col(x).isNotNull()
            # Among rows that have a value, the last ones are the last values.
            order = Window.partitionBy(*partition_columns(keys), "__has").orderBy(SHIFTED_MICROS, FILE, LINE)
            rows = rows.withColumn("__has", has_value)
            empty = F.array().cast(f"array<{types[value].element}>")
            rows = _with_last(rows, x, self.length, order, empty)
            rows = rows.withColumn("__list", F.when(F.col("__has"), F.col("__list")))
            rows = newest_before(rows, keys, f"__f{i}", F.col("__list"), empty, SHIFTED_MICROS)
            past = F.when(has_key_and_time(keys), F.col(f"__f{i}")).otherwise(empty)
            past = F.reverse(past) if self.newest == "first" else past
            histories.append(past.alias(self._name(value)))
        rows = self.rows_without_source(rows.where(F.col(COPY) == 0))
        return rows.select(*passthrough_columns(rows, input_columns), *histories)


def _with_last(rows: DataFrame, column: str, length: int, order: WindowSpec, empty: Column) -> DataFrame:
    """Return the rows with `__list`: the last `length` values of a column up to each row, in order, nulls left out.

    Not collect_list over a frame, which RAPIDS has switched off: its lists may grow with their square. A long list is
    the newest values and, put before them, the lists that earlier rows have of theirs.
    """
    from pyspark.sql import functions as F

    chunk = min(length, _CHUNK)
    chunks, rest = divmod(length, chunk)
    back = {f"__b{n}": F.lag(column, n).over(order) for n in range(1, chunk)}
    rows = rows.withColumns(back)

    def last(count: int) -> Column:
        values = [*(f"__b{n}" for n in range(count - 1, 0, -1)), column]
        return F.filter(F.array(*values), lambda v: v.isNotNull())

    rows = rows.withColumns({"__list": last(chunk), **({"__rest": last(rest)} if rest else {})})
    parts = [F.lag("__list", n * chunk).over(order) for n in range(chunks - 1, 0, -1)]
    if rest:
        parts.insert(0, F.lag("__rest", chunks * chunk).over(order))
    if parts:
        rows = rows.withColumns({f"__p{n}": F.coalesce(part, empty) for n, part in enumerate(parts)})
        rows = rows.withColumn("__list", F.concat(*[F.col(f"__p{n}") for n in range(len(parts))], F.col("__list")))
    return rows.drop(*back, "__rest", *(f"__p{n}" for n in range(len(parts))))


_MINUTE = 60_000_000
_BETWEEN = "\x1f"


class Sessions(EarlierEventsOp):
    """Cuts the events of a key into sessions: a new one begins where the event before is more than a gap away.

    Adds, with NAME = `session` or `prefix`:

    - `<NAME>_id` (bigint): xxhash64 of the key and the session's first instant. It is known at the first event and
      never changes; null where a key or the time is null;
    - `<NAME>_position` (bigint): how many events of the session were before this row; 0 for the first and without a
      key;
    - `<NAME>_age` (double): seconds since the session's first event; 0 for the first, null without a key.

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
        has_key = has_key_and_time(self.keys)
        text = [part for k in self.keys for part in (col(k).cast("string"), F.lit(_BETWEEN))]
        p, passed = self.prefix, F.col("__c") - F.col("__base")
        return rows.select(
            *passthrough_columns(rows, columns),
            F.when(has_key, F.xxhash64(F.concat(*text, start.cast("string")))).alias(f"{p}_id"),
            F.when(has_key & ~F.col("__new"), passed).otherwise(zero).alias(f"{p}_position"),
            F.when(has_key, (F.col(EVENT_MICROS) - start).cast("double") / F.lit(1e6)).alias(f"{p}_age"),
        )
