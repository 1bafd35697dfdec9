"""What an evaluation is given: a rank's rows with what a model said of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from headrace.train.evaluation.ranks import I64
from headrace.train.evaluation.rows import F32


@dataclass(frozen=True)
class Predictions:
    """Of this rank's rows of a split: logits and labels float32 [n]; carried columns [n]; codes int64 [n].

    In place of logits there may be any scores of which the evaluation's `probability` makes probabilities.
    """

    logits: F32
    labels: F32
    carried: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    codes: Mapping[str, I64] = field(default_factory=dict)
