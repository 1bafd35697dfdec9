"""join_asof: columns of a slowly changing table, as they were at the event's time."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from headrace.features.functions.timestamps import DAY_MICROS, spark_micros
from headrace.features.table_ops.base import (
    FILE,
    LINE,
    ExternalTable,
    SourceRead,
    SparkTableContext,
    TableSchema,
    refuse,
    scalar,
)
from headrace.features.table_ops.external import ReadsOtherTable, duplicates_spark, refuse_duplicates
from headrace.features.types import ValueType
from headrace.identifiers import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class JoinAsof(ReadsOtherTable):
    """Adds columns of the newest row of another table, of the same key, that was valid when the event happened.

        join_asof: {path: tables/prices, keys: [item_id], valid_from: since, add: {list_price: double}}

        join_asof: {from: users, keys: [user_id], add: [country, plan]}

    With `from: users` the other table is a named source. Its rows are valid from the time of its events on, or from
    `valid_from`, another of its columns; a source without a time (a dump each day) from the end of its landing day on,
    and one whose time is a date from the end of that day. Of several rows with one key and instant the last by file and
    line counts.

    A row with `valid_from` <= the event's time counts: one that is valid from exactly that instant does (`at: before`
    leaves it out). Never a later one. With `tolerance_days`, a row that old or older is too old: valid_from must be
    above time - tolerance. Null where no row counts; keys and valid_from that are null meet nothing. Several rows with
    one key and valid_from are refused, with their number, where the table is no source.

    Several versions of a row must be kept by the table itself: a row that is overwritten has changed the past.

    Source: point-in-time joins of feature stores; pandas' merge_asof. NVTabular has none.
    """

    name: ClassVar[str] = "join_asof"

    #: The column that says since when a row is valid. Of a source by default the time of its events.
    valid_from: str | None = None
    valid_from_type: Literal["timestamp", "date"] = "timestamp"
    at: Literal["upto", "before"] = "upto"
    tolerance_days: float | None = Field(default=None, gt=0, le=36_500)

    @model_validator(mode="after")
    def _says_since_when(self) -> JoinAsof:
        if self.from_ is None and self.valid_from is None:
            raise ValueError("give `valid_from`: the column that says since when a row is valid")
        return self

    def keys_of(self) -> tuple[str, ...]:
        return tuple(self.keys)

    def columns(self, schema: TableSchema) -> dict[str, ValueType]:
        schema.needs_time()
        schema.not_label(list(self.keys), "the key")
        refuse(self.valid_from in self.keys.values(), f"'{self.valid_from}' is a key; it cannot be the time as well")
        self.wanted(schema, self._since(schema))
        return schema.adding(self.added(schema))

    def external(self, schema: TableSchema) -> ExternalTable | None:
        return self.external_table(schema, self._since(schema))

    def source(self) -> SourceRead | None:
        if self.from_ is None:
            return None
        return SourceRead(self.from_, "versions", self._tolerance if self.valid_from is None else None)

    def _since(self, schema: TableSchema) -> dict[str, ValueType]:
        """The column `valid_from` and its type; none where it is the time of a source's events."""
        if self.valid_from is None:
            return {}
        if self.from_ is None:
            return {self.valid_from: ValueType(self.valid_from_type)}
        return {
            self.valid_from: scalar(schema.of_source(self.from_), self.valid_from, ("timestamp", "date"), "valid_from")
        }

    @property
    def _tolerance(self) -> int | None:
        return None if self.tolerance_days is None else round(self.tolerance_days * DAY_MICROS)

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        from pyspark.sql import functions as F

        from headrace.features.functions.spark_expressions import col
        from headrace.features.table_ops.spark_windows import EVENT_MICROS, VERSION, newest_version, passthrough_columns

        since = self._since(context.schema)
        other = self.read(context, since)
        at = F.col(EVENT_MICROS)
        for name, type_ in since.items():
            at = spark_micros(col(name), type_)
        needed = [*self.keys.values(), *since]
        other = other.withColumn("__from", at).dropna(subset=[*(quoted(c) for c in needed), "__from"])
        if self.from_ is None:
            refuse_duplicates(self.what, ", ".join(needed), *duplicates_spark(other, needed))
        versions = other.select(
            *[col(theirs).alias(ours) for ours, theirs in self.keys.items()],
            F.col("__from").alias(EVENT_MICROS),
            "__from",
            *([] if self.from_ is None else [FILE, LINE]),
            *[col(n).alias(f"__e{i}") for i, n in enumerate(self.add)],
        )
        value = ["__from", *[f"__e{i}" for i in range(len(self.add))]]
        rows = newest_version(frame, context, list(self.keys), versions, value, self.at == "upto")
        version = F.col(VERSION)
        if self._tolerance is not None:
            version = F.when(version["0"] > F.col(EVENT_MICROS) - F.lit(self._tolerance), version)
        return rows.select(
            *passthrough_columns(rows, frame.columns),
            *[version[str(i)].alias(n) for i, n in enumerate(self.added(context.schema), 1)],
        )
