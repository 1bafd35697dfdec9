"""Losses of cosines."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import relu

from headrace.models.losses.reduction import weighted_sum


def cosine_contrastive(
    positives: Tensor,
    negatives: Tensor,
    weights: Tensor | None = None,
    *,
    margin: float = 0.8,
    negative_weight: float = 1.0,
) -> Tensor:
    """(1 - positive) + negative_weight * mean of max(0, negative - margin): SimpleX (Mao et al., 2021).

    Args:
        positives: cosines of a row's user and item, float32 [B].
        negatives: cosines of the user and of sampled items, float32 [B, N].
        weights: of the rows, [B].
        margin: negatives below it add nothing.
        negative_weight: of a row's negatives together.
    """
    return weighted_sum(1 - positives + negative_weight * relu(negatives - margin).mean(1), weights)
