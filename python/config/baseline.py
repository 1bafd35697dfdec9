"""The sections `baseline` and `second_stage`: XGBoost beside the neural model, and behind it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from headrace.config.features import Features
from headrace.config.score import Score
from headrace.config.section import Section
from headrace.config.train import Train
from headrace.config.warehouse import Publish

#: Keys whose names and defaults are XGBoost's own: passed on where the spec sets another value.
BOOSTER_KEYS = (
    "subsample",
    "colsample_bytree",
    "min_child_weight",
    "gamma",
    "reg_lambda",
    "reg_alpha",
    "scale_pos_weight",
    "max_bin",
    "grow_policy",
    "max_leaves",
    "max_cat_to_onehot",
    "max_cat_threshold",
)


class Trees(Section):
    """Settings of boosted trees: objective and growth."""

    #: classification: probabilities of a label of 0 or 1; ranking: LambdaMART (`rank:ndcg`) over the lists of `group`;
    #: regression: squared error.
    objective: Literal["classification", "ranking", "regression"] = "classification"
    #: ranking: a carried column, whose rows of one value are one list; null: `train.rank_group`.
    group: str | None = None
    #: Trees at most.
    rounds: int = Field(default=60, ge=1)
    #: Largest depth of a tree; 0: no limit, with `grow_policy: lossguide` and `max_leaves`.
    max_depth: int = Field(default=6, ge=0)
    #: Learning rate: the share of each tree that is added.
    learning_rate: float = Field(default=0.2, gt=0)
    #: Share of the rows that a tree is grown on.
    subsample: float = Field(default=1.0, gt=0, le=1)
    #: Share of the columns that a tree is grown on.
    colsample_bytree: float = Field(default=1.0, gt=0, le=1)
    #: The least sum of second derivatives (of squared error: rows) of a leaf.
    min_child_weight: float = Field(default=1.0, ge=0)
    #: The least gain of a split.
    gamma: float = Field(default=0.0, ge=0)
    #: L2 penalty of leaves' values.
    reg_lambda: float = Field(default=1.0, ge=0)
    #: L1 penalty of leaves' values.
    reg_alpha: float = Field(default=0.0, ge=0)
    #: classification: weight of positive rows.
    scale_pos_weight: float = Field(default=1.0, gt=0)
    #: Bins of a column's histogram.
    max_bin: int = Field(default=256, ge=2)
    #: Which leaf is split next: one of the lowest depth, or that with the greatest gain.
    grow_policy: Literal["depthwise", "lossguide"] = "depthwise"
    #: Leaves of a tree at most; 0: no limit.
    max_leaves: int = Field(default=0, ge=0)
    #: Split categorical features into sets of codes. Without it a code is a number, by frequency, and a split cuts
    #: popular values from rare ones.
    enable_categorical: bool = False
    #: With `enable_categorical`: a feature with more codes stays a number, as a histogram has a bin for each category.
    max_categories: int = Field(default=1_000, ge=2)
    #: With `enable_categorical`: a feature with fewer codes is split one code against the others.
    max_cat_to_onehot: int = Field(default=4, ge=1)
    #: With `enable_categorical`: codes of one side of a split at most.
    max_cat_threshold: int = Field(default=64, ge=1)
    #: Spark tasks that train together.
    workers: int = Field(default=2, ge=1)
    #: Train on at most this many rows, a deterministic sample.
    max_rows: int | None = 2_000_000

    @model_validator(mode="after")
    def _agrees(self) -> Trees:
        if self.group is not None and self.objective != "ranking":
            raise ValueError("`group` goes with `objective: ranking`")
        if self.scale_pos_weight != 1 and self.objective != "classification":
            raise ValueError("`scale_pos_weight` goes with `objective: classification`")
        if self.max_depth == 0 and not self.max_leaves:
            raise ValueError("`max_depth: 0` is no limit: set `max_leaves`")
        return self

    def booster_parameters(self) -> dict[str, Any]:
        """Return XGBoost's parameters besides rounds, depth and learning rate: those that are not at their defaults."""
        fields = type(self).model_fields
        return {k: getattr(self, k) for k in BOOSTER_KEYS if getattr(self, k) != fields[k].default}

    @property
    def column(self) -> str | None:
        """A carried column that is learned in place of `features.label`."""
        return None

    @property
    def stops_after(self) -> int | None:
        """Trees in a row that did not improve the split `valid`, after which no more are grown."""
        return None


class Baseline(Trees):
    """XGBoost on Spark (`xgboost.spark`) over the same dataset and split."""

    #: A carried column of numbers to learn in place of `features.label`; rows where it is null are left out.
    label: str | None = None
    #: Stop after this many trees in a row that did not improve the split `valid` (log loss; NDCG@`train.rank_k`; root
    #: mean squared error), and keep the trees up to the best one. Null: all `rounds`.
    early_stopping_rounds: int | None = Field(default=None, ge=1)

    @property
    def column(self) -> str | None:
        """See `Trees.column`."""
        return self.label

    @property
    def stops_after(self) -> int | None:
        """See `Trees.stops_after`."""
        return self.early_stopping_rounds


class SecondStage(Trees):
    """XGBoost on Spark over the dataset's features and the neural model's predictions (stacking: Wolpert, 1992).

    It learns from the split `valid`, of which the neural model has learned nothing, and is evaluated on the split
    `test` (`features.split.test_days`).
    """


def check_baseline(
    baseline: Baseline, train: Train, features: Features, score: Score | None, publish: Publish | None
) -> None:
    """Check the column of its lists, its labels, and that published scores are probabilities.

    Raises:
        ValueError: a check fails.
    """
    _check_trees("baseline", baseline, train, features)
    if baseline.label is not None and score and score.model == "best":
        raise ValueError(
            f"score.model is 'best', but the baseline learns '{baseline.label}' (baseline.label) and is measured "
            f"by it: no metric says which model is better; set score.model to 'neural' or 'baseline'"
        )
    if baseline.objective != "classification" and score and score.model in ("baseline", "best"):
        _refuse_to_publish("baseline", baseline, publish)


def check_second_stage(
    trees: SecondStage, train: Train, features: Features, score: Score | None, publish: Publish | None
) -> None:
    """Check that there are rows that the first model has not seen, for training and for evaluation.

    Raises:
        ValueError: there are none, or a check of `check_baseline` fails.
    """
    _check_trees("second_stage", trees, train, features)
    split = features.split
    if split.by == "position" or (split.by == "time" and not split.test_days):
        raise ValueError(
            "second_stage learns from the split valid and is evaluated on the split test, of which there is none: "
            "set features.split.test_days (by time), or split by a column"
        )
    if train.pretrained:
        raise ValueError(
            "second_stage learns from rows of which the neural model has learned nothing, and what the models of "
            "train.pretrained learned from is not known; leave one of the two out"
        )
    if trees.objective != "classification" and score and score.model == "second_stage":
        _refuse_to_publish("second_stage", trees, publish)


def _check_trees(name: str, trees: Trees, train: Train, features: Features) -> None:
    """Check that lists have a column, and that labels are learned."""
    if trees.objective == "ranking" and not (trees.group or train.rank_group):
        raise ValueError(f"{name}.objective is 'ranking': name the carried column of its lists, {name}.group")
    if trees.objective == "classification" and features.label_type == "number" and trees.column is None:
        another = ", or name a carried column of 0 and 1, baseline.label" if name == "baseline" else ""
        raise ValueError(
            f"features.label_type is 'number', and {name}.objective is 'classification': set it to "
            f"'regression'{another}"
        )


def _refuse_to_publish(name: str, trees: Trees, publish: Publish | None) -> None:
    if publish:
        raise ValueError(
            f"publish takes probabilities, and the scores of a {name} for {trees.objective} are none: set "
            f"score.model to 'neural', or leave publish out"
        )
