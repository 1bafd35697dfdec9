"""The rows of an evaluation on one rank, and their scores as whole numbers of the same order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import UserError
from headrace.train.evaluation.bootstrap import F64
from headrace.train.evaluation.ranks import I64, Ranks

F32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Dimension:
    """What rows are sliced by: a name, and its values. A row has the position of its value, -1 where it is none."""

    name: str
    values: tuple[str, ...]


#: All rows as one slice.
OVERALL = Dimension("", ("",))


@dataclass(frozen=True)
class ScoredRows:
    """This rank's rows.

    scores: float32 [n], logits or probabilities; labels: bool [n]; users: int64 [n], ids or hashes, or None;
    slices: for each dimension the position of the row's value, int64 [n].
    """

    scores: F32
    labels: Bools
    users: I64 | None = None
    slices: tuple[I64, ...] = ()

    @staticmethod
    def of(scores: npt.NDArray[Any], labels: npt.NDArray[Any]) -> ScoredRows:
        """Of scores and of labels, positive above 0. Raises ValueError unless the scores are float32."""
        if scores.dtype != np.float32:
            raise ValueError(
                f"scores are float32, not {scores.dtype}: others would be rounded, and rounding makes ties"
            )
        return ScoredRows(scores, np.asarray(labels) > 0)


def check_scores(ranks: Ranks, scores: F32 | F64, *, finite: bool = False) -> int:
    """The number of rows over all ranks. Collective.

    Raises:
        UserError: a score is NaN, or with `finite` infinite, on some rank; all ranks raise it.
    """
    faults = ~np.isfinite(scores) if finite else np.isnan(scores)
    bad, rows = ranks.add_up(np.array([faults.sum(), len(scores)])).tolist()
    if bad:
        what = "not finite, so there is nothing to measure" if finite else "NaN, so there is nothing to order them by"
        raise UserError(
            f"{bad:,} of {rows:,} predictions are {what}: a weight or a feature is not finite; lower "
            f"train.dense.learning_rate or train.embeddings.learning_rate, or look at the features"
        )
    return int(rows)


def sigmoid(logits: npt.NDArray[Any]) -> F64:
    """Probabilities of logits [n], computed in float64 without overflow."""
    x = np.asarray(logits, np.float64)
    e = np.exp(-np.abs(x))
    found: F64 = np.where(x >= 0, 1.0, e) / (1.0 + e)
    return found


def as_they_are(scores: npt.NDArray[Any]) -> F64:
    """Probabilities of scores that are such, [n]."""
    return np.asarray(scores, np.float64)


def sort_keys(rows: ScoredRows) -> I64:
    """Whole numbers in the order of the scores, equal ones of equal scores but for the label: int64 [n]."""
    # -0.0 becomes 0.0. Bits of negative floats ascend away from 0.
    bits = (rows.scores + np.float32(0)).view(np.int32)
    order = (bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))).astype(np.int64)
    return (order << 1) | rows.labels


def unpacked(keys: I64) -> tuple[I64, Bools]:
    """The order of the scores, int64 [n], and the labels of sort keys."""
    return keys >> 1, (keys & 1).astype(bool)


def scores_of(order: I64) -> F32:
    """The scores of their order: float32 [n]."""
    bits = order.astype(np.int32)
    return (bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))).view(np.float32)
