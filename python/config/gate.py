"""The section `gate`: what a new model must be, beside the champion, to become it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from headrace.config.evaluation import HIGHER_IS_BETTER, Bootstrap
from headrace.config.metric_expression import MetricExpression
from headrace.config.section import NAME, Section

#: Which number of a paired difference is held against its limit.
Bound = Literal["low", "value", "high"]


class MetricLimit(Section):
    """How high a metric must be at least, or may be at most."""

    #: The least that passes.
    min: float | None = None
    #: The most that passes.
    max: float | None = None

    @model_validator(mode="after")
    def _one(self) -> MetricLimit:
        if self.min is None and self.max is None:
            raise ValueError("give `min`, `max` or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min is {self.min:g}, and max {self.max:g}: nothing passes")
        return self


class NoWorse(Section):
    """By how much a metric may be worse than the champion's on the same rows; written as a number, it is `by`."""

    #: In units of the metric, whichever side of it is the better one.
    by: float = Field(ge=0)
    #: low: even the lower end of the paired interval passes (surely no worse); value: the difference itself; high:
    #: only what is surely worse is refused.
    bound: Bound = "low"


class SlicesNoWorse(Section):
    """By how much a metric of each slice may be worse than the champion's; written as a number, it is `by`."""

    #: In units of the metric, whichever side of it is the better one.
    by: float = Field(ge=0)
    #: As of `champion`. Slices are many and small: by default only what is surely worse is refused.
    bound: Bound = "high"
    #: Slices of `train.evaluation.slices`; empty: all.
    of: tuple[str, ...] = ()
    #: Slices with fewer rows are not judged.
    min_rows: int = Field(default=100, ge=1)


class CalibrationLimits(Section):
    """How far predicted probabilities may be from what happened."""

    #: Sum of predictions over sum of labels: the least and the most.
    ratio: tuple[float, float] | None = None
    #: Expected calibration error, over parts of nearly equal size.
    max_error: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _in_order(self) -> CalibrationLimits:
        if self.ratio is not None and self.ratio[0] > self.ratio[1]:
            raise ValueError(f"ratio: [{self.ratio[0]:g}, {self.ratio[1]:g}] has nothing between")
        return self


class CoverageLimits(Section):
    """Of how much of the day the model has something to say."""

    #: Rows that the model was measured on, at least.
    min_rows: int | None = Field(default=None, ge=1)
    #: Share of the rows of which it gives a finite number.
    min_finite: float = Field(default=1.0, ge=0, le=1)
    #: By categorical feature, the share of the rows' values that its vocabulary has.
    min_known: Mapping[str, Annotated[float, Field(ge=0, le=1)]] = Field(default_factory=dict)


class DriftLimits(Section):
    """How far the day may be from the training range, and its scores from the champion's."""

    #: Population stability index of any column, as the stage `drift` has counted it.
    max_psi: float | None = Field(default=None, ge=0)
    #: Columns over a limit of the section `drift`.
    max_columns: int | None = Field(default=None, ge=0)
    #: Population stability index of the model's predictions against the champion's, of the same rows.
    max_score_psi: float | None = Field(default=None, ge=0)


class SizeLimits(Section):
    """How large the saved model may be."""

    #: Bytes of its folder, and of the folders that it lies upon.
    max_bytes: int | None = Field(default=None, ge=1)
    #: Its bytes over the champion's.
    max_growth: float | None = Field(default=None, gt=0)


class LatencyLimits(Section):
    """How fast the saved model must be on one core, from raw rows to predictions."""

    #: Rows a second.
    min_rows_per_second: float | None = Field(default=None, gt=0)
    #: Milliseconds for `batch_rows` rows: the median.
    max_batch_ms: float | None = Field(default=None, gt=0)
    #: Rows of a batch.
    batch_rows: int = Field(default=1_024, ge=1, le=65_536)


def _number_is_by(value: Any) -> Any:
    return {"by": value} if isinstance(value, (int, float)) and not isinstance(value, bool) else value


class Gate(Section):
    """Rules for a new model. One that breaks any is registered, and the champion goes on scoring.

    Both models predict the same rows of the day, each by its own saved workflow. Without the section each day's model
    becomes the champion.
    """

    #: Which of the day's models is judged, and scores where `score.model` asks for none of its own.
    model: Literal["neural", "baseline", "second_stage"] = "neural"
    #: The rows; null: `test` where the dataset has it, else `valid`.
    split: Literal["valid", "test"] | None = None
    #: By metric (those of the model's own evaluation, too).
    metrics: Mapping[str, MetricLimit] = Field(default_factory=dict)
    #: By metric, how much worse than the champion.
    champion: Mapping[str, Annotated[NoWorse, BeforeValidator(_number_is_by)]] = Field(default_factory=dict)
    #: By metric, how much worse than the champion in any slice of `train.evaluation.slices`.
    slices: Mapping[str, Annotated[SlicesNoWorse, BeforeValidator(_number_is_by)]] = Field(default_factory=dict)
    #: Of probabilities.
    calibration: CalibrationLimits = CalibrationLimits()
    #: Of rows and of values.
    coverage: CoverageLimits = CoverageLimits()
    #: Of columns (the section `drift`) and of scores.
    drift: DriftLimits = DriftLimits()
    #: Of the saved model.
    size: SizeLimits = SizeLimits()
    #: Of the saved model.
    latency: LatencyLimits = LatencyLimits()
    #: Conditions over metrics by a name of your own: `auc >= champion.auc - 0.001 and log_loss < 0.5`.
    rules: Mapping[str, str] = Field(default_factory=dict)
    #: Paired intervals of the differences from the champion, over `train.evaluation.user`.
    bootstrap: Bootstrap = Bootstrap()
    #: A challenger that was trained on the day is judged by the same rules on the same rows. report: its verdict is
    #: written; promote: besides, one that passes becomes the champion where it is better by `train.monitor` than the
    #: version that would be champion without it, by more than `challenger.behind`.
    challenger: Literal["report", "promote"] = "report"

    @field_validator("champion", "slices")
    @classmethod
    def _have_a_better_side(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        for metric in value:
            if metric not in HIGHER_IS_BETTER:
                raise ValueError(
                    f"'{metric}' tells no better model from a worse; metrics: {', '.join(HIGHER_IS_BETTER)}"
                )
        return value

    @field_validator("rules")
    @classmethod
    def _are_conditions(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for name, text in value.items():
            if not NAME.fullmatch(name):
                raise ValueError(f"'{name}' must match {NAME.pattern}")
            MetricExpression.parse(text)
        return value

    @property
    def stage(self) -> str:
        """The stage whose model is judged."""
        return "train" if self.model == "neural" else self.model

    def expressions(self) -> dict[str, MetricExpression]:
        """The rules, parsed."""
        return {name: MetricExpression.parse(text) for name, text in self.rules.items()}

    def metric_names(self) -> list[str]:
        """All metrics that a rule names."""
        named = [*self.metrics, *self.champion, *self.slices]
        for rule in self.expressions().values():
            named += [*rule.names, *rule.champion_names]
        return list(dict.fromkeys(named))
