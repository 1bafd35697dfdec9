"""join_asof: columns of a slowly changing table, as they were at the event's time."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from headrace.features.functions.timestamps import DAY_MICROS, spark_micros
from headrace.features.table_ops.base import ExternalTable, SparkTableContext, TableSchema, refuse
from headrace.features.table_ops.external import ReadsExternalTable, duplicates_spark, refuse_duplicates
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class JoinAsof(ReadsExternalTable):
    """Adds columns of the newest row of another table, of the same key, that was valid when the event happened.

        join_asof: {path: tables/prices, keys: [item_id], valid_from: since, add: {list_price: double}}

    A row with `valid_from` <= the event's time counts: one that is valid from exactly that instant does (`at: before`
    leaves it out). Never a later one. With `tolerance_days`, a row that old or older is too old: valid_from must be
    above time - tolerance. Null where no row counts; keys and valid_from that are null meet nothing. Several rows with
    one key and valid_from are refused, with their number.

    Several versions of a row must be kept by the table itself: a row that is overwritten has changed the past.

    Source: point-in-time joins of feature stores; pandas' merge_asof. NVTabular has none.
    """

    name: ClassVar[str] = "join_asof"

    valid_from: str
    valid_from_type: Literal["timestamp", "date"] = "timestamp"
    at: Literal["upto", "before"] = "upto"
    tolerance_days: float | None = Field(default=None, gt=0, le=36_500)

    def keys_of(self) -> tuple[str, ...]:
        return tuple(self.keys)

    def columns(self, schema: TableSchema) -> dict[str, ValueType]:
        schema.needs_time()
        schema.not_label(list(self.keys), "the key")
        refuse(self.valid_from in self.keys.values(), f"'{self.valid_from}' is a key; it cannot be the time as well")
        self.external(schema)
        return schema.adding(self._added())

    def external(self, schema: TableSchema) -> ExternalTable:
        return self._external(schema, {self.valid_from: ValueType(self.valid_from_type)})

    @property
    def _tolerance(self) -> int | None:
        return None if self.tolerance_days is None else round(self.tolerance_days * DAY_MICROS)

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        from pyspark.sql import functions as F

        from headrace.features.functions.spark_expressions import col
        from headrace.features.table_ops.spark_windows import EVENT_MICROS, VERSION, newest_version, passthrough_columns

        table = self.external(context.schema)
        needed = [*self.keys.values(), self.valid_from]
        other = context.read(table).dropna(subset=[f"`{c}`" for c in needed])
        refuse_duplicates(self.path, ", ".join(needed), *duplicates_spark(other, needed))
        versions = other.select(
            *[col(theirs).alias(ours) for ours, theirs in self.keys.items()],
            spark_micros(col(self.valid_from), table.columns[self.valid_from]).alias(EVENT_MICROS),
            *[col(n).alias(f"__e{i}") for i, n in enumerate(self.add)],
        ).withColumn("__from", F.col(EVENT_MICROS))
        value = ["__from", *[f"__e{i}" for i in range(len(self.add))]]
        rows = newest_version(frame, context, list(self.keys), versions, value, self.at == "upto")
        version = F.col(VERSION)
        if self._tolerance is not None:
            version = F.when(version["0"] > F.col(EVENT_MICROS) - F.lit(self._tolerance), version)
        return rows.select(
            *passthrough_columns(rows, frame.columns),
            *[version[str(i)].alias(n) for i, n in enumerate(self._added(), 1)],
        )
