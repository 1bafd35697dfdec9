"""The section `publish`: the warehouse's rows, the store of keys and values, and the audit before."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, field_validator, model_validator

from headrace.config.section import NAME, PathText, Section
from headrace.config.warehouse import Warehouse


class Online(Section):
    """The newest day's items of each user, by the user's key, for serving."""

    #: redis: a server. lmdb: a file that is mapped into the memory of who reads it.
    kind: Literal["redis", "lmdb"]
    #: redis: the server's URL without a password, such as `redis://cache:6379/0` (`rediss://` encrypts).
    url: str | None = None
    #: lmdb: the file. Default: `HOME/online/TABLE.lmdb`.
    path: PathText | None = None
    #: Where the password of Redis is (never itself): a variable's name.
    password_env: str | None = None
    #: Path of the file with the password.
    password_file: str | None = None

    @model_validator(mode="after")
    def _names_its_server(self) -> Online:
        if self.kind == "redis" and self.url is None:
            raise ValueError("kind redis needs the key 'url'")
        if self.url is not None and re.match(r"[^/]*://[^/@]*:[^/@]*@", self.url):
            raise ValueError("url has a password in it: leave it out and name password_env or password_file")
        return self


class Reference(Section):
    """A table that has every value of a column of the scores (a foreign key)."""

    #: Of a catalog (`catalog.schema.table`), a path of a Delta table, or a folder of Parquet files.
    table: str
    #: Its column; None: of the same name.
    column: str | None = None


class AuditRule(Section):
    """A figure of your own, within limits."""

    #: An aggregate of Spark SQL over the day's scores, such as `avg(score)` or `count_if(rank = 1 AND score < 0.01)`.
    expr: str | None = None
    #: A SELECT in the warehouse's SQL that gives one number; `{staged}` is the day's rows, `{previous}` those of the
    #: newest published day before it. Double a brace that is meant as such.
    sql: str | None = None
    #: The least that it may be.
    min: float | None = None
    #: The most.
    max: float | None = None

    @model_validator(mode="after")
    def _one_figure_with_a_limit(self) -> AuditRule:
        if (self.expr is None) == (self.sql is None):
            raise ValueError("give one of expr (Spark SQL) and sql (the warehouse's SQL)")
        if self.min is None and self.max is None:
            raise ValueError("give min, max, or both: without a limit it holds whatever comes")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}")
        return self


class Audit(Section):
    """Beyond what must always hold: the day beside the newest published one before it, and rules of your own.

    None: not checked. A rule that needs an earlier day holds where there is none.
    """

    #: Population stability index of the scores, over the tenths of the earlier day's.
    max_score_psi: float | None = Field(default=0.25, ge=0)
    #: Population stability index of how often items are given, over the `top_items` most frequent and all others.
    max_item_psi: float | None = Field(default=0.25, ge=0)
    #: Bins of `max_item_psi` besides the rest.
    top_items: int = Field(default=20, ge=1, le=1000)
    #: Share of the candidate items that some user is given.
    min_coverage: float | None = Field(default=None, ge=0, le=1)
    #: Share of the users that were scored who have a list.
    min_users: float | None = Field(default=None, ge=0, le=1)
    #: Share of the rows whose item was in no list of the earlier day.
    max_new_items: float | None = Field(default=None, ge=0, le=1)
    #: Columns of the scores by the table that must have their values.
    references: Mapping[str, Reference] = Field(default_factory=dict)
    #: By name.
    rules: Mapping[str, AuditRule] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _names(self) -> Audit:
        for name in self.rules:
            if not NAME.fullmatch(name):
                raise ValueError(f"rules: '{name}' must match {NAME.pattern}")
        return self


class Publish(Section):
    """Publishing: scores are written to a staging table, audited there, and made visible."""

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
