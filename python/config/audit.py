"""The section `publish.audit`: what the staged scores are held against before they are published."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, model_validator

from headrace.config.section import NAME, Section


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
