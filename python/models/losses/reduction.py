"""How rows become one number."""

from __future__ import annotations

from torch import Tensor


def weighted_sum(losses: Tensor, weights: Tensor | None) -> Tensor:
    """The sum of what each row adds, [B] -> [].

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
