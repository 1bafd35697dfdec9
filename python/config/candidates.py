"""The sections `score.candidates` and `score.filters`: which items are ranked for a user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from headrace.config.section import NAME, LocationText, Section
from headrace.errors import nearest


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


class VectorSource(CandidateSource):
    """The items whose vectors have the greatest dot products with the user's, by the model that scores.

    Users without a learned vector have no candidates, and items without one are no candidates.
    """

    #: Which kind it is.
    kind: Literal["vectors"] = "vectors"
    #: exact: all items are compared. ivf: those of the cells of an index that are nearest to the user. auto: the index
    #: from 1 million items on.
    index: Literal["auto", "exact", "ivf"] = "auto"
    #: With the index: the share of the `k` best items that are found, of some users of the run, in the mean; so many
    #: cells are looked at.
    min_recall: float = Field(default=0.95, gt=0, le=1)


#: Bits of a source mask: `__sources` is an array of Spark's int.
_MOST_SOURCES = 31


class Covisitation(CandidateSource, PairEvents):
    """Items that the users of a user's newest items had, too: item-to-item collaborative filtering.

    Similarity of two items: of the users that had both, over the root of the product of each one's users (cosine), or
    over the users of either (jaccard). A user's candidates are ranked by the sum of their similarities to the user's
    newest items (Sarwar et al., WWW 2001; Linden et al., IEEE Internet Computing 2003).
    """

    #: Which kind it is.
    kind: Literal["covisitation"] = "covisitation"
    #: A user's newest items that count, for the similarities as for the candidates.
    history: int = Field(default=20, ge=1, le=1000)
    #: Of items with more users, about so many count, drawn by a hash of the user; counts are scaled back by the share
    #: (Schelter, Boden, Markl, RecSys 2012 bound a user's items and so the pairs).
    users_per_item: int = Field(default=1000, ge=2)
    #: Most similar items that are kept for each item.
    neighbors: int = Field(default=50, ge=1)
    #: How the users of both are related to those of each.
    similarity: Literal["cosine", "jaccard"] = "cosine"
    #: A similarity of n common users is multiplied by n / (n + shrinkage), so that few users say little (Bell, Koren,
    #: ICDM 2007).
    shrinkage: float = Field(default=10.0, ge=0)


class Popular(CandidateSource, PairEvents):
    """Items by the number of users that had them; then all other items."""

    #: Which kind it is.
    kind: Literal["popular"] = "popular"
    #: User columns: first the items that users with the same values had, by their number, then those of all.
    by: tuple[str, ...] = ()


class Recent(CandidateSource):
    """The newest items first."""

    #: Which kind it is.
    kind: Literal["recent"] = "recent"
    #: An item column, greatest first; null: the time of the item's first event in the training window.
    column: str | None = None


class NewItems(CandidateSource):
    """Items without events in the training window (`score.item.from`): others to each user, so that all get a share."""

    #: Which kind it is.
    kind: Literal["new_items"] = "new_items"
    #: Also items with up to so many events in the training window.
    max_events: int = Field(default=0, ge=0)


class CandidateTable(CandidateSource):
    """Items that a table lists: for each user, for users with the same columns, or for all."""

    #: Which kind it is.
    kind: Literal["table"] = "table"
    #: A folder (or file): a path, relative to the workspace's home unless absolute, or a URI (`s3://BUCKET/FOLDER`).
    path: LocationText | None = None
    #: How it is written.
    format: Literal["delta", "parquet"] = "delta"
    #: A named source of the pipeline in place of `path`: the rows of its newest landing day up to ds.
    from_: str | None = Field(default=None, alias="from")
    #: The column with the item's key; null: the one named as `score.item.key`.
    item: str | None = None
    #: The column with the user's key: the rows are of single users.
    user: str | None = None
    #: User columns that the table has, too: the rows are of users with these values.
    by: tuple[str, ...] = ()
    #: The column that orders the items of a user, a segment or all; null: by the item's key.
    order: str | None = None
    #: The greatest of `order` first.
    descending: bool = False

    model_config = PairEvents.model_config

    @model_validator(mode="after")
    def _agrees(self) -> CandidateTable:
        if (self.path is None) == (self.from_ is None):
            raise ValueError("give path (a Delta or Parquet table), or from: a named source")
        if self.from_ is not None and "format" in self.model_fields_set:
            raise ValueError("format goes with path")
        if self.user is not None and self.by:
            raise ValueError("give user (rows of single users) or by (rows of segments), not both")
        return self


_KINDS = {
    "vectors": VectorSource,
    "covisitation": Covisitation,
    "popular": Popular,
    "recent": Recent,
    "new_items": NewItems,
    "table": CandidateTable,
}


def kind_of(value: Any) -> Any:
    """Return the `kind` of an entry of a union of sections; None where it has none."""
    return value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)


def check_kind(value: Any, kinds: Mapping[str, Any], noun: str) -> Any:
    """Return the value, an entry of one of the kinds.

    Args:
        value: the entry, as a mapping or a section.
        kinds: sections by their kind.
        noun: the entry's name in the message.

    Raises:
        ValueError: its kind is none of them; the message names the nearest.
    """
    kind = kind_of(value)
    if kind not in kinds:
        fault = "kind is missing" if kind is None else f"'{kind}' is no kind of {noun}{nearest(str(kind), kinds)}"
        raise ValueError(f"{fault} (there are: {', '.join(kinds)})")
    return value


#: An entry of `score.candidates.sources`, by its `kind`.
AnyCandidateSource = Annotated[
    Annotated[VectorSource, Tag("vectors")]
    | Annotated[Covisitation, Tag("covisitation")]
    | Annotated[Popular, Tag("popular")]
    | Annotated[Recent, Tag("recent")]
    | Annotated[NewItems, Tag("new_items")]
    | Annotated[CandidateTable, Tag("table")],
    Discriminator(kind_of),
    BeforeValidator(lambda value: check_kind(value, _KINDS, "source")),
]


class Candidates(Section):
    """The items that are ranked for a user: the union of several sources. Without the section: all items."""

    #: The most candidates of a user.
    limit: int = Field(default=500, ge=1)
    #: Names -> sources. The order is that in which they fill the places; an item of several has one place, and all
    #: their names.
    sources: Mapping[str, AnyCandidateSource] = Field(min_length=1, max_length=_MOST_SOURCES)

    @model_validator(mode="after")
    def _places_meet(self) -> Candidates:
        for name in self.sources:
            if not NAME.fullmatch(name):
                raise ValueError(f"sources: '{name}' must match {NAME.pattern}")
        if sum(s.share for s in self.sources.values()) > 1 + 1e-9:
            raise ValueError("the shares of the sources add up to more than 1")
        return self

    def places(self) -> dict[str, int]:
        """Return the places of `limit` that are kept for each source, by its name."""
        return {name: min(s.k, int(s.share * self.limit + 1e-9)) for name, s in self.sources.items()}


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


_FILTER_KINDS = {"seen": SeenFilter, "table": BlockedFilter, "where": WhereFilter}

#: An entry of `score.filters`, by its `kind`.
AnyFilter = Annotated[
    Annotated[SeenFilter, Tag("seen")] | Annotated[BlockedFilter, Tag("table")] | Annotated[WhereFilter, Tag("where")],
    Discriminator(kind_of),
    BeforeValidator(lambda value: check_kind(value, _FILTER_KINDS, "filter")),
]
