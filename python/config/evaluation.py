"""The section `train.evaluation`: further metrics, slices, intervals, full rankings and off-policy evaluation."""

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
    """A rule that slices rows; a text stands for its `expression`."""

    #: Expression over carried columns, in the language of `lambda`: `country`, `age < 30`, `case when ... end`. Each of
    #: its values is a slice.
    expression: str | None = None
    #: A categorical feature, for two slices: rows whose value is in the split `train`, and rows whose value is new.
    seen: str | None = None

    @model_validator(mode="after")
    def _check_one_kind(self) -> Slice:
        if (self.expression is None) == (self.seen is None):
            raise ValueError("write an expression, or {seen: a categorical feature}")
        return self


def _slice(value: Any) -> Any:
    return {"expression": value} if isinstance(value, str) else value


def _numbers(value: Any) -> Any:
    return (value,) if isinstance(value, int) else value


class Bootstrap(Section):
    """Intervals by a Poisson bootstrap over users (headrace.train.evaluation.bootstrap)."""

    #: Number of replicates; each takes about one pass over the sorted predictions.
    replicates: int = Field(default=200, ge=2)
    #: Share of the replicates within an interval.
    confidence: float = Field(default=0.95, gt=0, lt=1)
    #: Seed of the draws.
    seed: int = Field(default=1, ge=0)


class FullRanking(Section):
    """HR, NDCG, Recall, MRR and MAP at k among all items of the vocabulary (headrace.train.evaluation.full_ranking).

    For models in retrieval form. A user's relevant items are those of the split's positive rows, except items that are
    left out of the ranking. A metric's name is like `ndcg_at_20_full`.
    """

    #: Length of the lists that are measured; one number or several.
    k: Annotated[
        tuple[Annotated[int, Field(ge=1)], ...],
        BeforeValidator(_numbers, json_schema_input_type=int | tuple[Annotated[int, Field(ge=1)], ...]),
    ] = Field(default=(20,), min_length=1)
    #: A carried column with the user: all rows of a user are one list. Null: each positive row is a list of its own.
    user: str | None = None
    #: A carried column of numbers: a user's vector is that of the row with the smallest number. Null: that of the
    #: user's first row in the dataset, for users whose rows are alike.
    order_by: str | None = None
    #: A list feature with the items that the row's user has seen, which are left out of the ranking.
    exclude: str | None = None
    #: Splits whose positive rows are items that a user has seen, which are left out of the ranking.
    seen: tuple[Literal["train", "valid"], ...] = ()
    #: The splits that are measured, where the dataset has them.
    splits: tuple[Literal["valid", "test"], ...] = Field(default=("valid", "test"), min_length=1)

    @model_validator(mode="after")
    def _check_user(self) -> FullRanking:
        for name, value in (("seen", self.seen), ("order_by", self.order_by)):
            if value and self.user is None:
                raise ValueError(f"`{name}` is of users: name a carried column, `user`")
        return self

    def metrics(self) -> list[str]:
        """Return the names of the metrics."""
        return [f"{name}_at_{k}_full" for k in self.k for name in ("hr", "ndcg", "recall", "mrr", "map")]


class OffPolicy(Section):
    """The value of the model as a policy: for each logged row it chooses among all actions in the training data.

    The events' actions must have been drawn with known probabilities, as by a bandit.
    """

    #: A carried column with the probability, above 0, by which the logging policy chose the row's action.
    propensity: str
    #: A categorical feature with the row's action.
    action: str
    #: Features that depend only on the action, such as an item's price; they change with it.
    action_features: tuple[str, ...] = ()
    #: A carried column with the reward, a number; null: the label.
    reward: str | None = None
    #: softmax: actions with probabilities by logit / temperature; greedy: the action with the highest logit.
    policy: Literal["softmax", "greedy"] = "softmax"
    #: Temperature of softmax; lower values are closer to greedy.
    temperature: float = Field(default=1.0, gt=0)
    #: Largest importance weight; larger ones are clipped to it, for less variance and more bias. Null: no limit.
    max_weight: float | None = Field(default=None, gt=0)


class Evaluation(Section):
    """Metrics at the end of training, besides auc, log_loss, calibration, base_rate, and HR and NDCG of `rank_group`.

    They are measured on the split `valid`, on the split `test` if the dataset has one (`features.split`), and on the
    lists of the split `rank`.
    """

    #: Further metrics (docs/evaluation.md). Metrics of users need `user`. Metrics at k need `rank_group`; popularity,
    #: novelty and coverage also need `item`.
    metrics: tuple[ClickMetric | UserMetric | RankingMetric | CatalogueMetric, ...] = ()
    #: A carried column with the user, for metrics of users and for intervals.
    user: str | None = None
    #: A categorical feature with the item, for metrics of the lists of the split `rank`.
    item: str | None = None
    #: Slices by name; all metrics are measured on each.
    slices: Mapping[str, Annotated[Slice, BeforeValidator(_slice, json_schema_input_type=str | Slice)]] = Field(
        default_factory=dict
    )
    #: Most slices of an expression: one for each of its most frequent values; all other values are one more slice.
    max_slices: int = Field(default=20, ge=1)
    #: Intervals of all metrics but coverage; null: none. The lists of the split `rank` are resampled as users are.
    bootstrap: Bootstrap | None = None
    #: Metrics of rankings of all items but those seen; null: none.
    full_ranking: FullRanking | None = None
    #: The value of the model as a policy, by the logged propensities: ips, snips, dm, dr (docs/evaluation.md).
    off_policy: OffPolicy | None = None

    def metrics_of(self, *kinds: Any) -> list[str]:
        """Return the requested metrics of some kinds."""
        known = {m for kind in kinds for m in get_args(kind)}
        return [m for m in self.metrics if m in known]

    @model_validator(mode="after")
    def _check_columns(self) -> Evaluation:
        if self.user is None:
            if unmet := self.metrics_of(UserMetric):
                raise ValueError(f"{unmet[0]} is of users: name a carried column, `user`")
            if self.bootstrap is not None:
                raise ValueError("bootstrap draws users: name a carried column, `user`")
        if self.item is None and (unmet := self.metrics_of(CatalogueMetric)):
            raise ValueError(f"{unmet[0]} is of items: name a categorical feature, `item`")
        return self
