"""Losses of a prediction and a label a row."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from headrace.models.losses.reduction import weighted_sum


def binary_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Negative log-likelihood of labels, nats: float32 [B], [B] -> [].

    Args:
        labels: in [0, 1].
        weights: of the rows, [B].
    """
    if weights is None:
        return binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    return weighted_sum(binary_cross_entropy_with_logits(logits, labels, reduction="none"), weights)


def focal(
    logits: Tensor, labels: Tensor, weights: Tensor | None = None, *, gamma: float = 2.0, alpha: float | None = None
) -> Tensor:
    """Cross-entropy in which rows that are predicted well count little (Lin et al., "Focal loss", 2017).

    -(1 - p_t)^gamma log p_t, p_t the probability of the row's label; times alpha for positives and 1 - alpha for
    negatives where `alpha` is given. float32 [B], [B] -> [].

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
    """(prediction - target)^2: float32 [B], [B] -> []."""
    return weighted_sum((predictions - targets).square(), weights)
