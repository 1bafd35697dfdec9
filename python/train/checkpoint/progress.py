"""Where a run is: the part of a checkpoint that is no tensor."""

from __future__ import annotations

import math
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from headrace.config import Spec, Train


class Monitor(NamedTuple):
    """The metric that says which evaluation is the best."""

    metric: str
    #: Whether a lower value is better.
    falls: bool

    @property
    def best(self) -> str:
        """`lowest log loss`."""
        return f"{'lowest' if self.falls else 'highest'} {self.metric.replace('_', ' ')}"


LOG_LOSS = Monitor("log_loss", True)


def monitor_of(train: Train, predicts: str) -> Monitor:
    """`train.monitor`. In place of the log loss of a model that predicts numbers rmse, of one that only orders the AUC.

    Args:
        train: the run's settings.
        predicts: of the model, see `ShardedModel.predicts`.
    """
    if predicts == "number":
        return Monitor("mae" if train.monitor == "mae" else "rmse", True)
    if predicts == "order" and train.monitor == LOG_LOSS.metric:
        return Monitor("auc", False)
    return Monitor(train.monitor, train.monitor_falls)


def spec_monitor(spec: Spec) -> Monitor:
    """`monitor_of` the neural model that a spec names, as far as the spec says what it predicts."""
    if spec.model.loss is not None:
        return monitor_of(spec.train, spec.model.loss.predicts)
    return monitor_of(spec.train, "number" if spec.features.label_type == "number" else "probability")


class Progress(BaseModel):
    """Where the loop is, and its history."""

    model_config = ConfigDict(extra="forbid")

    #: Steps taken.
    step: int = 0
    #: Seconds of training, over all runs.
    seconds: float = 0.0
    #: Sum of losses, steps and seconds since the last point of the curve.
    open_loss: float = 0.0
    open_steps: int = 0
    open_seconds: float = 0.0
    curve: list[dict[str, float]] = Field(default_factory=list)
    evals: list[dict[str, float | None]] = Field(default_factory=list)

    def best(self, monitor: Monitor = LOG_LOSS) -> int | None:
        """Index in `evals` of the best one, the first of equals; None before the first evaluation."""
        values = [e.get(monitor.metric) for e in self.evals]
        worst_first = [math.inf if v is None else v if monitor.falls else -v for v in values]
        return worst_first.index(min(worst_first)) if worst_first else None

    def best_step(self, monitor: Monitor = LOG_LOSS) -> int | None:
        """The step that `best` was evaluated at."""
        best = self.best(monitor)
        return None if best is None else int(self.evals[best]["step"] or 0)

    @property
    def evaluated_step(self) -> int | None:
        """The step of the last evaluation."""
        return int(self.evals[-1]["step"] or 0) if self.evals else None

    def has_stalled(self, patience: int | None, monitor: Monitor = LOG_LOSS) -> bool:
        """Whether the last `patience` evaluations did not improve on the one before them."""
        best = self.best(monitor)
        return patience is not None and best is not None and len(self.evals) - 1 - best >= patience
