"""The section `publish`: from the scores to the warehouse."""

from __future__ import annotations

from pydantic import Field, field_validator

from headrace.config.section import NAME, Section
from headrace.config.warehouse import Warehouse


class Publish(Section):
    """Write, audit, publish."""

    #: Table in the warehouse; default `<pipeline>_scores`.
    table: str | None = None
    #: Where to.
    warehouse: Warehouse = Warehouse()
    #: The audit: rows, users with a full top-K, scores within [0, 1], no nulls, no duplicate keys.
    min_rows: int = Field(default=1, ge=0)
    #: The number of rows may differ from the last published day's by this share; None: not checked.
    max_row_change: float | None = 0.5

    @field_validator("table")
    @classmethod
    def _identifier(cls, value: str | None) -> str | None:
        if value is not None and not NAME.fullmatch(value):
            raise ValueError(f"table name '{value}' must match {NAME.pattern}")
        return value
