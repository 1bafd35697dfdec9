"""Whether one model is better than another: a paired bootstrap test over users (Efron and Tibshirani, 1993, ch. 16).

A replicate counts a user as seed, replicate and user say (headrace.train.evaluation.bootstrap), whoever predicts: two
models' values in one replicate are of the same users, drawn alike, and their difference is that of a paired draw. So
nothing is kept of a model but a number for each metric and replicate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.storage import Location

#: By split and metric, the value in each replicate, None where it is undefined.
Replicates = Mapping[str, Mapping[str, Sequence[float | None]]]


@dataclass(frozen=True)
class Difference:
    """How much greater a metric is than the other model's.

    low, high: the middle `confidence` of the replicates' differences. p: two-sided, of the hypothesis that there is no
    difference: twice the share of the replicates whose difference is not on the side of most, the rows themselves
    counted as one (so it is at least 2 / (replicates + 1)), at most 1.
    """

    value: float
    low: float
    high: float
    p: float


def difference(
    mine: float | None,
    other: float | None,
    my_replicates: Sequence[float | None],
    other_replicates: Sequence[float | None],
    confidence: float,
) -> Difference | None:
    """The difference of two models' values of a metric.

    Args:
        mine: of the rows as they are.
        other: the other model's.
        my_replicates: in each replicate.
        other_replicates: the other model's, of the same draws.
        confidence: the share of the replicates' differences that the interval holds.

    Returns:
        None where a value is undefined, or in more than half of the replicates.

    Raises:
        ValueError: other numbers of replicates: these were not drawn together.
    """
    if len(my_replicates) != len(other_replicates):
        raise ValueError(f"{len(my_replicates)} replicates and {len(other_replicates)} were not drawn together")
    if mine is None or other is None or not my_replicates:
        return None
    drawn = np.array(my_replicates, np.float64) - np.array(other_replicates, np.float64)
    drawn = drawn[~np.isnan(drawn)]
    if 2 * len(drawn) < len(my_replicates):
        return None
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail]).tolist()
    beyond = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    return Difference(mine - other, low, high, min(1.0, 2 * (1 + beyond) / (1 + len(drawn))))


def write_replicates(file: Location, replicates: Replicates) -> None:
    """Keep the replicates of a run's splits; nothing where there are none."""
    if any(replicates.values()):
        file.put_text(json.dumps(replicates))


def read_replicates(file: Location) -> Replicates | None:
    """What `write_replicates` has kept; None where it has not."""
    try:
        found: Replicates = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found
