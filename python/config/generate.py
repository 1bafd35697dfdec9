"""The section `generate`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from headrace.config.section import Section, parse_ds
from headrace.errors import UserError


class Site(Section):
    """The site that shows users their published lists (`headrace simulate-site`); see headrace.generate.site."""

    #: Items that a visitor is shown.
    length: int = Field(default=10, ge=1, le=1000)
    #: A visitor looks at the item of place r with probability r^-position_bias: 0: at all of them.
    position_bias: float = Field(default=0.3, ge=0)
    #: Share of the visits that are shown items drawn evenly from all of them instead.
    random: float = Field(default=0.2, ge=0, le=1)


class Generate(Section):
    """The click-log generator (`headrace generate`); see headrace.generate for the model of the clicks."""

    #: Another seed is another log.
    seed: int = 7
    #: The first day of the log; days are counted from here, so a day's data never depend on which days were asked for.
    start: str = "2026-01-01"
    #: Rows a day, before duplicates and malformed rows are added.
    rows_per_day: int = Field(default=60_000, ge=1, le=10**11)
    #: Users alive on the first day.
    users: int = Field(default=3_000, ge=2, le=10**9)
    #: Items alive on the first day.
    items: int = Field(default=800, ge=2, le=10**9)
    #: New users each day, as a share of the first day's number.
    new_users: float = Field(default=0.01, ge=0)
    #: New items each day, as a share of the first day's number.
    new_items: float = Field(default=0.01, ge=0)
    #: Zipf exponent of the popularity of users.
    user_zipf: float = Field(default=0.8, ge=0)
    #: Zipf exponent of the popularity of items.
    item_zipf: float = Field(default=1.05, ge=0)
    #: Share of clicks that the intercept is set for (a day's differs by its noise and the drift).
    base_rate: float = Field(default=0.2, gt=0, lt=1)
    #: Share of the clicks that a purchase follows: the log then has a column `purchased`; null: it has none.
    purchase_rate: float | None = Field(default=None, gt=0, lt=1)
    #: Standard deviation of the latent taste's part of the logit; what ids, countries, prices explain has about 1.5.
    taste: float = Field(default=0.3, ge=0)
    #: Standard deviation of a day's step of each coordinate (variance 1) of a user's latent taste.
    drift: float = Field(default=0.02, ge=0)
    #: Share of the values of optional columns that are missing.
    nulls: float = Field(default=0.02, ge=0, le=1)
    #: Share of rows that are there twice.
    duplicates: float = Field(default=0.005, ge=0, le=1)
    #: Share of rows that land up to `table.late_days` days late.
    late: float = Field(default=0.01, ge=0, le=1)
    #: Share of lines that are no rows.
    malformed: float = Field(default=0.001, ge=0, le=1)
    #: Files a day.
    files_per_day: int = Field(default=4, ge=1)
    #: Formats of the files, in turn.
    formats: tuple[Literal["jsonl", "csv"], ...] = Field(default=("jsonl", "jsonl", "jsonl", "csv"), min_length=1)

    #: Who is shown what: of `headrace simulate-site` alone.
    site: Site = Site()

    @field_validator("start", mode="before")
    @classmethod
    def _start_is_a_date(cls, value: Any) -> Any:
        # YAML reads 2026-01-01 as a date.
        try:
            return parse_ds(str(value))
        except UserError as e:
            raise ValueError(str(e)) from None  # so that the message names the key
