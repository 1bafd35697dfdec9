"""The section `train.evaluation`: further metrics, slices of rows, intervals, full rankings, the value as a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from headrace.config.section import Section

ClickMetric = Literal["pr_auc", "normalized_entropy", "calibration_error", "error_rate"]
UserMetric = Literal["gauc", "user_auc"]
RankingMetric = Literal["recall_at_k", "mrr_at_k", "map_at_k"]
CatalogueMetric = Literal["popularity_at_k", "popularity_lift_at_k", "novelty_at_k", "coverage_at_k"]
#: Metrics by which models may be told apart, and whether a higher value is better.
HIGHER_IS_BETTER = {
    **dict.fromkeys(("auc", "hr_at_k", "ndcg_at_k", "r2", "pr_auc"), True),
    **dict.fromkeys(get_args(UserMetric), True),
    **dict.fromkeys(get_args(RankingMetric), True),
    **dict.fromkeys(("log_loss", "normalized_entropy", "calibration_error", "error_rate", "rmse", "mae"), False),
}


class Slice(Section):
    """A rule that slices rows; written as text, it is the expression."""

    #: Over carried columns, in the words of `lambda`: `country`, `age < 30`, `case when ... end`. A value is a slice.
    expression: str | None = None
    #: A categorical feature: rows whose value is in the split `train`, and rows whose value is new.
    seen: str | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Slice:
        if (self.expression is None) == (self.seen is None):
            raise ValueError("write an expression, or {seen: a categorical feature}")
        return self


def _slice(value: Any) -> Any:
    return {"expression": value} if isinstance(value, str) else value


def _numbers(value: Any) -> Any:
    return (value,) if isinstance(value, int) else value


class Bootstrap(Section):
    """Intervals by a Poisson bootstrap over users (headrace.train.evaluation.bootstrap)."""

    #: Replicates; each costs about a pass over the sorted predictions.
    replicates: int = Field(default=200, ge=2)
    #: Share of the replicates that an interval holds.
    confidence: float = Field(default=0.95, gt=0, lt=1)
    #: Seed of the draws.
    seed: int = Field(default=1, ge=0)


class FullRanking(Section):
    """HR, NDCG, Recall, MRR and MAP at k among all items of the vocabulary (headrace.train.evaluation.full_ranking).

    For models in retrieval form. Relevant items of a user are those of the positive rows of the split, without those
    that are left out of the ranking. A metric is named `ndcg_at_20_full`.
    """

    #: Number of places of a list that count; one number or several.
    k: Annotated[
        tuple[Annotated[int, Field(ge=1)], ...],
        BeforeValidator(_numbers, json_schema_input_type=int | tuple[Annotated[int, Field(ge=1)], ...]),
    ] = Field(default=(20,), min_length=1)
    #: A carried column: the rows of a user are one list. Null: each positive row is a list of its own.
    user: str | None = None
    #: A carried column of numbers: a user's vector is that of the row where it is smallest; null: of the first row that
    #: the dataset has, as where a user's rows are alike.
    order_by: str | None = None
    #: A list feature of the items that a row's user has seen, which are left out of the ranking.
    exclude: str | None = None
    #: Splits whose positive rows say what a user has seen, which is left out of the ranking.
    seen: tuple[Literal["train", "valid"], ...] = ()
    #: The splits that are measured, where the dataset has them.
    splits: tuple[Literal["valid", "test"], ...] = Field(default=("valid", "test"), min_length=1)

    @model_validator(mode="after")
    def _of_users(self) -> FullRanking:
        for name, value in (("seen", self.seen), ("order_by", self.order_by)):
            if value and self.user is None:
                raise ValueError(f"`{name}` is of users: name a carried column, `user`")
        return self

    def metrics(self) -> list[str]:
        """Return the names of the metrics."""
        return [f"{name}_at_{k}_full" for k in self.k for name in ("hr", "ndcg", "recall", "mrr", "map")]


class OffPolicy(Section):
    """The model's value as a policy: it chooses the action of each logged row among all that training has seen.

    Of events whose actions were drawn, with a known probability each, such as those of a bandit.
    """

    #: A carried column: with which probability, above 0, the logging policy chose the row's action.
    propensity: str
    #: A categorical feature: the row's action.
    action: str
    #: Features that follow from the action alone, such as an item's price; they change with it.
    action_features: tuple[str, ...] = ()
    #: A carried column of numbers; null: the label.
    reward: str | None = None
    #: softmax: actions with probabilities by logit / temperature; greedy: the action with the highest logit.
    policy: Literal["softmax", "greedy"] = "softmax"
    #: softmax: lower is nearer to greedy.
    temperature: float = Field(default=1.0, gt=0)
    #: Importance weights are cut off here: less variance, more bias. Null: they are not.
    max_weight: float | None = Field(default=None, gt=0)


class Evaluation(Section):
    """Metrics at the end of training, besides auc, log_loss, calibration, base_rate, and HR and NDCG of `rank_group`.

    The split `valid`, the split `test` where the dataset has one (`features.split`), and the lists of the split `rank`.
    """

    #: Further metrics (docs/evaluation.md). Those of users need `user`, those at k `rank_group`, popularity, novelty
    #: and coverage `item` too.
    metrics: tuple[ClickMetric | UserMetric | RankingMetric | CatalogueMetric, ...] = ()
    #: A carried column with the user, for metrics of users and for intervals.
    user: str | None = None
    #: A categorical feature: the items of the lists of the split `rank`.
    item: str | None = None
    #: Slices by name; each has all metrics.
    slices: Mapping[str, Annotated[Slice, BeforeValidator(_slice, json_schema_input_type=str | Slice)]] = Field(
        default_factory=dict
    )
    #: Values of an expression that become slices at most, the most frequent; the others are one slice.
    max_slices: int = Field(default=20, ge=1)
    #: Intervals of all metrics but coverage; null: none. The lists of the split `rank` are drawn as users are.
    bootstrap: Bootstrap | None = None
    #: Rankings of all items, seen ones left out; null: none.
    full_ranking: FullRanking | None = None
    #: The value of the model as a policy, by the logged propensities: ips, snips, dm, dr (docs/evaluation.md).
    off_policy: OffPolicy | None = None

    def wants(self, *kinds: Any) -> list[str]:
        """Return the requested metrics of some kinds."""
        known = {m for kind in kinds for m in get_args(kind)}
        return [m for m in self.metrics if m in known]

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Evaluation:
        if self.user is None:
            if unmet := self.wants(UserMetric):
                raise ValueError(f"{unmet[0]} is of users: name a carried column, `user`")
            if self.bootstrap is not None:
                raise ValueError("bootstrap draws users: name a carried column, `user`")
        if self.item is None and (unmet := self.wants(CatalogueMetric)):
            raise ValueError(f"{unmet[0]} is of items: name a categorical feature, `item`")
        return self
