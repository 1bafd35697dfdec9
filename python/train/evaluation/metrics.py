"""Metrics of predicted clicks, exact and independent of the order of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
#: Any real numbers, booleans included.
Numbers = npt.NDArray[Any]
#: Probabilities are kept this far from 0 and 1 in logarithms (float32's resolution next to 1).
_EPSILON = 1e-7


def sigmoid(logits: Numbers) -> Floats:
    """Probabilities of logits [N], computed in float64 without overflow."""
    x = np.asarray(logits, np.float64)
    e = np.exp(-np.abs(x))
    found: Floats = np.where(x >= 0, 1.0, e) / (1.0 + e)
    return found


def auc(labels: Numbers, scores: Numbers) -> float | None:
    """Area under the ROC curve by the Mann-Whitney rank sum; tied scores count half. None with one class only.

    Args:
        labels: [N], 0 or 1.
        scores: [N], higher is more likely 1; any monotone scale.
    """
    positive = np.asarray(labels) > 0
    n1, n0 = int(positive.sum()), int((~positive).sum())
    if n1 == 0 or n0 == 0:
        return None
    order = np.argsort(scores, kind="stable")
    ordered = np.asarray(scores)[order]
    # Mean rank of each run of equal scores.
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    counts = np.diff(np.r_[starts, len(ordered)])
    ranks = np.repeat(starts + (counts + 1) / 2, counts)
    return float((ranks[positive[order]].sum() - n1 * (n1 + 1) / 2) / (n1 * n0))


def log_loss(labels: Numbers, probabilities: Numbers) -> float:
    """Mean negative log-likelihood in nats."""
    p = np.clip(np.asarray(probabilities, np.float64), _EPSILON, 1 - _EPSILON)
    y = np.asarray(labels, np.float64)
    return float(-np.mean(y * np.log(p) + (1 - y) * np.log1p(-p)))


def click_metrics(labels: Numbers, probabilities: Numbers) -> dict[str, float | None]:
    """auc, log_loss, calibration (mean prediction / mean label) and base_rate; None where undefined."""
    base_rate = float(np.mean(labels, dtype=np.float64))
    mean = float(np.mean(probabilities, dtype=np.float64))
    return {
        "auc": auc(labels, probabilities),
        "log_loss": log_loss(labels, probabilities),
        "calibration": mean / base_rate if base_rate > 0 else None,
        "base_rate": base_rate,
    }


@dataclass(frozen=True)
class Bin:
    """Rows of similar predictions: their mean prediction, the share of clicks, how many."""

    predicted: float
    observed: float
    rows: int


def calibration_bins(labels: Numbers, probabilities: Numbers, bins: int = 15) -> list[Bin]:
    """Rows by prediction in at most `bins` parts of (nearly) equal size, lowest predictions first.

    Equal predictions stay together, so a model with few distinct outputs has fewer bins.
    """
    order = np.argsort(probabilities, kind="stable")
    p = np.asarray(probabilities, np.float64)[order]
    y = np.asarray(labels, np.float64)[order]
    cuts = (len(p) * np.arange(1, bins)) // bins
    edges = np.unique(np.r_[0, np.searchsorted(p, p[cuts], side="left"), len(p)]) if len(p) else np.zeros(1, int)
    return [Bin(float(p[a:b].mean()), float(y[a:b].mean()), int(b - a)) for a, b in pairwise(edges)]


def ranking_metrics(groups: npt.NDArray[np.int64], labels: Numbers, scores: Numbers, k: int) -> dict[str, float]:
    """hr_at_k and ndcg_at_k, means over the groups that have a positive (He et al., 2017, section 4.1).

    A group is one list of candidates. HR: 1 where a positive is among the first k. NDCG: binary gains, discount
    1/log2(place + 1), over the best possible. Among equal scores positives are placed last, so that a constant
    model gains nothing.

    Args:
        groups: [N], which list a row belongs to.
    """
    positive = np.asarray(labels) > 0
    order = np.lexsort((positive, -np.asarray(scores, np.float64), groups))
    group, hit = np.asarray(groups)[order], positive[order]
    starts = np.flatnonzero(np.r_[True, group[1:] != group[:-1]]) if len(group) else np.zeros(0, int)
    counts = np.diff(np.r_[starts, len(group)])
    place = np.arange(len(group)) - np.repeat(starts, counts)
    gain = np.where(hit & (place < k), 1 / np.log2(place + 2), 0.0)
    number = np.add.reduceat(hit, starts, dtype=np.int64) if len(starts) else np.zeros(0, np.int64)
    scored = number > 0
    if not scored.any():
        return {"hr_at_k": 0.0, "ndcg_at_k": 0.0}
    dcg = np.add.reduceat(gain, starts)[scored]
    best = np.cumsum(1 / np.log2(np.arange(k) + 2))[np.minimum(number[scored], k) - 1]
    return {"hr_at_k": float(np.mean(dcg > 0)), "ndcg_at_k": float(np.mean(dcg / best))}


def show_metrics(metrics: Mapping[str, float | None]) -> str:
    """`auc 0.7312, log_loss 0.4410, ...`; those without a value are left out."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if value is not None)
