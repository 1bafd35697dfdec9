"""The section `score`: who is scored for what, by which model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from headrace.config.evaluation import HIGHER_IS_BETTER
from headrace.config.section import Section


class Entity(Section):
    """One side of a score: its key and the columns that travel with it, taken from its newest event."""

    #: The column that says which one.
    key: str
    #: Columns that the features read, as its newest event has them.
    columns: tuple[str, ...] = ()
    #: Active within the training window, most events first; None: all.
    limit: int | None = None


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
    #: Which registered model: the neural one, the XGBoost one, or the one that is better on the split `valid`.
    model: Literal["neural", "baseline", "best"] = "neural"
    #: best: the metric by which, of those that both are measured by (`train.evaluation.metrics`, HR and NDCG of
    #: `train.rank_group`); errors and losses are better where they are lower.
    metric: str = "auc"
    #: Rank by this task of `train.tasks`, such as a product of click and purchase; None: by the first one.
    output: str | None = None
    #: Leave out items that the user has clicked (label 1) since the training window began (without a time: in train).
    exclude_seen: bool = False

    @field_validator("metric")
    @classmethod
    def _has_a_better_side(cls, value: str) -> str:
        if value not in HIGHER_IS_BETTER:
            raise ValueError(f"'{value}' tells no better model from a worse; metrics: {', '.join(HIGHER_IS_BETTER)}")
        return value

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Fingerprints of specs that compare by AUC, and rank by the first output, are those from before."""
        dumped: dict[str, Any] = serialize(self)
        if self.metric == "auc":
            dumped.pop("metric", None)
        if self.output is None:
            dumped.pop("output", None)
        return dumped
