"""history: the last values of a key's earlier events, as a list."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator

from headrace.features.columns import ValueType
from headrace.features.tables.past_arrow import Past, nan_to_null, one, replaced
from headrace.features.tables.predicate import Predicate
from headrace.features.tables.table_op import HOUR, LINE, Given, TableArrow, TableOp, TableSpark, refuse, scalar

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Types whose lists a table may have (headrace.schema.ColumnType).
_ELEMENTS = ("string", "int", "bigint", "float", "double")


class History(TableOp):
    """The last `length` values of columns over a key's events at strictly earlier instants, each as a list.

    Adds for each column `COLUMN_history` (or another `suffix`), a list of the column's type without nulls, as long
    as there were values, `length` at most: empty for a first event, a null key or a null time. Events whose value is
    null, or for which `where` is not true, are passed over: the list goes further back for others. At one instant
    events follow each other by source file and line. End the chain with `pad`; to share a vocabulary with the column
    itself, name it in both `categorify`.

    `where: clicked = 1` with the label needs `delay_hours`: a label is known only some time after its event.

    Input: keys string, int, bigint, boolean or date; columns string, int, bigint, float, double. Source: NVTabular's
    Groupby with `list` aggregation and ListSlice; the histories of Zhou et al., Deep Interest Network (2018).
    """

    name: ClassVar[str] = "history"

    keys: tuple[str, ...] = Field(min_length=1)
    #: The columns whose values are listed: each on its own.
    values: tuple[str, ...] = Field(min_length=1)
    length: int = Field(default=10, ge=1, le=256)
    #: Which end of the list is the newest event.
    newest: Literal["last", "first"] = "last"
    where: str | None = None
    delay_hours: float = Field(default=0, ge=0, le=24 * 3650)
    suffix: str = "history"

    @field_validator("values")
    @classmethod
    def _once(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(values)) < len(values):
            raise ValueError("a column is given twice")
        return values

    def keys_of(self) -> tuple[str, ...]:
        return self.keys

    @property
    def _delay(self) -> int:
        return round(self.delay_hours * HOUR)

    def columns(self, given: Given) -> dict[str, ValueType]:
        given.needs_time()
        refuse(len(set(self.keys)) < len(self.keys), "a key is given twice")
        for key in self.keys:
            given.key(key)
        if self.where is not None:
            Predicate(self.where, given.types)
        new = {}
        for value in self.values:
            type_ = scalar(given, value, _ELEMENTS, "values")
            new[f"{value}_{self.suffix}"] = ValueType(type_.element, is_list=True)
        return given.adding(new)

    def spark(self, frame: DataFrame, place: TableSpark) -> DataFrame:
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        from headrace.features.tables.past_spark import (
            AT,
            KIND,
            by,
            first_of_instant,
            is_event,
            known,
            newest_before,
            real,
            shifted,
            through,
            with_time,
        )
        from headrace.features.tables.table_op import FILE

        types, columns = place.given.types, frame.columns
        ok = F.lit(True) if self.where is None else Predicate(self.where, types).spark()
        rows = with_time(frame, place, self.keys)
        inputs = {f"__h{i}": F.when(is_event(self.keys) & ok, real(v, types[v])) for i, v in enumerate(self.values)}
        rows = shifted(rows.withColumns(inputs), columns, self.keys, [self._delay] if self._delay else [])
        enters = F.col(KIND) == (1 if self._delay else 0)
        # First of all by the keys alone: rows that are together by them are together by them and `__has`.
        by_time = Window.partitionBy(*by(self.keys)).orderBy(AT, FILE, LINE)
        rows = rows.withColumn("__first", first_of_instant(by_time, AT))
        found = []
        for i, value in enumerate(self.values):
            x = f"__h{i}"
            there = enters & F.col(x).isNotNull()
            # Among rows that have a value, the last ones are the last values.
            order = Window.partitionBy(*by(self.keys), "__has").orderBy(AT, FILE, LINE)
            rows = rows.withColumn("__has", there)
            # Not collect_list over a frame, which RAPIDS has switched off: its lists may grow with their square.
            lags = [F.lag(x, back).over(order) for back in range(self.length - 1, 0, -1)]
            rows = rows.withColumns({f"__b{n}": lag for n, lag in enumerate(lags)})
            listed = F.filter(F.array(*[f"__b{n}" for n in range(len(lags))], x), lambda v: v.isNotNull())
            rows = rows.withColumn("__list", F.when(F.col("__has"), listed)).drop(
                *[f"__b{n}" for n in range(len(lags))]
            )
            empty = F.array().cast(f"array<{types[value].element}>")
            rows = newest_before(rows, self.keys, f"__f{i}", F.col("__list"), empty, AT)
            past = F.when(known(self.keys), F.col(f"__f{i}")).otherwise(empty)
            past = F.reverse(past) if self.newest == "first" else past
            found.append(past.alias(f"{value}_{self.suffix}"))
        return rows.where(F.col(KIND) == 0).select(*through(rows, columns), *found)

    def arrow(self, table: pa.Table, place: TableArrow) -> pa.Table:
        types, time = place.given.types, place.given.needs_time()
        past = Past(table, self.keys, time, types[time])
        ok = np.ones(table.num_rows, bool)
        if self.where is not None:
            ok = Predicate(self.where, types).arrow(table).to_numpy(zero_copy_only=False)
        out = table
        for value in self.values:
            x = nan_to_null(one(table, value))
            events = past.of(ok & x.is_valid().to_numpy(zero_copy_only=False))
            end = np.where(past.known, events.before(self._delay), 0)
            start = np.maximum(np.where(past.known, events.start, 0), end - self.length)
            lengths = end - start
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
            place_ = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
            forward, backward = np.repeat(start, lengths) + place_, np.repeat(end, lengths) - 1 - place_
            at = forward if self.newest == "last" else backward
            elements = x.take(pa.array(events.rows[at]))
            lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), elements)
            out = replaced(out, f"{value}_{self.suffix}", lists)
        return out
