"""What an evaluation is given: a rank's rows with what a model said of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.train.evaluation.policy import Choices
from headrace.train.evaluation.ranks import I64
from headrace.train.evaluation.rows import F32


@dataclass(frozen=True)
class Predictions:
    """Of this rank's rows of a split: logits and labels float32 [n]; carried columns [n]; codes int64 [n].

    Of further tasks (`train.tasks`) outputs and targets float32 [n], NaN where a row is none of the task's.

    In place of logits there may be any scores of which the evaluation's `probability` makes probabilities.
    choices: what the model as a policy would choose, where `train.evaluation.off_policy` asks for it.
    """

    logits: F32
    labels: F32
    carried: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    codes: Mapping[str, I64] = field(default_factory=dict)
    outputs: Mapping[str, F32] = field(default_factory=dict)
    targets: Mapping[str, F32] = field(default_factory=dict)
    choices: Choices | None = None

    def of_task(self, task: str) -> Predictions:
        """A further task's rows, with its outputs in place of the logits and its labels."""
        target = self.targets[task]
        known = ~np.isnan(target)
        return Predictions(
            self.outputs[task][known],
            target[known],
            {name: x[known] for name, x in self.carried.items()},
            {name: x[known] for name, x in self.codes.items()},
        )
