"""The learning rate of a step: a pure function of the step's number, so a resumed run needs no state to go on exactly.

- `constant`, and `step`: the rate times `factor` for each `every_steps` that have passed.
- `linear`, and `cosine` (Loshchilov and Hutter, "SGDR", 2017, without restarts): from the rate to `final` times it.

Before them the rate rises linearly over `warmup_steps` (Goyal et al., "Accurate, Large Minibatch SGD", 2017). The
kinds' steps are counted from the end of the warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from headrace.config import EmbeddingOptimizer, Optimizer, Schedule

#: (schedule, steps after the warm-up, how many of them there are) -> factor of the learning rate.
Curve = Callable[[Schedule, int, int], float]


def _constant(schedule: Schedule, step: int, steps: int) -> float:
    return 1.0


def _linear(schedule: Schedule, step: int, steps: int) -> float:
    return 1.0 - (1.0 - schedule.final) * step / steps


def _cosine(schedule: Schedule, step: int, steps: int) -> float:
    return schedule.final + (1.0 - schedule.final) * (1.0 + math.cos(math.pi * step / steps)) / 2.0


def _step(schedule: Schedule, step: int, steps: int) -> float:
    assert schedule.every_steps is not None
    return schedule.factor ** (step // schedule.every_steps)


CURVES: Mapping[str, Curve] = {"constant": _constant, "linear": _linear, "cosine": _cosine, "step": _step}


def learning_rate(optimizer: Optimizer | EmbeddingOptimizer, step: int, total: int) -> float:
    """The learning rate of step `step` (the first is 1) of `total`."""
    return optimizer.learning_rate * schedule_factor(optimizer.schedule, step, total)


def schedule_factor(schedule: Schedule, step: int, total: int) -> float:
    """The factor of the configured learning rate in step `step` (the first is 1) of `total`.

    The first step of a warm-up over n has 1/n of the rate, the n-th all of it. The last step of `linear` and `cosine`
    has `final` of it.
    """
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    left = max(1, total - schedule.warmup_steps - 1)
    return CURVES[schedule.kind](schedule, min(step - schedule.warmup_steps - 1, left), left)
