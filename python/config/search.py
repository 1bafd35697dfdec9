"""The section `train.search`: a search of hyper-parameters by short runs (headrace.train.search.tuner)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field, model_validator

from headrace.config.compare import ModelVariant
from headrace.config.evaluation import HIGHER_IS_BETTER
from headrace.config.model_args import MODEL_ARGS
from headrace.config.paths import annotation_at, number_type
from headrace.config.section import Section

#: What a trial may change. The dataset is there already, and how fast or how safely a run is made changes no weight.
SEARCHABLE = (
    "model",
    "train.batch_size",
    "train.dense",
    "train.embeddings",
    "train.negatives",
    "train.unknown_rate",
    "train.warm_decay",
)
#: How long a run is, the search says.
_OF_TRIALS = ("epochs", "max_steps", "patience", "eval_steps", "accumulate")


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


def parameter_type(spec: type[BaseModel], path: str, parameter: Parameter, kind: str) -> type[int] | type[float] | None:
    """What numbers a parameter takes; None: none.

    Args:
        spec: the whole pipeline's class.
        path: of the field.
        parameter: its values. Of a class of one's own it is not known what its arguments are: whole numbers where the
            ends and the step are.
        kind: `model.class`.

    Raises:
        KeyError: there is no such field.
    """
    argument = path.removeprefix("model.args.")
    if argument == path:
        return number_type(annotation_at(spec, path))
    if kind in MODEL_ARGS:
        return number_type(annotation_at(MODEL_ARGS[kind], argument))
    if ":" not in kind:
        raise KeyError(path)
    whole = all(x is None or x == int(x) for x in (parameter.low, parameter.high, parameter.step))
    return int if whole else float


class SearchedModel(ModelVariant):
    """A model that trials may have in place of the pipeline's own."""

    #: Spec field -> its values, of this model alone, besides those of all.
    parameters: Mapping[str, Parameter] = Field(default={})

    @model_validator(mode="after")
    def _trials_of_networks(self) -> SearchedModel:
        if self.baseline is not None:
            raise ValueError("`baseline`: trials train networks; compare trees with them by the section compare")
        if found := [key for key in _OF_TRIALS if key in self.train]:
            raise ValueError(f"'{found[0]}' of all trials is what train.search says")
        return self


class Search(Section):
    """What `headrace tune` tries, and for how long."""

    #: Spec field (`train.dense.learning_rate`) -> its values.
    parameters: Mapping[str, Parameter] = Field(default={})
    #: Models by name, one of which each trial has, with parameters of its own.
    models: Mapping[str, SearchedModel] = Field(default={})
    #: Trials in all, those of earlier runs of the same search included.
    trials: int = Field(default=20, ge=1)
    #: Seconds of all trials together, those of earlier runs included: none begins after them. null: not limited.
    total_seconds: float | None = Field(default=None, gt=0)
    #: What a trial is judged by, at each of its evaluations: a metric of the split `valid` (auc, log_loss, gauc, ...),
    #: of the lists of `rank` (ndcg, hr_at_k, recall_at_k, ...; these need train.rank_group), or of a full ranking of
    #: `valid` (ndcg_at_20_full, ...; these need train.evaluation.full_ranking).
    objective: str = "auc"
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

    @model_validator(mode="after")
    def _something_to_try(self) -> Search:
        if not self.parameters and not self.models:
            raise ValueError("name parameters, or models")
        return self

    @property
    def metric(self) -> str:
        """The objective's name among the metrics."""
        return "ndcg_at_k" if self.objective == "ndcg" else self.objective

    @property
    def of_lists(self) -> bool:
        """Whether the objective is of the lists of the split `rank`."""
        return self.metric.endswith("_at_k")

    def parameters_of(self, model: str | None) -> dict[str, Parameter]:
        """The parameters of a trial by path, those of one of `models` in place of those of all."""
        return {**self.parameters, **(self.models[model].parameters if model else {})}

    @property
    def maximizes(self) -> bool:
        """Whether a higher value is better."""
        return HIGHER_IS_BETTER.get(self.metric, True)
