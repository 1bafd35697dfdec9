"""Base classes of operators over a key's earlier events: with keys, then a source and a delay, then a condition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator, model_validator

from headrace.features.functions.timestamps import HOUR_MICROS
from headrace.features.table_ops.base import (
    TABLE_KEY_TYPES,
    SourceRead,
    SparkTableContext,
    TableOp,
    TableSchema,
    refuse,
)
from headrace.features.table_ops.predicate import Predicate

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def keys_as_mapping(keys: Any) -> Any:
    """Return a list of keys as a mapping of each key to itself; a mapping stays as it is.

    A mapping names the keys' columns in another table.
    """
    if not isinstance(keys, (list, tuple)):
        return keys
    if len(set(keys)) < len(keys):
        raise ValueError("a key is given twice")
    return {k: k for k in keys}


def check_source_keys(schema: TableSchema, name: str, keys: Mapping[str, str]) -> TableSchema:
    """Return the schema of a named source, checked for reading its events by these keys.

    Args:
        schema: schema of the rows.
        name: name of the source.
        keys: column of the rows -> column of the source.

    Raises:
        OpError: the source does not exist or has no time, or its keys have other types than the rows' keys.
    """
    source = schema.of_source(name)
    refuse(source.time is None, f"from: source '{name}' has no time: set sources.{name}.table.event_time")
    for key, source_key in keys.items():
        key_type, source_type = schema.key(key), source.key(source_key)
        refuse(
            key_type != source_type,
            f"key '{key}' is {key_type}, but '{source_key}' of source '{name}' is {source_type}",
        )
    return source


class EarlierEventsOp(TableOp):
    """An operator that reads the events of the row's key at strictly earlier instants."""

    #: The columns that make up the key; with `from` also as {column: column of the source}.
    keys: Mapping[str, str] = Field(min_length=1)

    @field_validator("keys", mode="before", json_schema_input_type=tuple[str, ...] | Mapping[str, str])
    @classmethod
    def _as_mapping(cls, value: Any) -> Any:
        return keys_as_mapping(value)

    @model_validator(mode="after")
    def _one_name(self) -> EarlierEventsOp:
        if self.source() is None and any(key != source_key for key, source_key in self.keys.items()):
            raise ValueError("keys: the events have one name for each; write a list")
        return self

    def keys_of(self) -> tuple[str, ...]:
        return tuple(self.keys)

    def check_keys(self, schema: TableSchema, allowed_types: tuple[str, ...] = TABLE_KEY_TYPES) -> None:
        """Raise OpError if the table has no time, or a column is missing or cannot be a key."""
        schema.needs_time()
        for key in self.keys:
            schema.key(key, allowed_types)


class DelayedEventsOp(EarlierEventsOp):
    """An operator over earlier events of the table or a source, which count only after a delay."""

    #: A named source whose events are read in place of the table's own.
    from_: str | None = Field(default=None, alias="from")
    #: Hours after an event from which it counts.
    delay_hours: float = Field(default=0, ge=0, le=24 * 3650)

    @property
    def delay(self) -> int:
        """The delay, in microseconds."""
        return round(self.delay_hours * HOUR_MICROS)

    def source(self) -> SourceRead | None:
        return None if self.from_ is None else SourceRead(self.from_, "events", self.reach())

    def reach(self) -> int | None:
        """Return the largest age of an event that counts, in microseconds before the row; None: no limit."""
        return None

    def lookback(self) -> int:
        return 0 if self.from_ is not None else self.reach() or 0

    @property
    def key_name(self) -> str:
        """Prefix of the names of added columns, made of the keys and the source."""
        return "_".join([*self.keys, *([self.from_] if self.from_ is not None else [])])

    def events_schema(self, schema: TableSchema) -> TableSchema:
        """Return the schema of the table whose events are read.

        Raises:
            OpError: see `check_source_keys`.
        """
        return schema if self.from_ is None else check_source_keys(schema, self.from_, self.keys)

    def label_delay(self, schema: TableSchema) -> int | None:
        return self.delay if self.from_ is None and schema.label in self.event_columns(schema) else None

    def event_columns(self, schema: TableSchema) -> tuple[str, ...]:
        """Return the columns of the events that the operator reads, besides keys and time."""
        raise NotImplementedError

    def with_events(
        self, frame: DataFrame, context: SparkTableContext, values: Mapping[str, Column]
    ) -> tuple[DataFrame, dict[str, Column]]:
        """Return one frame of the rows and the events that they read, and the columns of `values` in it.

        Without a source, the rows are the events. With one, the frame has its events as further rows, which
        `rows_without_source` removes again.

        Args:
            frame: the rows.
            context: schema, and reader of sources.
            values: expressions over the columns of `events_schema`, by name.
        """
        from headrace.features.table_ops.spark_windows import with_source_events

        read = self.source()
        if read is None:
            return frame, dict(values)
        return with_source_events(frame, context, self.keys, read, values)

    def rows_without_source(self, both: DataFrame) -> DataFrame:
        """Return the rows of `with_events` without the source's events."""
        from headrace.features.table_ops.spark_windows import rows_without_source

        return both if self.from_ is None else rows_without_source(both)


class FilteredEventsOp(DelayedEventsOp):
    """An operator over earlier events that a condition selects."""

    #: A condition in SQL: events for which it is not true are ignored.
    where: str | None = None

    def columns_of_where(self, schema: TableSchema) -> tuple[str, ...]:
        """Return the columns that the condition names."""
        return () if self.where is None else Predicate(self.where, self.events_schema(schema).types).columns

    def check_where(self, schema: TableSchema) -> None:
        """Raise OpError if the condition is not valid for the events' columns."""
        if self.where is not None:
            Predicate(self.where, self.events_schema(schema).types)

    def spark_condition(self, context: SparkTableContext) -> Column:
        """Return a boolean column, never null: whether the row counts as an event."""
        from pyspark.sql import functions as F

        if self.where is None:
            return F.lit(True)
        return Predicate(self.where, self.events_schema(context.schema).types).spark()
