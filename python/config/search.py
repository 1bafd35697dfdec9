"""The section `train.search`: a search of hyper-parameters by short runs (headrace.train.search.tuner)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from headrace.config.section import Section

#: What a trial may change. The dataset is there already, and how fast or how safely a run is made changes no weight.
SEARCHABLE = ("model", "train.batch_size", "train.dense", "train.embeddings", "train.negatives", "train.warm_decay")


class Parameter(Section):
    """The values of one field that are tried: `{low, high}`, both inclusive, or `{choices}`."""

    #: Least value of a range.
    low: float | None = None
    #: Greatest value of a range.
    high: float | None = None
    #: Draw evenly over the logarithm.
    log: bool = False
    #: Values are `low` plus a multiple of this.
    step: float | None = Field(default=None, gt=0)
    #: Any values that the field takes, lists and null too.
    choices: tuple[Any, ...] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Parameter:
        ranged = self.low is not None and self.high is not None
        if ranged == (self.choices is not None) or (self.low is None) != (self.high is None):
            raise ValueError("write {low: ..., high: ...} or {choices: [...]}")
        if self.choices is not None:
            if not self.choices:
                raise ValueError("choices is empty")
            if self.log or self.step:
                raise ValueError("log and step are of ranges, not of choices")
        if self.low is not None and self.high is not None:
            if self.low >= self.high:
                raise ValueError(f"low ({self.low:g}) must be below high ({self.high:g})")
            if self.log and self.low <= 0:
                raise ValueError(f"a logarithmic range begins above 0, not at {self.low:g}")
            if self.log and self.step:
                raise ValueError("a range has log or step, not both")
        return self


class Search(Section):
    """What `headrace tune` tries, and for how long."""

    #: Spec field (`train.dense.learning_rate`) -> its values.
    parameters: Mapping[str, Parameter] = Field(min_length=1)
    #: Trials in all, those of earlier runs of the same search included.
    trials: int = Field(default=20, ge=1)
    #: Of the split `valid` (auc, log_loss) or `rank` (ndcg). ndcg is known at the end of a trial only, and needs
    #: train.rank_group; until then a trial is judged by its AUC.
    objective: Literal["auc", "log_loss", "ndcg"] = "auc"
    #: Rows of the splits that a trial sees at most: row groups evenly over the split, of each the same share of rows.
    rows: int = Field(default=500_000, ge=1)
    #: Rows of the split that judges a trial, at most.
    valid_rows: int = Field(default=200_000, ge=1)
    #: A trial's length: passes over its rows, and at most so many steps, and no further than the first evaluation after
    #: so many seconds.
    epochs: int = Field(default=1, ge=1)
    #: Steps of a trial at most; null: not limited.
    steps: int | None = Field(default=None, ge=1)
    #: Seconds of a trial, to the next evaluation; null: not limited.
    seconds: float | None = Field(default=None, gt=0)
    #: Evaluations in a trial, at equal distances, besides the ends of epochs.
    evaluations: int = Field(default=4, ge=1)
    #: End a trial whose evaluation is below the median of the earlier trials' at the same place.
    prune: bool = True
    #: Trials before the first that is pruned, and before parameters are drawn where earlier trials were good.
    warmup_trials: int = Field(default=5, ge=1)
    #: Of the sampler of parameters.
    seed: int = 1
