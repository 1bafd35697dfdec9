"""The section `score`: who is scored, by which model, and how lists are made of scores."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from headrace.config.candidates import AnyFilter, Candidates, PairEvents
from headrace.config.evaluation import HIGHER_IS_BETTER
from headrace.config.section import Section
from headrace.config.table import NamedSource
from headrace.errors import nearest

#: A share of a list.
Share = Annotated[float, Field(gt=0, le=1)]


class Diversity(Section):
    """Maximal marginal relevance (Carbonell and Goldstein, 1998): items unlike those above them in the list."""

    #: Similarity of two items. vectors: the cosine of their vectors, of a model in retrieval form. Else columns of
    #: `score.item`: the share of them in which both have the same value.
    by: Literal["vectors"] | tuple[str, ...] = "vectors"
    #: The weight of the score, scaled to 0 to 1 within the user's items, against likeness; 1: scores alone.
    relevance: float = Field(default=0.7, ge=0, le=1)

    @model_validator(mode="after")
    def _names_columns(self) -> Diversity:
        if not self.by:
            raise ValueError("`by` names columns of score.item, or `vectors`")
        return self


class Freshness(Section):
    """A boost or a least share for young items."""

    #: An item is fresh if it is younger than this at the end of ds.
    days: float = Field(gt=0)
    #: A column of `score.item`, a date or a timestamp, since when the item has been there; null: its first event in
    #: the window.
    column: str | None = None
    #: The score of a fresh item counts this much more: 0.2 is a fifth. The score itself stays as it is.
    boost: float = Field(default=0.0, ge=0)
    #: At least this share of every list's first n, rounded down, is fresh, as far as ranked items and caps allow.
    share: Share | None = None

    @model_validator(mode="after")
    def _does_something(self) -> Freshness:
        if not self.boost and self.share is None:
            raise ValueError("give fresh items a `boost`, a `share`, or both")
        return self


class NewItemShare(Section):
    """A least share for items of which little is known yet."""

    #: An item is new if it has fewer events in the training rows.
    below_events: int = Field(default=20, ge=1)
    #: At least this share of every list's first n, rounded down, is new, as far as ranked items and caps allow.
    share: Share


class Explore(Section):
    """Positions drawn at random; the probability of each choice is stored (`propensity`).

    Give one of `epsilon` and `temperature`.
    """

    #: With this probability a position is drawn; what stands in the drawn ones is chosen uniformly, without
    #: replacement, from the pool and the items that stood there.
    epsilon: float | None = Field(default=None, gt=0, le=1)
    #: Each position is drawn among the items that may stand there, by the exponential of score / temperature (Plackett
    #: and Luce); with `diversity` the marginal relevance is in the place of the score.
    temperature: float | None = Field(default=None, gt=0)
    #: The best items behind the list that may be chosen; null: all that were ranked.
    pool: int | None = Field(default=None, ge=1)
    #: Seed of the draws; with ds and the user's key it decides them.
    seed: int = Field(default=1, ge=0)

    @model_validator(mode="after")
    def _one_way(self) -> Explore:
        if (self.epsilon is None) == (self.temperature is None):
            raise ValueError("give one of `epsilon` and `temperature`")
        return self


class Rerank(Section):
    """Rules that make the list of `score.top_k` of a user's ranked items: position by position the best item that
    may stand there.
    """

    #: Diversity within a list; null: none.
    diversity: Diversity | None = None
    #: Share and boost of fresh items; null: none.
    freshness: Freshness | None = None
    #: By column of `score.item`: how many items of a list may have the same value; those without a value are not
    #: counted. A list is shorter where too few items are left.
    caps: Mapping[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    #: Share of new items; null: none.
    new_items: NewItemShare | None = None
    #: Randomised positions; null: none, and every propensity is 1.
    explore: Explore | None = None

    @model_validator(mode="after")
    def _shares_fit(self) -> Rerank:
        total = sum(self.shares())
        if total > 1:
            raise ValueError(f"the shares of fresh and of new items are {total:g} together; a list has 1")
        return self

    def shares(self) -> tuple[float, ...]:
        """Return the least shares that rules ask for."""
        rules = (self.freshness, self.new_items)
        return tuple(rule.share for rule in rules if rule is not None and rule.share is not None)

    def columns(self) -> tuple[str, ...]:
        """Return the columns of items that the rules look at."""
        return tuple(dict.fromkeys(column for columns in self.columns_by_key().values() for column in columns))

    def columns_by_key(self) -> dict[str, tuple[str, ...]]:
        """Return the columns of items that the rules look at, by the key that names them."""
        of_diversity = () if self.diversity is None or self.diversity.by == "vectors" else self.diversity.by
        of_freshness = () if self.freshness is None or self.freshness.column is None else (self.freshness.column,)
        return {"diversity.by": of_diversity, "freshness.column": of_freshness, "caps": tuple(self.caps)}


class Entity(Section):
    """One side of a score: its key and the columns that travel with it, taken from its newest event."""

    #: The column with the key.
    key: str
    #: Columns that the features read, with the values of the newest event.
    columns: tuple[str, ...] = ()
    #: Active within the training window, most events first; None: all.
    limit: int | None = None
    #: A named source with the key and what it has of the columns: its newest rows up to ds, those without events too.
    from_: str | None = Field(default=None, alias="from")

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), populate_by_name=True)


class ScoreEmbeddings(Section):
    """The place of a model's tables of embeddings in the tasks that score."""

    #: mapped: each host lays all tables out on its local disk once, and its workers map them. joined: no host has a
    #: table; Spark brings each task the rows that its users and items look up. auto: tables are mapped while there is
    #: room for them (`mapped_mib`), the smallest first, and the rows of the others are joined in.
    rows: Literal["auto", "mapped", "joined"] = "auto"
    #: MiB of tables that a host maps at most; null: 80 % of what is free on the driver's disk where they would lie.
    mapped_mib: float | None = Field(default=None, gt=0)


#: A version of the registered model, or `@` and an alias.
RegisteredModel = Annotated[str, Field(pattern=r"^(@[A-Za-z][\w-]*|[1-9][0-9]*)$")]
#: One of the day's models, or one of the registry; see `Score.model`.
ModelChoice = Literal["neural", "baseline", "best", "second_stage", "today"] | RegisteredModel


def version_as_text(value: Any) -> Any:
    """Return a version of the registry that was written as a number, as text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


#: Columns of the scores table besides the keys.
SCORES_COLUMNS = ("ds", "rank", "score", "model_version")
#: Column of the scores if there are candidates: the names of the sources that gave the item.
CANDIDATE_COLUMNS = {"source": "string"}
#: Columns of the scores if there are rules for lists.
RERANK_COLUMNS = {"propensity": "double", "reason": "string"}
#: Columns of items that candidates are made with; and of the scores where there are candidates.
ITEM_COLUMNS_OF_CANDIDATES = ("item_row", "events", "first_event")
_OF_SCORES = ("source", "sources")


class Score(Section):
    """Batch scoring of users x candidate items."""

    #: The users.
    user: Entity
    #: The items.
    item: Entity
    #: Length of each user's list.
    top_k: int = Field(default=10, ge=1)
    #: Constant values of the other columns that the features read.
    context: Mapping[str, Any] = Field(default_factory=dict)
    #: Which model of the day: the neural one, the XGBoost one, or the one that is better on the split `valid`; or
    #: second_stage: XGBoost behind the neural one (the section `second_stage`). With a gate, the champion of that kind
    #: in place of the day's own, and `today` the day's own, whatever its verdict. Or one of the registry, whichever day
    #: it was trained for: its version (`"7"`), or an alias (`"@champion"`).
    model: ModelChoice = "neural"
    #: best: the metric by which, of those that both are measured by (`train.evaluation.metrics`, HR and NDCG of
    #: `train.rank_group`); errors and losses are better where they are lower.
    metric: str = "auc"
    #: Rank by this task of `train.tasks`, such as a product of click and purchase; None: by the first one.
    output: str | None = None
    #: Leave out items that the user has clicked (label 1) since the training window began, validation included. With a
    #: split by a column of the source: those of the split train. any_label: all items of the user's events, such as
    #: those that the user rated low.
    exclude_seen: bool | Literal["any_label"] = False
    #: Score only users whose columns, candidates or model have changed since the run before; copy the others' rows.
    incremental: bool = False
    #: How tasks read the model's tables: mapped on each host, or row by row. Scores are the same.
    embeddings: ScoreEmbeddings = ScoreEmbeddings()
    #: Items that are ranked for a user; null: all.
    candidates: Candidates | None = None
    #: Filters that remove candidates: seen, bought, blocked, not available.
    filters: tuple[AnyFilter, ...] = ()
    #: The best items of each user by the model (of two stages, the first) that go on to the second stage, or to
    #: `rerank`; null: ten times `top_k`. Without either, `top_k` are kept.
    rank_depth: int | None = Field(default=None, ge=1)
    #: Rules of lists besides scores: diversity, fresh and new items, caps, exploration; null: the best by score.
    rerank: Rerank | None = None

    _text = field_validator("model", mode="before", json_schema_input_type=str | int)(version_as_text)

    @field_validator("metric")
    @classmethod
    def _has_a_better_side(cls, value: str) -> str:
        if value not in HIGHER_IS_BETTER:
            raise ValueError(f"'{value}' tells no better model from a worse; metrics: {', '.join(HIGHER_IS_BETTER)}")
        return value

    @property
    def row_columns(self) -> list[str]:
        """Return the columns of the scores table, besides `arms` of experiments."""
        optional = [*(CANDIDATE_COLUMNS if self.candidates else ()), *(RERANK_COLUMNS if self.rerank else ())]
        return ["ds", self.user.key, self.item.key, "rank", "score", "model_version", *optional]

    @property
    def of_registry(self) -> bool:
        """Return whether `model` is one of the registry."""
        return self.model[0] == "@" or self.model.isdecimal()

    @model_validator(mode="after")
    def _keys_are_free(self) -> Score:
        for side, key in (("user", self.user.key), ("item", self.item.key)):
            if key.lower() in SCORES_COLUMNS:
                raise ValueError(
                    f"{side}.key: '{key}' is the name of another column of the scores table "
                    f"({', '.join(SCORES_COLUMNS)}); rename the column"
                )
        return self

    @model_validator(mode="after")
    def _candidates_fit(self) -> Score:
        if self.candidates is None:
            if self.filters:
                raise ValueError("filters are of candidates: add candidates, or use exclude_seen alone")
            return self
        columns = {"user": [self.user.key, *self.user.columns], "item": [self.item.key, *self.item.columns]}
        for column in (*columns["user"], *columns["item"]):
            if column.lower() in ITEM_COLUMNS_OF_CANDIDATES or column.startswith("__"):
                raise ValueError(f"'{column}' is the name of a column that candidates make; rename the column")
        for side in ("user", "item"):
            if columns[side][0].lower() in _OF_SCORES:
                raise ValueError(
                    f"{side}.key: '{columns[side][0]}' is the name of a column that candidates add to the scores "
                    f"table; rename the column"
                )
        for name, source in self.candidates.sources.items():
            required = {"by": ("user", getattr(source, "by", ()))}
            if source.kind == "recent" and source.column is not None:
                required["column"] = ("item", (source.column,))
            for key, (side, names) in required.items():
                for column in names:
                    if column not in columns[side]:
                        raise ValueError(
                            f"candidates.sources.{name}.{key}: '{column}' is not in score.{side}.columns"
                            f"{nearest(column, columns[side])}"
                        )
        return self

    @property
    def ranked(self) -> int:
        """Return the number of items of each user that the (first) model keeps."""
        # What the registry or a gate gives may be of two stages.
        if self.rerank is None and self.model in ("neural", "baseline", "best"):
            return self.top_k
        return self.rank_depth or 10 * self.top_k

    @model_validator(mode="after")
    def _lists_fit(self) -> Score:
        if self.rank_depth is not None and self.rank_depth < self.top_k:
            raise ValueError(f"rank_depth is {self.rank_depth}, and top_k {self.top_k}: no list could be filled")
        if self.rerank is None:
            return self
        known = (self.item.key, *self.item.columns)
        for key, columns in self.rerank.columns_by_key().items():
            for column in columns:
                if column not in known:
                    raise ValueError(f"rerank.{key}: '{column}' is not in score.item.columns{nearest(column, known)}")
        reserved = {*(["events"] if self.rerank.new_items else []), "propensity", "reason"}
        if self.rerank.freshness is not None and self.rerank.freshness.column is None:
            reserved.add("first_event")
        for column in (self.user.key, *known):
            if column.lower() in reserved:
                raise ValueError(f"'{column}' is the name of a column that rerank makes; rename the column")
        for name in ("freshness", "new_items"):
            share = getattr(getattr(self.rerank, name), "share", None)
            if share is not None and share * self.top_k < 1:
                raise ValueError(
                    f"rerank.{name}.share: {share:g} of {self.top_k} items is less than one, so no item has a place"
                )
        return self


def check_score_sources(
    score: Score, sources: Mapping[str, NamedSource], event_time: str | None, columns: Collection[str] | None
) -> None:
    """Check that `score` reads declared columns of named sources and, for candidates, of the pipeline's own events.

    Args:
        score: the section.
        sources: of the pipeline.
        event_time: of its own events.
        columns: of its own events; None where operators add some (`features.prepare`).

    Raises:
        ValueError: a source or a column is not declared; names the nearest.
    """
    for key, entry in score_entries(score):
        name = getattr(entry, "from_", None)
        if name is None:
            if isinstance(entry, PairEvents) and entry.days is not None and event_time is None:
                raise ValueError(f"{key}.days: the events have no time (table.event_time)")
            if isinstance(entry, PairEvents) and columns is not None:
                _check_declared(key, entry, score, columns, "table.columns")
            continue
        if name not in sources:
            raise ValueError(f"{key}.from: '{name}' is no source of `sources`{nearest(name, sources)}")
        declared = [c.name for c in sources[name].table.columns]
        _check_declared(key, entry, score, declared, f"sources.{name}")


def _check_declared(path: str, entry: Section, score: Score, declared: Collection[str], place: str) -> None:
    for key, column in score_keys(entry, score):
        if column not in declared:
            hint = nearest(column, declared)
            raise ValueError(f"{path}.{key}: column '{column}' is not declared in {place}{hint}")


def score_entries(score: Score) -> Iterator[tuple[str, Section]]:
    """Yield the sections that may name a source, with their places in the spec."""
    yield "score.user", score.user
    yield "score.item", score.item
    if score.candidates is not None:
        for name, source in score.candidates.sources.items():
            yield f"score.candidates.sources.{name}", source
    for i, entry in enumerate(score.filters):
        yield f"score.filters[{i}]", entry


def score_keys(entry: Any, score: Score) -> Iterator[tuple[str, str]]:
    """Yield (key of the spec, column) that an entry of `score_entries` reads of its source."""
    if isinstance(entry, Entity):
        yield "key", entry.key
        return
    pairs = isinstance(entry, PairEvents)
    # Of events both keys are read; a table's are those that it names, an item's at least where items are listed.
    user, item = getattr(entry, "user", None), getattr(entry, "item", None)
    if user is not None or pairs:
        yield "user", user or score.user.key
    if item is not None or pairs or (getattr(entry, "kind", None) == "table" and hasattr(entry, "order")):
        yield "item", item or score.item.key
    if hasattr(entry, "order"):
        yield from (("by", column) for column in entry.by)
        if entry.order is not None:
            yield "order", entry.order
