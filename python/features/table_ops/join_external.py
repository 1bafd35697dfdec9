"""join_external: columns of another table, by key."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import model_validator

from headrace.features.table_ops.arrow_windows import I64, codes_of, one, replaced, take
from headrace.features.table_ops.base import External, Given, TableArrow, TableSpark, refuse
from headrace.features.table_ops.external import ReadsExternal, duplicates_spark, refuse_duplicates
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_ORDERED = ("string", "int", "bigint", "boolean", "timestamp", "date")


class JoinExternal(ReadsExternal):
    """Adds columns of another table to the rows that have its key; null to the others (a left join).

        join_external: {path: tables/items, keys: [item_id], add: {brand: string, stock: bigint}}

    A key with several rows is refused, with their number, unless `on_duplicate: first` takes the first of them by
    `order`: columns among `add`, ascending, or descending with a `-` before the name, nulls as the smallest. Null keys
    meet nothing. The table is read as it is when the day is run (a Delta table at the newest version, which the run's
    manifest names); for values that change over time use join_asof. Source: NVTabular's JoinExternal.
    """

    name: ClassVar[str] = "join_external"
    rowwise: ClassVar[bool] = True

    on_duplicate: Literal["refuse", "first"] = "refuse"
    order: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _ordered(self) -> JoinExternal:
        if (self.on_duplicate == "first") != bool(self.order):
            raise ValueError("`order` is needed with `on_duplicate: first`, and only there")
        return self

    def columns(self, given: Given) -> dict[str, ValueType]:
        given.not_label(list(self.keys), "the key")
        types = self.external(given).columns
        for name in self.order:
            plain = name.removeprefix("-")
            refuse(plain not in types, f"order: '{plain}' is not among the columns that are taken")
            refuse(types[plain].is_list or types[plain].element not in _ORDERED, f"order: '{plain}' is {types[plain]}")
        return given.adding(self._added())

    def external(self, given: Given) -> External:
        return self._external(given, {})

    def spark(self, frame: DataFrame, place: TableSpark) -> DataFrame:
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        from headrace.features.functions.spark_expressions import col

        theirs = list(self.keys.values())
        other = place.read(self.external(place.given)).dropna(subset=[f"`{k}`" for k in theirs])
        if self.on_duplicate == "first":
            order: list[Column] = [
                F.desc_nulls_last(f"`{n[1:]}`") if n.startswith("-") else F.asc_nulls_first(f"`{n}`")
                for n in self.order
            ]
            # rank, not row_number: equal firsts are refused, not chosen among.
            other = other.withColumn(
                "__rank", F.rank().over(Window.partitionBy(*[col(k) for k in theirs]).orderBy(*order))
            )
            other = other.where(F.col("__rank") == 1).drop("__rank")
        refuse_duplicates(self.path, ", ".join(theirs), *duplicates_spark(other, theirs))
        side = other.select(
            *[col(k).alias(f"__k{i}") for i, k in enumerate(theirs)],
            *[col(n).alias(f"__e{i}") for i, n in enumerate(self.add)],
        )
        on = [col(ours) == F.col(f"__k{i}") for i, ours in enumerate(self.keys)]
        return frame.join(side, on, "left").select(
            *[col(c) for c in frame.columns], *[F.col(f"__e{i}").alias(n) for i, n in enumerate(self._added())]
        )

    def arrow(self, table: pa.Table, place: TableArrow) -> pa.Table:
        theirs, other = list(self.keys.values()), place.read(self.external(place.given))
        n, m = table.num_rows, other.num_rows
        both = [_together(one(table, a), one(other, b)) for a, b in self.keys.items()]
        codes = codes_of(both, n + m)
        ours, its = codes[:n], codes[n:]
        rows = np.flatnonzero(its >= 0)
        if self.on_duplicate == "first":
            ranks = [_rank(one(other, name.removeprefix("-")), name.startswith("-")) for name in self.order]
            rows = rows[np.lexsort((*(r[rows] for r in reversed(ranks)), its[rows]))]
            first = np.concatenate([np.ones(min(1, len(rows)), bool), its[rows][1:] != its[rows][:-1]])
            leader = rows[np.maximum.accumulate(np.where(first, np.arange(len(rows)), 0))] if len(rows) else rows
            rows = rows[np.all([r[rows] == r[leader] for r in ranks], axis=0)] if len(rows) else rows
        _, counts = np.unique(its[rows], return_counts=True)
        refuse_duplicates(self.path, ", ".join(theirs), int((counts > 1).sum()), int(counts[counts > 1].sum()))
        where = np.full(int(max(codes.max(initial=-1), 0)) + 1, -1, np.int64)
        where[its[rows]] = rows
        found = np.where(ours >= 0, where[np.maximum(ours, 0)], -1)
        out = table
        for added, name in zip(self._added(), self.add, strict=True):
            values_ = one(other, name)
            if not m:
                out = replaced(out, added, pa.nulls(n, values_.type))
            else:
                out = replaced(out, added, take(values_, found, found >= 0))
        return out


def _together(a: pa.Array, b: pa.Array) -> pa.Array:
    return pa.concat_arrays([a, b.cast(a.type)])


def _rank(x: pa.Array, descending: bool) -> I64:
    """Numbers that sort like the values, nulls as the smallest."""
    encoded = x.dictionary_encode()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    out = np.where(codes < 0, -1, rank[np.maximum(codes, 0)]) if len(order) else np.full(len(x), -1, np.int64)
    return -out if descending else out
