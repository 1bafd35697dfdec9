"""The section `score.rerank`: what makes a user's list out of ranked items besides their scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from headrace.config.section import Section

#: A share of a list.
Share = Annotated[float, Field(gt=0, le=1)]


class Diversity(Section):
    """Maximal marginal relevance (Carbonell and Goldstein, 1998): items unlike those that stand above them."""

    #: How alike two items are. vectors: the cosine of their vectors, of a model in retrieval form. Else columns of
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


class NewItems(Section):
    """A least share for items of which little is known yet."""

    #: An item is new if it has fewer events in the training rows.
    below_events: int = Field(default=20, ge=1)
    #: At least this share of every list's first n, rounded down, is new, as far as ranked items and caps allow.
    share: Share


class Explore(Section):
    """Positions drawn by chance, with the probability of what stands there written down (`propensity`).

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
    #: Of the draws; with ds and the user's key it decides them.
    seed: int = Field(default=1, ge=0)

    @model_validator(mode="after")
    def _one_way(self) -> Explore:
        if (self.epsilon is None) == (self.temperature is None):
            raise ValueError("give one of `epsilon` and `temperature`")
        return self


class Rerank(Section):
    """From the ranked items of a user to the list of `score.top_k`: position by position the best item that may stand
    there."""

    #: Null: none.
    diversity: Diversity | None = None
    #: Null: none.
    freshness: Freshness | None = None
    #: By column of `score.item`: how many items of a list may have the same value; those without a value are not
    #: counted. A list is shorter where too few items are left.
    caps: Mapping[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    #: Null: none.
    new_items: NewItems | None = None
    #: Null: nothing is left to chance, and every propensity is 1.
    explore: Explore | None = None

    @model_validator(mode="after")
    def _shares_fit(self) -> Rerank:
        total = sum(self.shares())
        if total > 1:
            raise ValueError(f"the shares of fresh and of new items are {total:g} together; a list has 1")
        return self

    def shares(self) -> tuple[float, ...]:
        """The least shares that rules ask for."""
        rules = (self.freshness, self.new_items)
        return tuple(rule.share for rule in rules if rule is not None and rule.share is not None)

    def columns(self) -> tuple[str, ...]:
        """The columns of items that the rules look at."""
        of_diversity = () if self.diversity is None or self.diversity.by == "vectors" else self.diversity.by
        of_freshness = () if self.freshness is None or self.freshness.column is None else (self.freshness.column,)
        return tuple(dict.fromkeys((*of_diversity, *of_freshness, *self.caps)))
