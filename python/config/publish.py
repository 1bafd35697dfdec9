"""The section `publish`: from the scores to the warehouse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, field_validator

from headrace.config.audit import Audit
from headrace.config.online import Online
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
    #: What the day is held against besides; None: nothing.
    audit: Audit | None = None
    #: Days that the table keeps, the newest published one among them; None: all. Older ones are dropped after a day is
    #: published.
    retain_days: int | None = Field(default=None, ge=1)
    #: Who may read the table and its view of the newest day: `{select: [analyst, dashboard]}`, roles of the warehouse.
    #: What was given so before is taken away from a role that is no longer named, when a day is published.
    grants: Mapping[Literal["select"], tuple[str, ...]] = Field(default_factory=dict)

    #: A store of keys and values that is given the newest day's items of each user; None: none.
    online: Online | None = None

    @field_validator("table")
    @classmethod
    def _identifier(cls, value: str | None) -> str | None:
        if value is not None and not NAME.fullmatch(value):
            raise ValueError(f"table name '{value}' must match {NAME.pattern}")
        return value
