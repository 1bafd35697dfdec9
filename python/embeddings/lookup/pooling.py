"""Pooling of looked-up rows, and its gradient. Sums run front to back in each bag: same input, same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.embeddings.input.addressing import JaggedIndices
from headrace.embeddings.kernels import dispatch
from headrace.embeddings.kernels.duplicates import find_duplicates, gather, sum_bags

_MAX = 2  # torch.embedding_bag's number for it


def pool_sum(rows: Tensor, index: Tensor, jagged: JaggedIndices) -> Tensor:
    """Sums, weighted sums and means: [bags, D] of rows[index[i]] over each bag's occurrences; zeros for empty bags."""
    if jagged.offsets is None:
        return dispatch.pool_sum(rows, index, jagged.num_bags) if dispatch.usable(rows) else gather(rows, index)
    return divide(sum_bags(rows, index, jagged.offsets, jagged.weights), jagged)


def divide(vectors: Tensor, jagged: JaggedIndices, bag: Tensor | None = None) -> Tensor:
    """Divide vectors [N, D] of bags `bag` (None: all, in order) by their bags' divisors, in place."""
    if jagged.divisor is None:
        return vectors
    return vectors.div_(jagged.divisor if bag is None else jagged.divisor.index_select(0, bag))


def pool_max(rows: Tensor, index: Tensor, jagged: JaggedIndices) -> tuple[Tensor, Tensor]:
    """The largest number by column of each bag [bags, D], zeros for empty ones, and the row it is from (-1: empty).

    Of equal numbers the first of the bag counts, as in torch's EmbeddingBag.
    """
    if index.numel() == 0:
        empty = torch.full((jagged.num_bags, rows.shape[1]), -1)
        return rows.new_zeros(empty.shape, dtype=torch.float32), empty
    starts = torch.arange(jagged.num_bags) if jagged.offsets is None else jagged.offsets
    pooled, _, sizes, winner = torch.embedding_bag(rows, index, starts.to(index.dtype), False, _MAX)
    return pooled.float(), winner.long().masked_fill_(sizes.unsqueeze(1) == 0, -1)


def max_gradient(grad: Tensor, winner: Tensor, rows: int) -> Tensor:
    """The gradient of each distinct row [rows, D]: each bag's goes to its winner [bags, D], by column."""
    width = grad.shape[1]
    taken = winner >= 0
    position = (winner * width + torch.arange(width))[taken]
    if dispatch.usable(grad):  # where `index_add_` would add in any order
        found = find_duplicates(position)
        sums = found.sum_rows(grad[taken].unsqueeze(1)).squeeze(1)
        return grad.new_zeros(rows * width).index_copy_(0, found.unique, sums).view(rows, width)
    # One serial pass over a vector: repeated positions are summed in order.
    return grad.new_zeros(rows * width).index_add_(0, position, grad[taken]).view(rows, width)
