"""lag: how a row differs from the key's event before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from headrace.features.columns import ValueType
from headrace.features.op import doubles
from headrace.features.tables.past_arrow import Past, nan_to_null, nulled, one, replaced, take
from headrace.features.tables.table_op import (
    DAY,
    HOUR,
    LINE,
    NUMBERS,
    Given,
    TableArrow,
    TableOp,
    TableSpark,
    refuse,
    scalar,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_UNITS = {"seconds": 1_000_000, "minutes": 60_000_000, "hours": HOUR, "days": DAY}


class Lag(TableOp):
    """The difference to the key's event before: its values and its time.

    That event is the newest one of the key at a strictly earlier instant, the last by source file and line where there
    are several. Adds, NAME being the keys' names with `_` between them, or `prefix`:

    - `NAME_COLUMN_difference` (double) for each column: this row's value minus that event's; null where one is missing;
    - `NAME_since` (double): the time between them in the unit `since`; null without an event before.

    The label is refused: its difference would contain the row's own.

    Input: keys string, int, bigint, boolean or date; columns of numbers. Source: NVTabular's DifferenceLag, shift 1;
    its shift of -1 looks into the future and has no counterpart here.
    """

    name: ClassVar[str] = "lag"

    keys: tuple[str, ...] = Field(min_length=1)
    values: tuple[str, ...] = ()
    since: Literal["seconds", "minutes", "hours", "days"] | None = None
    prefix: str | None = None

    @model_validator(mode="after")
    def _something(self) -> Lag:
        if not self.values and self.since is None:
            raise ValueError("give `values` (columns), `since` (a unit of time) or both")
        if len(set(self.values)) < len(self.values):
            raise ValueError("a column is given twice")
        return self

    def keys_of(self) -> tuple[str, ...]:
        return self.keys

    @property
    def _prefix(self) -> str:
        return self.prefix or "_".join(self.keys)

    def columns(self, given: Given) -> dict[str, ValueType]:
        given.needs_time()
        refuse(len(set(self.keys)) < len(self.keys), "a key is given twice")
        for key in self.keys:
            given.key(key)
        given.not_label(self.values, "the difference")
        for value in self.values:
            scalar(given, value, NUMBERS, "values")
        new = {f"{self._prefix}_{v}_difference": ValueType("double") for v in self.values}
        if self.since is not None:
            new[f"{self._prefix}_since"] = ValueType("double")
        return given.adding(new)

    def spark(self, frame: DataFrame, place: TableSpark) -> DataFrame:
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        from headrace.features.tables.past_spark import (
            T,
            by,
            first_of_instant,
            is_event,
            known,
            newest_before,
            real,
            through,
            with_time,
        )
        from headrace.features.tables.table_op import FILE

        types, columns = place.given.types, frame.columns
        x = {v: real(v, types[v]) for v in self.values}
        numbers = {v: (c.cast("int") if types[v].element == "boolean" else c).cast("double") for v, c in x.items()}
        fields = [F.col(T).alias("t"), *[numbers[v].alias(f"v{i}") for i, v in enumerate(self.values)]]
        # An array of one struct stands for an event, an empty one for none.
        event = F.when(is_event(self.keys), F.array(F.struct(*fields)))
        kinds = ["t: bigint", *[f"v{i}: double" for i in range(len(self.values))]]
        empty = F.array().cast(f"array<struct<{', '.join(kinds)}>>")
        rows = with_time(frame, place, self.keys)
        rows = rows.withColumn("__first", first_of_instant(Window.partitionBy(*by(self.keys)).orderBy(T, FILE, LINE)))
        rows = newest_before(rows, self.keys, "__before", event, empty)
        before = F.when(known(self.keys), F.get("__before", F.lit(0)))
        out = [
            (numbers[v] - before[f"v{i}"]).alias(f"{self._prefix}_{v}_difference") for i, v in enumerate(self.values)
        ]
        if self.since is not None:
            unit = F.lit(float(_UNITS[self.since]))
            out.append(((F.col(T) - before["t"]).cast("double") / unit).alias(f"{self._prefix}_since"))
        return rows.select(*through(rows, columns), *out)

    def arrow(self, table: pa.Table, place: TableArrow) -> pa.Table:
        types, time = place.given.types, place.given.needs_time()
        past = Past(table, self.keys, time, types[time])
        end = past.all.before()
        there = past.known & (end > past.all.start)
        last = np.zeros(table.num_rows, np.int64)
        last[there] = past.rows[end[there] - 1]
        out = table
        for v in self.values:
            x = doubles(nan_to_null(one(table, v)))
            before = take(x, last, there)
            both = x.is_valid().to_numpy(zero_copy_only=False) & before.is_valid().to_numpy(zero_copy_only=False)
            with np.errstate(all="ignore"):
                difference = x.to_numpy(zero_copy_only=False) - before.to_numpy(zero_copy_only=False)
            out = replaced(out, f"{self._prefix}_{v}_difference", nulled(difference, both, pa.float64()))
        if self.since is not None:
            passed = (past.time - past.time[last]).astype(np.float64) / float(_UNITS[self.since])
            out = replaced(out, f"{self._prefix}_since", nulled(passed, there, pa.float64()))
        return out
