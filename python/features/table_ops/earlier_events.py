"""What operators over a key's earlier events share: keys, a delay, a condition."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from headrace.features.functions.timestamps import HOUR_MICROS
from headrace.features.table_ops.base import TABLE_KEY_TYPES, SparkTableContext, TableOp, TableSchema, refuse
from headrace.features.table_ops.predicate import Predicate

if TYPE_CHECKING:
    from pyspark.sql import Column


class EarlierEventsOp(TableOp):
    """An operator that looks at the events of the row's key at strictly earlier instants."""

    #: The columns that make the key, together.
    keys: tuple[str, ...] = Field(min_length=1)

    def keys_of(self) -> tuple[str, ...]:
        return self.keys

    def check_keys(self, schema: TableSchema, also: tuple[str, ...] = TABLE_KEY_TYPES) -> None:
        """Raise OpError where the table has no time, or a column can be no key or is named twice."""
        schema.needs_time()
        refuse(len(set(self.keys)) < len(self.keys), "a key is given twice")
        for key in self.keys:
            schema.key(key, also)


class DelayedEventsOp(EarlierEventsOp):
    """Where an event counts only some time after it happened."""

    #: Hours after which an event counts.
    delay_hours: float = Field(default=0, ge=0, le=24 * 3650)

    @property
    def delay(self) -> int:
        """Microseconds."""
        return round(self.delay_hours * HOUR_MICROS)


class FilteredEventsOp(DelayedEventsOp):
    """Where only some events count."""

    #: A condition, in SQL: events for which it is not true are passed over.
    where: str | None = None

    def check_where(self, schema: TableSchema) -> None:
        """Raise OpError for a condition that cannot be asked of the table."""
        if self.where is not None:
            Predicate(self.where, schema.types)

    def spark_chosen(self, context: SparkTableContext) -> Column:
        """Boolean, never null: the row counts as an event."""
        from pyspark.sql import functions as F

        return F.lit(True) if self.where is None else Predicate(self.where, context.schema.types).spark()
