"""Sampled softmax where all targets of a step are compared with the same drawn items: matrix products in pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Logits that are made at once: they stay in the core's cache until their gradients are made of them.
_PIECE = 2**18


def same_ids(targets: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Where targets int64 [P] and ids int64 [M] are equal: both places of each pair, int64 [pairs], by target."""
    ordered, order = ids.sort()
    first = torch.searchsorted(ordered, targets)
    counts = torch.searchsorted(ordered, targets, right=True) - first
    of = torch.repeat_interleave(torch.arange(len(targets), device=ids.device), counts)
    nth = torch.arange(len(of), device=ids.device) - (counts.cumsum(0) - counts)[of]
    return of, order[first[of] + nth]


def shared_sampled_softmax(
    queries: Tensor,
    positives: Tensor,
    negatives: Tensor,
    weights: Tensor | None = None,
    *,
    hits: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`sampled_softmax` (headrace.models.losses.softmax) of negatives that all rows share, [].

    The matrix of logits [P, M] is never whole in memory: a piece of it becomes a loss and gradients at once, in the
    forward pass, and the backward pass multiplies these by its gradient. There is no gradient of a gradient.

    Args:
        queries: vectors [P, D].
        positives: logits [P].
        negatives: vectors [M, D].
        weights: of the rows, [P]; they have no gradient.
        hits: pairs of a row, ascending, and a negative that is the row's positive, which is left out: int64 [pairs].
    """
    weights = torch.ones_like(positives) if weights is None else weights
    nobody = torch.zeros(0, dtype=torch.int64, device=queries.device)
    total: Tensor = _SharedSampledSoftmax.apply(queries, positives, negatives, weights, *(hits or (nobody, nobody)))  # type: ignore[no-untyped-call]
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
            mine = slice(ends[number], ends[number + 1])
            logits[hit_rows[mine] - start, hit_negatives[mine]] = -torch.inf
            most = torch.maximum(logits.amax(1), positive) if len(negatives) else positive
            powers = logits.sub_(most.unsqueeze(1)).exp_()
            own = (positive - most).exp()
            whole = powers.sum(1) + own
            total += (weight * (whole.log() + most - positive)).sum()
            powers.mul_((weight / whole).unsqueeze(1))
            torch.mm(powers, negatives, out=of_queries[piece])
            of_negatives.addmm_(powers.T, query)
            shares[piece] = weight * (own / whole - 1)
        ctx.save_for_backward(of_queries, shares, of_negatives)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_queries, shares, of_negatives = ctx.saved_tensors
        (gradient,) = gradients
        return gradient * of_queries, gradient * shares, gradient * of_negatives, None, None, None
