"""The section `score`: who is scored for what, by which model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from headrace.config.candidates import Candidates
from headrace.config.evaluation import HIGHER_IS_BETTER
from headrace.config.filters import AnyFilter
from headrace.config.rerank import Rerank
from headrace.config.section import Section
from headrace.errors import nearest


class Entity(Section):
    """One side of a score: its key and the columns that travel with it, taken from its newest event."""

    #: The column that says which one.
    key: str
    #: Columns that the features read, as its newest event has them.
    columns: tuple[str, ...] = ()
    #: Active within the training window, most events first; None: all.
    limit: int | None = None
    #: A named source with the key and what it has of the columns: its newest rows up to ds, those without events too.
    from_: str | None = Field(default=None, alias="from")

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), populate_by_name=True)


class ScoreEmbeddings(Section):
    """Where the tasks that score have a model's tables of embeddings."""

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
    """A version of the registry that was written as a number, as text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


#: Columns of the scores table besides the keys.
SCORES_COLUMNS = ("ds", "rank", "score", "model_version")
#: Columns of items that candidates are made with; and of the scores where there are candidates.
_OF_CANDIDATES = ("item_row", "events", "first_event")
_OF_SCORES = ("source", "sources")


class Score(Section):
    """Batch scoring of users x candidate items."""

    #: Who is scored for.
    user: Entity
    #: What is scored.
    item: Entity
    #: Scores kept for each user.
    top_k: int = Field(default=10, ge=1)
    #: The other columns that the features read: constants.
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
    #: Leave out items that the user has clicked (label 1) since the training window began (without a time: in train).
    exclude_seen: bool = False
    #: Score only users whose columns, candidates or model have changed since the run before; copy the others' rows.
    incremental: bool = False
    #: Where tasks have the model's tables: mapped on each host, or row by row. Scores are the same.
    embeddings: ScoreEmbeddings = ScoreEmbeddings()
    #: Which items are ranked for a user; null: all.
    candidates: Candidates | None = None
    #: What no candidate may be: seen, bought, blocked, not available.
    filters: tuple[AnyFilter, ...] = ()
    #: The best items of each user by the model (of two stages, the first) that go on to the second stage, or to
    #: `rerank`; null: ten times `top_k`. Without either, `top_k` are kept.
    rank_depth: int | None = Field(default=None, ge=1)
    #: Lists by more than scores: diversity, fresh and new items, caps, exploration; null: the best by score.
    rerank: Rerank | None = None

    _text = field_validator("model", mode="before")(version_as_text)

    @field_validator("metric")
    @classmethod
    def _has_a_better_side(cls, value: str) -> str:
        if value not in HIGHER_IS_BETTER:
            raise ValueError(f"'{value}' tells no better model from a worse; metrics: {', '.join(HIGHER_IS_BETTER)}")
        return value

    @property
    def of_registry(self) -> bool:
        """Whether `model` is one of the registry."""
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
            if column.lower() in _OF_CANDIDATES or column.startswith("__"):
                raise ValueError(f"'{column}' is the name of a column that candidates make; rename the column")
        for side in ("user", "item"):
            if columns[side][0].lower() in _OF_SCORES:
                raise ValueError(
                    f"{side}.key: '{columns[side][0]}' is the name of a column that candidates add to the scores "
                    f"table; rename the column"
                )
        for name, source in self.candidates.sources.items():
            asked = {"by": ("user", getattr(source, "by", ()))}
            if source.kind == "recent" and source.column is not None:
                asked["column"] = ("item", (source.column,))
            for key, (side, wanted) in asked.items():
                for column in wanted:
                    if column not in columns[side]:
                        raise ValueError(
                            f"candidates.sources.{name}.{key}: '{column}' is not in score.{side}.columns"
                            f"{nearest(column, columns[side])}"
                        )
        return self

    @property
    def ranked(self) -> int:
        """How many items of each user are kept by the (first) model."""
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
        for column in self.rerank.columns():
            if column not in known:
                raise ValueError(f"rerank: '{column}' is not in score.item.columns{nearest(column, known)}")
        made = {*(["events"] if self.rerank.new_items else []), "propensity", "reason"}
        if self.rerank.freshness is not None and self.rerank.freshness.column is None:
            made.add("first_event")
        for column in (self.user.key, *known):
            if column.lower() in made:
                raise ValueError(f"'{column}' is the name of a column that rerank makes; rename the column")
        for name in ("freshness", "new_items"):
            share = getattr(getattr(self.rerank, name), "share", None)
            if share is not None and share * self.top_k < 1:
                raise ValueError(
                    f"rerank.{name}.share: {share:g} of {self.top_k} items is less than one, so no item has a place"
                )
        return self
