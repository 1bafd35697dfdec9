"""Where a run is: the part of a checkpoint that is no tensor."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field


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

    @property
    def best(self) -> int | None:
        """Index in `evals` of the lowest log loss, the first of equals; None before the first evaluation."""
        losses = [math.inf if e["log_loss"] is None else e["log_loss"] for e in self.evals]
        return losses.index(min(losses)) if losses else None

    @property
    def best_step(self) -> int | None:
        """The step that `best` was evaluated at."""
        return None if self.best is None else int(self.evals[self.best]["step"] or 0)

    @property
    def evaluated_step(self) -> int | None:
        """The step of the last evaluation."""
        return int(self.evals[-1]["step"] or 0) if self.evals else None

    def has_stalled(self, patience: int | None) -> bool:
        """Whether the last `patience` evaluations did not improve on the one before them."""
        return patience is not None and self.best is not None and len(self.evals) - 1 - self.best >= patience
