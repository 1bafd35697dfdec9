"""Operators that join another table: join_external by key, join_asof by key and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from headrace.config.schema import ColumnType, TableColumn, quoted
from headrace.config.section import LocationText
from headrace.errors import UserError, nearest
from headrace.features.functions.timestamps import DAY_MICROS, spark_micros
from headrace.features.table_ops.base import (
    FILE,
    LINE,
    ExternalTable,
    SourceRead,
    SparkTableContext,
    TableOp,
    TableSchema,
    refuse,
    scalar,
)
from headrace.features.table_ops.earlier_events import keys_as_mapping
from headrace.features.types import OpError, ValueType, declared

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


class ReadsOtherTable(TableOp):
    """The parameters that operators with another table share: one at a path, or a named source of the pipeline."""

    #: A folder (or file): a path, relative to the workspace's home unless absolute, or a URI (`s3://BUCKET/FOLDER`).
    path: LocationText | None = None
    format: Literal["delta", "parquet", "csv"] = "delta"
    #: A named source, in place of `path`.
    from_: str | None = Field(default=None, alias="from")
    #: Names of the key in both tables, or column of the events -> column of the other table.
    keys: Mapping[str, str] = Field(min_length=1)
    #: The columns to take: name in the other table -> type; of a source a list of names, whose types are declared.
    add: Mapping[str, ColumnType | None] = Field(min_length=1)
    #: Put before the names of the columns that are added.
    prefix: str = ""

    @field_validator("keys", mode="before", json_schema_input_type=tuple[str, ...] | Mapping[str, str])
    @classmethod
    def _same_names(cls, value: Any) -> Any:
        return keys_as_mapping(value)

    @field_validator("add", mode="before", json_schema_input_type=tuple[str, ...] | Mapping[str, ColumnType | None])
    @classmethod
    def _declared_types(cls, value: Any) -> Any:
        return dict.fromkeys(value) if isinstance(value, (list, tuple)) else value

    @model_validator(mode="after")
    def _one_table(self) -> ReadsOtherTable:
        if (self.path is None) == (self.from_ is None):
            raise ValueError("give `path`, or `from`: a named source")
        if self.from_ is not None and "format" in self.model_fields_set:
            raise ValueError("`format` goes with `path`")
        if self.path is not None and (untyped := [n for n, t in self.add.items() if t is None]):
            raise ValueError(f"add: say the type of '{untyped[0]}', as in {{{untyped[0]}: double}}")
        return self

    @property
    def description(self) -> str:
        """The other table for a message."""
        return f"table {self.path}" if self.from_ is None else f"source '{self.from_}'"

    def columns_read(self, schema: TableSchema, more: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """Return the columns of the other table that are read: keys, `add`, and `more`.

        Raises:
            OpError: the source has one as another type, or not; one is wanted as two types.
        """
        source = None if self.from_ is None else schema.of_source(self.from_).types
        types: dict[str, ValueType] = {}
        requested = [(other_key, schema.key(key)) for key, other_key in self.keys.items()]
        requested += [*more.items(), *((n, self._type_of(n, schema)) for n in self.add)]
        for name, type_ in requested:
            if types.setdefault(name, type_) != type_:
                raise OpError(f"column '{name}' of {self.description} is wanted as {types[name]} and as {type_}")
            if source is not None and source.get(name) != type_:
                declaration = (
                    f"is declared {source[name]}" if name in source else f"is not declared{nearest(name, source)}"
                )
                raise OpError(f"column '{name}' of {self.description} {declaration}, but {type_} is wanted")
        return types

    def added(self, schema: TableSchema) -> dict[str, ValueType]:
        """Return the columns that the operator adds."""
        return {f"{self.prefix}{n}": self._type_of(n, schema) for n in self.add}

    def external_table(self, schema: TableSchema, more: Mapping[str, ValueType]) -> ExternalTable | None:
        """Return the table at the path; None where the other table is a source. Raises OpError, see `columns_read`."""
        columns = self.columns_read(schema, more)
        return None if self.path is None else ExternalTable(self.path, self.format, columns)

    def read(self, context: SparkTableContext, more: Mapping[str, ValueType]) -> DataFrame:
        """Return the other table's rows, with at least the columns of `columns_read`."""
        read, table = self.source(), self.external_table(context.schema, more)
        if table is not None:
            return context.read(table)
        assert read is not None
        return context.source(read)

    def _type_of(self, name: str, schema: TableSchema) -> ValueType:
        declared_type = self.add[name]
        if declared_type is not None:
            return declared(TableColumn(name=name, type=declared_type))
        assert self.from_ is not None
        return schema.of_source(self.from_).type_of(name)


def refuse_duplicates(table: str, keys_name: str, keys: int, rows: int) -> None:
    """Raise UserError where some of the external table's keys have several rows."""
    if keys:
        raise UserError(
            f"features.prepare: in {table} {keys} values of {keys_name} have more than one row ({rows} rows); make it "
            f"unique, or say on_duplicate: first and by which order"
        )


def duplicates_spark(frame: DataFrame, keys: Sequence[str]) -> tuple[int, int]:
    """(keys that have several rows, those rows). One Spark job."""
    from pyspark.sql import functions as F

    from headrace.features.functions.spark_expressions import col

    counted = frame.groupBy(*[col(k) for k in keys]).agg(F.count(F.lit(1)).alias("n")).where(F.col("n") > 1)
    row = counted.agg(F.count(F.lit(1)), F.coalesce(F.sum("n"), F.lit(0))).collect()[0]
    return int(row[0]), int(row[1])


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
        types = self.columns_read(schema, {})
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

        other_keys = list(self.keys.values())
        other_rows = self.read(context, {}).dropna(subset=[quoted(k) for k in other_keys])
        if self.on_duplicate == "first":
            order: list[Column] = [
                F.desc_nulls_last(quoted(n[1:])) if n.startswith("-") else F.asc_nulls_first(quoted(n))
                for n in self.order
            ]
            # rank, not row_number: equal firsts are refused, not chosen among.
            other_rows = other_rows.withColumn(
                "__rank", F.rank().over(Window.partitionBy(*[col(k) for k in other_keys]).orderBy(*order))
            )
            other_rows = other_rows.where(F.col("__rank") == 1).drop("__rank")
        refuse_duplicates(self.description, ", ".join(other_keys), *duplicates_spark(other_rows, other_keys))
        side = other_rows.select(
            *[col(k).alias(f"__k{i}") for i, k in enumerate(other_keys)],
            *[col(n).alias(f"__e{i}") for i, n in enumerate(self.add)],
        )
        on = [col(key) == F.col(f"__k{i}") for i, key in enumerate(self.keys)]
        added = [F.col(f"__e{i}").alias(n) for i, n in enumerate(self.added(context.schema))]
        return frame.join(side, on, "left").select(*[col(c) for c in frame.columns], *added)


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
        self.columns_read(schema, self._since(schema))
        return schema.adding(self.added(schema))

    def external(self, schema: TableSchema) -> ExternalTable | None:
        return self.external_table(schema, self._since(schema))

    def source(self) -> SourceRead | None:
        if self.from_ is None:
            return None
        return SourceRead(self.from_, "versions", self._tolerance if self.valid_from is None else None)

    def _since(self, schema: TableSchema) -> dict[str, ValueType]:
        """Return the column `valid_from` and its type; none where it is the time of a source's events."""
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
        other_rows = self.read(context, since)
        valid_from = F.col(EVENT_MICROS)
        for name, type_ in since.items():
            valid_from = spark_micros(col(name), type_)
        needed = [*self.keys.values(), *since]
        other_rows = other_rows.withColumn("__from", valid_from).dropna(subset=[*(quoted(c) for c in needed), "__from"])
        if self.from_ is None:
            refuse_duplicates(self.description, ", ".join(needed), *duplicates_spark(other_rows, needed))
        versions = other_rows.select(
            *[col(other_key).alias(key) for key, other_key in self.keys.items()],
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
