"""The section `score.filters`: which items no user, or a user, must not be shown."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from headrace.config.candidate_source import PairEvents
from headrace.config.candidates import check_kind, kind_of
from headrace.config.section import LocationText, Section


class SeenFilter(PairEvents):
    """Leaves out the items of a user's events: those with label 1, all (`where: "true"`), or purchases (`from`)."""

    #: Which kind it is.
    kind: Literal["seen"] = "seen"


class BlockedFilter(Section):
    """Leaves out what a table lists: pairs of a user and an item, items for all users, or users."""

    #: Which kind it is.
    kind: Literal["table"] = "table"
    #: A folder (or file): a path, relative to the workspace's home unless absolute, or a URI (`s3://BUCKET/FOLDER`).
    path: LocationText | None = None
    #: How it is written.
    format: Literal["delta", "parquet"] = "delta"
    #: A named source of the pipeline in place of `path`: the rows of its newest landing day up to ds.
    from_: str | None = Field(default=None, alias="from")
    #: The column with the user's key; null: the rows are items, for all users.
    user: str | None = None
    #: The column with the item's key; null: the rows are users, who get nothing.
    item: str | None = None

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), populate_by_name=True)

    @model_validator(mode="after")
    def _agrees(self) -> BlockedFilter:
        if (self.path is None) == (self.from_ is None):
            raise ValueError("give path (a Delta or Parquet table), or from: a named source")
        if self.from_ is not None and "format" in self.model_fields_set:
            raise ValueError("format goes with path")
        if self.user is None and self.item is None:
            raise ValueError("name the table's columns: user, item, or both")
        return self


class WhereFilter(Section):
    """Keeps the pairs for which a Spark SQL expression is true: not those where it is false, or null."""

    #: Which kind it is.
    kind: Literal["where"] = "where"
    #: Over the columns of `score.user`, `score.item` and `score.context`, such as
    #: `array_contains(item_countries, user_country)`.
    where: str


_KINDS = {"seen": SeenFilter, "table": BlockedFilter, "where": WhereFilter}

#: An entry of `score.filters`, by its `kind`.
AnyFilter = Annotated[
    Annotated[SeenFilter, Tag("seen")] | Annotated[BlockedFilter, Tag("table")] | Annotated[WhereFilter, Tag("where")],
    Discriminator(kind_of),
    BeforeValidator(lambda value: check_kind(value, _KINDS, "filter")),
]
