"""What all sources of candidates have (`score.candidates.sources`), and the events that some of them count."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from headrace.config.section import Section


class CandidateSource(Section):
    """A source of candidates: a ranking of items for each user."""

    #: The most candidates that it gives a user, after the filters.
    k: int = Field(default=100, ge=1)
    #: The share of `candidates.limit` whose places are kept for its best candidates; sources that come before it in the
    #: spec fill the others.
    share: float = Field(default=0.0, ge=0, le=1)
    #: Whom it serves: all users, those with events in the training window, or those without (`score.user.from`).
    users: Literal["all", "active", "new"] = "all"


class PairEvents(Section):
    """Events of a user and an item: the pipeline's own of the training window, or those of a named source."""

    #: A named source of the pipeline in place of its own events: all that it has up to ds, whatever
    #: `features.history_days` is.
    from_: str | None = Field(default=None, alias="from")
    #: A Spark SQL expression over the events' columns; those count for which it is true. Null: of the pipeline's own
    #: events those with a label of 1, of a named source all.
    where: str | None = None
    #: Only events of so many days up to ds count (by the events' time, else by their landing day).
    days: int | None = Field(default=None, ge=1)
    #: The events' column that is `score.user.key`; null: the one of that name.
    user: str | None = None
    #: The events' column that is `score.item.key`; null: the one of that name.
    item: str | None = None

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), populate_by_name=True)
