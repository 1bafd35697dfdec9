"""Operators over a key's earlier events: keys, a source, a delay, a condition."""

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


def same_names(keys: Any) -> Any:
    """Return a list of keys as a mapping onto themselves; for keys that may have other names in another table."""
    if not isinstance(keys, (list, tuple)):
        return keys
    if len(set(keys)) < len(keys):
        raise ValueError("a key is given twice")
    return {k: k for k in keys}


def check_source_keys(schema: TableSchema, name: str, keys: Mapping[str, str]) -> TableSchema:
    """Return a named source as a table whose events are looked at.

    Args:
        schema: of the rows.
        name: of the source.
        keys: column of the rows -> column of the source.

    Raises:
        OpError: there is no such source, it has no time, or its keys are not of the rows' types.
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
    """An operator that looks at the events of the row's key at strictly earlier instants."""

    #: The columns that make the key, together; with `from`, perhaps {column: column of the source}.
    keys: Mapping[str, str] = Field(min_length=1)

    @field_validator("keys", mode="before", json_schema_input_type=tuple[str, ...] | Mapping[str, str])
    @classmethod
    def _as_mapping(cls, value: Any) -> Any:
        return same_names(value)

    @model_validator(mode="after")
    def _one_name(self) -> EarlierEventsOp:
        if self.source() is None and any(key != source_key for key, source_key in self.keys.items()):
            raise ValueError("keys: the events have one name for each; write a list")
        return self

    def keys_of(self) -> tuple[str, ...]:
        return tuple(self.keys)

    def check_keys(self, schema: TableSchema, also: tuple[str, ...] = TABLE_KEY_TYPES) -> None:
        """Raise OpError where the table has no time, or a column can be no key."""
        schema.needs_time()
        for key in self.keys:
            schema.key(key, also)


class DelayedEventsOp(EarlierEventsOp):
    """An operator over earlier events, of the table or a source, that count some time after they happened."""

    #: A named source whose events are looked at, in place of the table's own.
    from_: str | None = Field(default=None, alias="from")
    #: Hours after which an event counts.
    delay_hours: float = Field(default=0, ge=0, le=24 * 3650)

    @property
    def delay(self) -> int:
        """Microseconds."""
        return round(self.delay_hours * HOUR_MICROS)

    def source(self) -> SourceRead | None:
        return None if self.from_ is None else SourceRead(self.from_, "events", self.reach())

    def reach(self) -> int | None:
        """Microseconds before a row after which no event counts; None where there is no such bound."""
        return None

    def lookback(self) -> int:
        return 0 if self.from_ is not None else self.reach() or 0

    @property
    def key_name(self) -> str:
        """Prefix of the names of added columns: the keys, and the source."""
        return "_".join([*self.keys, *([self.from_] if self.from_ is not None else [])])

    def events_schema(self, schema: TableSchema) -> TableSchema:
        """Return the table whose events are looked at.

        Raises:
            OpError: there is no such source, it has no time, or its keys are not of the rows' types.
        """
        return schema if self.from_ is None else check_source_keys(schema, self.from_, self.keys)

    def label_delay(self, schema: TableSchema) -> int | None:
        return self.delay if self.from_ is None and schema.label in self.looked_at(schema) else None

    def looked_at(self, schema: TableSchema) -> tuple[str, ...]:
        """Return the columns of the events that it looks at, besides keys and time."""
        raise NotImplementedError

    def with_events(
        self, frame: DataFrame, context: SparkTableContext, values: Mapping[str, Column]
    ) -> tuple[DataFrame, dict[str, Column]]:
        """Return rows and the events that they look at in one frame, and where `values` of the events are found in it.

        Without a source that is the frame itself. With one, its events follow the rows, which then only ask; take them
        out again by `asking_rows`.

        Args:
            values: expressions over the columns of `events_schema`.
        """
        from headrace.features.table_ops.spark_windows import with_source_events

        read = self.source()
        if read is None:
            return frame, dict(values)
        return with_source_events(frame, context, self.keys, read, values)

    def asking_rows(self, both: DataFrame) -> DataFrame:
        """Return the rows of `with_events`, without the source's."""
        from headrace.features.table_ops.spark_windows import asking_rows

        return both if self.from_ is None else asking_rows(both)


class FilteredEventsOp(DelayedEventsOp):
    """An operator over earlier events that a condition selects."""

    #: A condition, in SQL: events for which it is not true are passed over.
    where: str | None = None

    def columns_of_where(self, schema: TableSchema) -> tuple[str, ...]:
        """Return the columns that the condition names."""
        return () if self.where is None else Predicate(self.where, self.events_schema(schema).types).columns

    def check_where(self, schema: TableSchema) -> None:
        """Raise OpError for a condition that cannot be asked of the events."""
        if self.where is not None:
            Predicate(self.where, self.events_schema(schema).types)

    def spark_chosen(self, context: SparkTableContext) -> Column:
        """Return a boolean, never null: the row counts as an event."""
        from pyspark.sql import functions as F

        if self.where is None:
            return F.lit(True)
        return Predicate(self.where, self.events_schema(context.schema).types).spark()
