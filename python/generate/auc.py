"""What the best model could reach: the scores of the true probabilities against the clicks that came of them.

AUC is the chance that a clicked row has a higher score than one not clicked (ties count half: Hanley and McNeil, 1982),
so it depends on the ranks of the scores alone. No function of what a row shows ranks better, in expectation, than
P(click | row) itself (the Neyman-Pearson lemma): its AUC is the ceiling. On one day's rows a model can come out above
it by the labels' noise alone (an AUC's standard error is below 0.5 / sqrt(rows of the rarer class)).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.counter_random import Floats

#: Logits outside are counted in the outermost bins.
LOGIT_LIMIT = 16.0
BINS = 1 << 16


@dataclass(frozen=True)
class Histogram:
    """Weights of the two classes by bin of the score's logit; two of them add up. Bins are 2^-11 of a logit wide."""

    negative: Floats  # [BINS]
    positive: Floats  # [BINS]

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(self.negative + other.negative, self.positive + other.positive)


def histogram(logit: Floats, positive: Floats) -> Histogram:
    """Count rows by logit.

    Args:
        logit: float64 [n].
        positive: float64 [n], each row's weight as a positive; 1 - positive is its weight as a negative.
    """
    place = ((logit + LOGIT_LIMIT) * (BINS / (2.0 * LOGIT_LIMIT))).astype(np.int64).clip(0, BINS - 1)
    ones: Floats = np.bincount(place, weights=positive, minlength=BINS).astype(np.float64)
    return Histogram(np.bincount(place, minlength=BINS).astype(np.float64) - ones, ones)


def auc_of_histogram(counts: Histogram) -> float | None:
    """AUC with rows of one bin taken as ties; None where a class has no weight.

    At most half of the pairs within a bin are judged otherwise than the exact AUC judges them.
    """
    return _auc(counts.negative, counts.positive)


def auc(score: Floats, positive: Floats | NDArray[np.bool_]) -> float | None:
    """The exact AUC of n scores, ties counted half; None where a class has no weight.

    Args:
        score: float64 [n]; any increasing function of it gives the same AUC.
        positive: [n], 0/1 labels, or each row's probability of being a positive: then the result is the ratio of the
            expected number of well-ordered pairs to that of all pairs.
    """
    _, place = np.unique(score, return_inverse=True)
    ones: Floats = np.bincount(place, weights=positive.astype(np.float64)).astype(np.float64)
    return _auc(np.bincount(place).astype(np.float64) - ones, ones)


def _auc(negative: Floats, positive: Floats) -> float | None:
    """From weights of the classes at each distinct score, in increasing order of the score."""
    pairs = float(negative.sum()) * float(positive.sum())
    if pairs <= 0.0:
        return None
    below = np.cumsum(negative) - negative
    return float(np.dot(positive, below + 0.5 * negative)) / pairs
