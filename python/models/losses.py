"""Losses as plain functions of tensors, each with its paper.

Each is a sum over the local rows, never a mean: a step's rows are on several ranks and in several micro-batches, so the
trainer divides by the number of rows of the global batch. Row weights multiply the loss of a row.

- pointwise, from a prediction and a label for each row: binary cross-entropy, focal, squared error
- pairwise: BPR, a positive against negatives; RankNet and LambdaRank, all pairs of a list
- softmax: sampled softmax and in-batch softmax, with logQ correction; sampled softmax with negatives that all rows
  share, without the matrix of their logits
- contrastive: the cosine contrastive loss

Popular items are drawn as negatives more often, so a sampled softmax would push them down more than a softmax over all
items. logQ correction subtracts from each logit the logarithm of the expected number of its draws (Bengio and Senécal,
2008; for in-batch negatives: Yi et al., 2019).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid, relu, softplus


def weighted_sum(losses: Tensor, weights: Tensor | None) -> Tensor:
    """Sum the rows' losses, [B] -> [].

    Args:
        weights: of the rows, [B]; None: all 1.

    Raises:
        ValueError: weights of another shape, which would be broadcast.
    """
    if weights is None:
        return losses.sum()
    if weights.shape != losses.shape:
        raise ValueError(f"weights are {list(weights.shape)} for rows {list(losses.shape)}")
    return (losses * weights).sum()


def binary_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the negative log-likelihood of labels, in nats: float32 [B], [B] -> [].

    Args:
        logits: [B].
        labels: in [0, 1], [B].
        weights: weights of the rows, [B].
    """
    if weights is None:
        return binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    return weighted_sum(binary_cross_entropy_with_logits(logits, labels, reduction="none"), weights)


def focal(
    logits: Tensor, labels: Tensor, weights: Tensor | None = None, *, gamma: float = 2.0, alpha: float | None = None
) -> Tensor:
    """Return a cross-entropy in which well-predicted rows count little (Lin et al., "Focal loss", 2017).

    It is -(1 - p_t)^gamma log p_t, where p_t is the probability of the row's label. With `alpha`, positives are
    multiplied by alpha and negatives by 1 - alpha. float32 [B], [B] -> [].

    Args:
        labels: 0 or 1.
        gamma: 0 is cross-entropy.
    """
    signed = logits * (2 * labels - 1)
    log_p, log_other = logsigmoid(signed), logsigmoid(-signed)
    losses = -(gamma * log_other).exp() * log_p
    if alpha is not None:
        losses = losses * (alpha * labels + (1 - alpha) * (1 - labels))
    return weighted_sum(losses, weights)


def squared_error(predictions: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return (prediction - target)^2, summed: float32 [B], [B] -> []."""
    return weighted_sum((predictions - targets).square(), weights)


def bpr(positives: Tensor, negatives: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the loss of Bayesian personalized ranking (Rendle et al., 2009): -log sigmoid(positive - negative).

    Args:
        positives: scores float32 [B].
        negatives: scores float32 [B, N]; a row's loss is the mean over its negatives.
        weights: of the rows, [B].
    """
    return weighted_sum(softplus(negatives - positives.unsqueeze(1)).mean(1), weights)


def rank_net(scores: Tensor, labels: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return -log sigmoid(s_i - s_j) over all pairs of a list with label_i > label_j (Burges et al., 2005).

    Args:
        scores: float32 [N].
        labels: [N], any grades.
        offsets: list l is rows offsets[l]:offsets[l + 1]; int64 [L + 1], from 0 to N.
        weights: of the lists, [L].
    """
    above, below, list_of_pair = _ordered_pairs(labels, offsets)
    losses = softplus(scores[below] - scores[above])
    return weighted_sum(losses, None if weights is None else weights[list_of_pair])


def lambda_rank(
    scores: Tensor, labels: Tensor, offsets: Tensor, weights: Tensor | None = None, *, k: int | None = None
) -> Tensor:
    """Return `rank_net` with each pair weighted by the change of NDCG@k from its exchange.

    Burges et al., 2007; as a loss: Wang et al., "The LambdaLoss framework", 2018. Gains are 2^label - 1. Discounts are
    1 / log2(place + 2), with the places by the current scores (equal scores in order of the rows) and no gradient
    through places. A list without a positive gain adds nothing.

    Args:
        scores: float32 [N].
        labels: [N], grades from 0.
        offsets: list l is rows offsets[l]:offsets[l + 1]; int64 [L + 1], from 0 to N.
        weights: of the lists, [L].
        k: number of places that count; None: all.
    """
    above, below, list_of_pair = _ordered_pairs(labels, offsets)
    lengths = offsets.diff()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=scores.device), lengths)
    gains = torch.exp2(labels.to(scores.dtype)) - 1
    with torch.no_grad():
        discounts = _discounts(_places(scores.detach(), rows, offsets), k, scores.dtype)
        best = _discounts(_places(gains, rows, offsets), k, scores.dtype) * gains
        ideal = torch.zeros(len(lengths), dtype=scores.dtype, device=scores.device).index_add_(0, rows, best)
        change = ((gains[above] - gains[below]) * (discounts[above] - discounts[below])).abs() / ideal[list_of_pair]
    losses = change * softplus(scores[below] - scores[above])
    return weighted_sum(losses, None if weights is None else weights[list_of_pair])


def _ordered_pairs(labels: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return pairs of rows of one list with label_i > label_j: i, j and the list, int64 [pairs] each."""
    lengths = offsets.diff()
    lists = torch.arange(len(lengths), device=offsets.device)
    list_of_pair = torch.repeat_interleave(lists, lengths.square())
    # Position of the pair among its list's pairs, in rows of its matrix.
    ends = lengths.square().cumsum(0)
    position = torch.arange(len(list_of_pair), device=offsets.device) - (ends - lengths.square())[list_of_pair]
    i = offsets[list_of_pair] + position // lengths[list_of_pair]
    j = offsets[list_of_pair] + position % lengths[list_of_pair]
    ordered = labels[i] > labels[j]
    return i[ordered], j[ordered], list_of_pair[ordered]


def _places(values: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """Return each row's place in its list from 0, greatest value first: int64 [N]."""
    order = torch.argsort(values, descending=True, stable=True)
    order = order[torch.argsort(rows[order], stable=True)]
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device) - offsets[rows]
    return places


def _discounts(places: Tensor, k: int | None, dtype: torch.dtype) -> Tensor:
    discounts = 1 / torch.log2(places.to(dtype) + 2)
    return discounts if k is None else torch.where(places < k, discounts, torch.zeros_like(discounts))


def cosine_contrastive(
    positives: Tensor,
    negatives: Tensor,
    weights: Tensor | None = None,
    *,
    margin: float = 0.8,
    negative_weight: float = 1.0,
) -> Tensor:
    """Return (1 - positive) + negative_weight * mean of max(0, negative - margin): SimpleX (Mao et al., 2021).

    Args:
        positives: cosines of a row's user and item, float32 [B].
        negatives: cosines of the user and of sampled items, float32 [B, N].
        weights: of the rows, [B].
        margin: negatives below it add nothing.
        negative_weight: weight of all of a row's negatives together.
    """
    return weighted_sum(1 - positives + negative_weight * relu(negatives - margin).mean(1), weights)


def sampled_softmax(
    positives: Tensor,
    negatives: Tensor,
    weights: Tensor | None = None,
    *,
    log_q: tuple[Tensor, Tensor] | None = None,
    hits: Tensor | None = None,
) -> Tensor:
    """Return -log of the softmax of a row's positive among itself and its negatives (Jean et al., 2015).

    Args:
        positives: logits float32 [B].
        negatives: logits float32 [B, N].
        weights: of the rows, [B].
        log_q: log of the expected number of draws of the positives, [B], and of the negatives, [B, N] or [N].
        hits: True for negatives that are the row's positive, which are left out: bool [B, N].
    """
    if log_q is not None:
        positives, negatives = positives - log_q[0], negatives - log_q[1]
    if hits is not None:
        negatives = negatives.masked_fill(hits, -torch.inf)
    logits = torch.cat([positives.unsqueeze(1), negatives], dim=1)
    return weighted_sum(logits.logsumexp(1) - positives, weights)


def in_batch_softmax(
    queries: Tensor,
    items: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    log_q: Tensor | None = None,
    item_ids: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Return -log of the softmax of a row's item among all items of the batch (Yi et al., 2019).

    Args:
        queries: vectors float32 [B, D] of this rank's rows.
        items: vectors float32 [M, D], of this rank's rows or of all ranks' rows, perhaps with further negatives.
        targets: position of the row's item among `items`, int64 [B].
        weights: weights of the rows, [B].
        log_q: log of an item's share of the batches' items, [M].
        item_ids: ids of the items, [M]; other items with the target's id are left out.
        temperature: divisor of the dot products.
    """
    logits = queries @ items.T / temperature
    if log_q is not None:
        logits = logits - log_q
    if item_ids is not None:
        same = item_ids[targets].unsqueeze(1) == item_ids
        same[torch.arange(len(targets), device=same.device), targets] = False
        logits = logits.masked_fill(same, -torch.inf)
    return weighted_sum(cross_entropy(logits, targets, reduction="none"), weights)


#: Number of logits in a piece, which stay in the core's cache until their gradients are computed.
_PIECE = 2**18


def same_ids(targets: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of equal targets int64 [P] and ids int64 [M], by target: int64 [pairs] each."""
    ordered, order = ids.sort()
    first = torch.searchsorted(ordered, targets)
    counts = torch.searchsorted(ordered, targets, right=True) - first
    target_positions = torch.repeat_interleave(torch.arange(len(targets), device=ids.device), counts)
    nth = torch.arange(len(target_positions), device=ids.device) - (counts.cumsum(0) - counts)[target_positions]
    return target_positions, order[first[target_positions] + nth]


def shared_sampled_softmax(
    queries: Tensor,
    positives: Tensor,
    negatives: Tensor,
    weights: Tensor | None = None,
    *,
    hits: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return `sampled_softmax` for negatives that all rows share, [].

    The matrix of logits [P, M] is computed in pieces. The forward pass turns each piece into losses and gradients at
    once, and the backward pass multiplies these by its gradient. Second derivatives are not supported.

    Args:
        queries: vectors [P, D].
        positives: logits [P].
        negatives: vectors [M, D].
        weights: of the rows, [P]; they have no gradient.
        hits: pairs (row, negative) in ascending order of rows, in which the negative is the row's positive and is left
            out: int64 [pairs] each.
    """
    weights = torch.ones_like(positives) if weights is None else weights
    no_hits = torch.zeros(0, dtype=torch.int64, device=queries.device)
    total: Tensor = _SharedSampledSoftmax.apply(queries, positives, negatives, weights, *(hits or (no_hits, no_hits)))  # type: ignore[no-untyped-call]
    return total


class _SharedSampledSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        positives: Tensor,
        negatives: Tensor,
        weights: Tensor,
        hit_rows: Tensor,
        hit_negatives: Tensor,
    ) -> Tensor:
        of_queries, of_negatives = torch.empty_like(queries), torch.zeros_like(negatives)
        shares = torch.empty_like(positives)
        total = positives.new_zeros(())
        rows = max(1, _PIECE // max(1, len(negatives)))
        ends = torch.searchsorted(hit_rows, torch.arange(0, len(queries) + rows, rows, device=queries.device)).tolist()
        for number, start in enumerate(range(0, len(queries), rows)):
            piece = slice(start, start + rows)
            query, positive, weight = queries[piece], positives[piece], weights[piece]
            logits = query @ negatives.T
            hit_range = slice(ends[number], ends[number + 1])
            logits[hit_rows[hit_range] - start, hit_negatives[hit_range]] = -torch.inf
            most = torch.maximum(logits.amax(1), positive) if len(negatives) else positive
            powers = logits.sub_(most.unsqueeze(1)).exp_()
            positive_power = (positive - most).exp()
            normalizer = powers.sum(1) + positive_power
            total += (weight * (normalizer.log() + most - positive)).sum()
            powers.mul_((weight / normalizer).unsqueeze(1))
            torch.mm(powers, negatives, out=of_queries[piece])
            of_negatives.addmm_(powers.T, query)
            shares[piece] = weight * (positive_power / normalizer - 1)
        ctx.save_for_backward(of_queries, shares, of_negatives)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_queries, shares, of_negatives = ctx.saved_tensors
        (gradient,) = gradients
        return gradient * of_queries, gradient * shares, gradient * of_negatives, None, None, None
