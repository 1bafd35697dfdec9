"""Losses of differences of scores: a positive against its negatives, or all pairs of a list."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from headrace.models.losses.reduction import weighted_sum


def bpr(positives: Tensor, negatives: Tensor, weights: Tensor | None = None) -> Tensor:
    """Bayesian personalized ranking (Rendle et al., 2009): -log sigmoid(positive - negative).

    Args:
        positives: scores float32 [B].
        negatives: scores float32 [B, N]; the mean over a row's negatives counts.
        weights: of the rows, [B].
    """
    return weighted_sum(softplus(negatives - positives.unsqueeze(1)).mean(1), weights)


def rank_net(scores: Tensor, labels: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    """-log sigmoid(s_i - s_j) over all pairs of a list with label_i > label_j (Burges et al., 2005).

    Args:
        scores: float32 [N].
        labels: [N], any grades.
        offsets: list l is rows offsets[l]:offsets[l + 1]; int64 [L + 1], from 0 to N.
        weights: of the lists, [L].
    """
    above, below, of = _ordered_pairs(labels, offsets)
    losses = softplus(scores[below] - scores[above])
    return weighted_sum(losses, None if weights is None else weights[of])


def lambda_rank(
    scores: Tensor, labels: Tensor, offsets: Tensor, weights: Tensor | None = None, *, k: int | None = None
) -> Tensor:
    """`rank_net` with each pair weighted by what its exchange would change of NDCG@k.

    Burges et al., 2007; as a loss: Wang et al., "The LambdaLoss framework", 2018. Gains are 2^label - 1, discounts
    1 / log2(place + 2) of the places that the scores give now (of equal scores the row before stands before), and no
    gradient goes through places. A list without a row of positive gain adds nothing.

    Args:
        scores: float32 [N].
        labels: [N], grades from 0.
        offsets: list l is rows offsets[l]:offsets[l + 1]; int64 [L + 1], from 0 to N.
        weights: of the lists, [L].
        k: places that count; None: all.
    """
    above, below, of = _ordered_pairs(labels, offsets)
    lengths = offsets.diff()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=scores.device), lengths)
    gains = torch.exp2(labels.to(scores.dtype)) - 1
    with torch.no_grad():
        discounts = _discounts(_places(scores.detach(), rows, offsets), k, scores.dtype)
        best = _discounts(_places(gains, rows, offsets), k, scores.dtype) * gains
        ideal = torch.zeros(len(lengths), dtype=scores.dtype, device=scores.device).index_add_(0, rows, best)
        change = ((gains[above] - gains[below]) * (discounts[above] - discounts[below])).abs() / ideal[of]
    losses = change * softplus(scores[below] - scores[above])
    return weighted_sum(losses, None if weights is None else weights[of])


def _ordered_pairs(labels: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of rows of one list with label_i > label_j: i, j and the list, int64 [pairs] each."""
    lengths = offsets.diff()
    lists = torch.arange(len(lengths), device=offsets.device)
    of = torch.repeat_interleave(lists, lengths.square())
    # The how-many-eth of its list's pairs, in rows of its matrix.
    ends = lengths.square().cumsum(0)
    at = torch.arange(len(of), device=offsets.device) - (ends - lengths.square())[of]
    i = offsets[of] + at // lengths[of]
    j = offsets[of] + at % lengths[of]
    ordered = labels[i] > labels[j]
    return i[ordered], j[ordered], of[ordered]


def _places(values: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """Each row's place in its list from 0, greatest value first: int64 [N]."""
    order = torch.argsort(values, descending=True, stable=True)
    order = order[torch.argsort(rows[order], stable=True)]
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device) - offsets[rows]
    return places


def _discounts(places: Tensor, k: int | None, dtype: torch.dtype) -> Tensor:
    found = 1 / torch.log2(places.to(dtype) + 2)
    return found if k is None else torch.where(places < k, found, torch.zeros_like(found))
