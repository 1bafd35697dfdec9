"""What operators that tell a row of its key's earlier events share: keys, a delay, a condition."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from headrace.features.table_ops.base import HOUR, KEYS, Given, TableOp, TableSpark, refuse
from headrace.features.table_ops.predicate import Predicate

if TYPE_CHECKING:
    from pyspark.sql import Column


class OfPast(TableOp):
    """An operator that looks at the events of the row's key at strictly earlier instants."""

    #: The columns that make the key, together.
    keys: tuple[str, ...] = Field(min_length=1)

    def keys_of(self) -> tuple[str, ...]:
        return self.keys

    def check_keys(self, given: Given, also: tuple[str, ...] = KEYS) -> None:
        """Raise OpError where the table has no time, or a column can be no key or is named twice."""
        given.needs_time()
        refuse(len(set(self.keys)) < len(self.keys), "a key is given twice")
        for key in self.keys:
            given.key(key, also)


class OfDelayedPast(OfPast):
    """Where an event counts only some time after it happened."""

    #: Hours after which an event counts.
    delay_hours: float = Field(default=0, ge=0, le=24 * 3650)

    @property
    def delay(self) -> int:
        """Microseconds."""
        return round(self.delay_hours * HOUR)


class OfChosenPast(OfDelayedPast):
    """Where only some events count."""

    #: A condition, in SQL: events for which it is not true are passed over.
    where: str | None = None

    def check_where(self, given: Given) -> None:
        """Raise OpError for a condition that cannot be asked of the table."""
        if self.where is not None:
            Predicate(self.where, given.types)

    def spark_chosen(self, place: TableSpark) -> Column:
        """Boolean, never null: the row counts as an event."""
        from pyspark.sql import functions as F

        return F.lit(True) if self.where is None else Predicate(self.where, place.given.types).spark()
