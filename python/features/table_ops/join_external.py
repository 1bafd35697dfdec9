"""join_external: columns of another table, by key."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from headrace.features.table_ops.base import ExternalTable, SourceRead, SparkTableContext, TableSchema, refuse
from headrace.features.table_ops.external import ReadsOtherTable, duplicates_spark, refuse_duplicates
from headrace.features.types import ValueType
from headrace.identifiers import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_ORDERED = ("string", "int", "bigint", "boolean", "timestamp", "date")


class JoinExternal(ReadsOtherTable):
    """Adds columns of another table to the rows that have its key; null to the others (a left join).

        join_external: {path: tables/items, keys: [item_id], add: {brand: string, stock: bigint}}

    A key with several rows is refused, with their number, unless `on_duplicate: first` takes the first of them by
    `order`: columns among `add`, ascending, or descending with a `-` before the name, nulls as the smallest. Null keys
    meet nothing. The table is read as it is when the day is run (a Delta table at the newest version, which the run's
    manifest names); for values that change over time use join_asof. `from: users` in place of `path` takes a named
    source as it is on that day: all its landing days up to it, or its newest snapshot.

    Source: NVTabular's JoinExternal.
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

    def columns(self, schema: TableSchema) -> dict[str, ValueType]:
        schema.not_label(list(self.keys), "the key")
        types = self.wanted(schema, {})
        for name in self.order:
            plain = name.removeprefix("-")
            refuse(plain not in types, f"order: '{plain}' is not among the columns that are taken")
            refuse(types[plain].is_list or types[plain].element not in _ORDERED, f"order: '{plain}' is {types[plain]}")
        return schema.adding(self.added(schema))

    def external(self, schema: TableSchema) -> ExternalTable | None:
        return self.external_table(schema, {})

    def source(self) -> SourceRead | None:
        return None if self.from_ is None else SourceRead(self.from_, "table")

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        from headrace.features.functions.spark_expressions import col

        theirs = list(self.keys.values())
        other = self.read(context, {}).dropna(subset=[quoted(k) for k in theirs])
        if self.on_duplicate == "first":
            order: list[Column] = [
                F.desc_nulls_last(quoted(n[1:])) if n.startswith("-") else F.asc_nulls_first(quoted(n))
                for n in self.order
            ]
            # rank, not row_number: equal firsts are refused, not chosen among.
            other = other.withColumn(
                "__rank", F.rank().over(Window.partitionBy(*[col(k) for k in theirs]).orderBy(*order))
            )
            other = other.where(F.col("__rank") == 1).drop("__rank")
        refuse_duplicates(self.what, ", ".join(theirs), *duplicates_spark(other, theirs))
        side = other.select(
            *[col(k).alias(f"__k{i}") for i, k in enumerate(theirs)],
            *[col(n).alias(f"__e{i}") for i, n in enumerate(self.add)],
        )
        on = [col(ours) == F.col(f"__k{i}") for i, ours in enumerate(self.keys)]
        added = [F.col(f"__e{i}").alias(n) for i, n in enumerate(self.added(context.schema))]
        return frame.join(side, on, "left").select(*[col(c) for c in frame.columns], *added)
