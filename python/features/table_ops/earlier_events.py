"""What operators over a key's earlier events share: keys, a source, a delay, a condition."""

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
    """A list of keys as a mapping onto themselves; for keys that may have other names in another table."""
    if not isinstance(keys, (list, tuple)):
        return keys
    if len(set(keys)) < len(keys):
        raise ValueError("a key is given twice")
    return {k: k for k in keys}


def check_source_keys(schema: TableSchema, name: str, keys: Mapping[str, str]) -> TableSchema:
    """A named source as a table whose events are looked at.

    Args:
        schema: of the rows.
        name: of the source.
        keys: column of the rows -> column of the source.

    Raises:
        OpError: there is no such source, it has no time, or its keys are not of the rows' types.
    """
    source = schema.of_source(name)
    refuse(source.time is None, f"from: source '{name}' has no time: set sources.{name}.table.event_time")
    for ours, theirs in keys.items():
        mine, other = schema.key(ours), source.key(theirs)
        refuse(mine != other, f"key '{ours}' is {mine}, but '{theirs}' of source '{name}' is {other}")
    return source


class EarlierEventsOp(TableOp):
    """An operator that looks at the events of the row's key at strictly earlier instants."""

    #: The columns that make the key, together; with `from`, perhaps {column: column of the source}.
    keys: Mapping[str, str] = Field(min_length=1)

    @field_validator("keys", mode="before")
    @classmethod
    def _as_mapping(cls, value: Any) -> Any:
        return same_names(value)

    @model_validator(mode="after")
    def _one_name(self) -> EarlierEventsOp:
        if self.source() is None and any(ours != theirs for ours, theirs in self.keys.items()):
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
    """Where an event counts only some time after it happened, and may be one of another source."""

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
        """What the names of added columns begin with: the keys, and the source."""
        return "_".join([*self.keys, *([self.from_] if self.from_ is not None else [])])

    def events_schema(self, schema: TableSchema) -> TableSchema:
        """The table whose events are looked at.

        Raises:
            OpError: there is no such source, it has no time, or its keys are not of the rows' types.
        """
        return schema if self.from_ is None else check_source_keys(schema, self.from_, self.keys)

    def label_delay(self, schema: TableSchema) -> int | None:
        return self.delay if self.from_ is None and schema.label in self.looked_at(schema) else None

    def looked_at(self, schema: TableSchema) -> tuple[str, ...]:
        """The columns of the events that it looks at, besides keys and time."""
        raise NotImplementedError

    def with_events(
        self, frame: DataFrame, context: SparkTableContext, values: Mapping[str, Column]
    ) -> tuple[DataFrame, dict[str, Column]]:
        """Rows and the events that they look at in one frame, and where `values` of the events are found in it.

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
        """The rows of `with_events`, without the source's."""
        from headrace.features.table_ops.spark_windows import asking_rows

        return both if self.from_ is None else asking_rows(both)


class FilteredEventsOp(DelayedEventsOp):
    """Where only some events count."""

    #: A condition, in SQL: events for which it is not true are passed over.
    where: str | None = None

    def columns_of_where(self, schema: TableSchema) -> tuple[str, ...]:
        """The columns that the condition names."""
        return () if self.where is None else Predicate(self.where, self.events_schema(schema).types).columns

    def check_where(self, schema: TableSchema) -> None:
        """Raise OpError for a condition that cannot be asked of the events."""
        if self.where is not None:
            Predicate(self.where, self.events_schema(schema).types)

    def spark_chosen(self, context: SparkTableContext) -> Column:
        """Boolean, never null: the row counts as an event."""
        from pyspark.sql import functions as F

        if self.where is None:
            return F.lit(True)
        return Predicate(self.where, self.events_schema(context.schema).types).spark()
