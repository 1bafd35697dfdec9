"""Cross-entropy over a positive and some negatives in place of all items.

Negatives come as often as they are drawn: the popular ones are met more often, and would be pushed down more than a
softmax over all items pushes them. logQ correction subtracts from each logit the logarithm of the expected number of
its draws (Bengio and Senécal, 2008; of in-batch negatives: Yi et al., 2019).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from headrace.models.losses.reduction import weighted_sum


def sampled_softmax(
    positives: Tensor,
    negatives: Tensor,
    weights: Tensor | None = None,
    *,
    log_q: tuple[Tensor, Tensor] | None = None,
    hits: Tensor | None = None,
) -> Tensor:
    """-log of the softmax of a row's positive beside its negatives (Jean et al., 2015).

    Args:
        positives: logits float32 [B].
        negatives: logits float32 [B, N].
        weights: of the rows, [B].
        log_q: log of the expected number of draws of the positives, [B], and of the negatives, [B, N] or [N].
        hits: negatives that are the row's positive, and are left out: bool [B, N].
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
    """-log of the softmax of a row's item among all items of the batch (Yi et al., 2019).

    Args:
        queries: vectors float32 [B, D] of this rank's rows.
        items: vectors float32 [M, D]: of this rank's rows, or of all ranks', or with further negatives.
        targets: which item is the row's, int64 [B].
        weights: of the rows, [B].
        log_q: log of the share of the batches' items that an item is, [M].
        item_ids: [M]; items of the target's id, but the target, are left out.
        temperature: the dot products are divided by it.
    """
    logits = queries @ items.T / temperature
    if log_q is not None:
        logits = logits - log_q
    if item_ids is not None:
        same = item_ids[targets].unsqueeze(1) == item_ids
        same[torch.arange(len(targets), device=same.device), targets] = False
        logits = logits.masked_fill(same, -torch.inf)
    return weighted_sum(cross_entropy(logits, targets, reduction="none"), weights)
