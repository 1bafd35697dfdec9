"""Rows that came to vectors, and gradients of vectors to those of rows: what autograd sees of a lookup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headrace.embeddings.dynamic.tables import read_marked
from headrace.embeddings.kernels import dispatch
from headrace.embeddings.kernels.dispatch import placing
from headrace.embeddings.kernels.duplicates import gather
from headrace.embeddings.lookup.handle import Part, Prepared
from headrace.embeddings.lookup.pooling import divide, max_gradient, pool_max, pool_sum
from headrace.embeddings.optim.gradients import Gradient
from headrace.embeddings.sharding.layout import Arena
from headrace.embeddings.storage.dtypes import decode

if TYPE_CHECKING:
    from headrace.embeddings.sharded import ShardedEmbeddings

#: By group, the row that each bag's largest number is from, by column: `pool_max`.
Winners = dict[int, Tensor]


class Lookup(torch.autograd.Function):
    """(anchor, embeddings, prepared) -> [B, width], then by table of raw ids vectors [N, D], then found [N] of each.

    Two all-to-alls forward (one in `prepare`), one backward.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, embeddings: ShardedEmbeddings, prepared: Prepared) -> tuple[Tensor, ...]:
        layout = embeddings.layout
        stored = prepared.rows()
        fetched = {a.number: decode(r) for a, r in zip(embeddings.remote, stored, strict=False)}
        winners: dict[int, Tensor] = {}
        pooled: list[Tensor] = [anchor] * len(layout.groups)
        for arena, part in zip(layout.arenas, prepared.parts, strict=True):
            if part.bags is not None:
                occurrences = prepared.occurrences[part.groups[0][0]]
                pooled[part.groups[0][0]] = divide(part.bags.sum(fetched[arena.number], occurrences.bags), occurrences)
                continue
            rows, index = _source(embeddings, arena, fetched.get(arena.number), part)
            for number, start, end in part.groups:
                occurrences = prepared.occurrences[number]
                if layout.groups[number].mode == "sum":
                    pooled[number] = pool_sum(rows, index[start:end], occurrences)
                else:
                    pooled[number], winners[number] = pool_max(rows, index[start:end], occurrences)
        ctx.embeddings, ctx.prepared, ctx.winners = embeddings, prepared, winners
        out = layout.join(pooled, prepared.samples) if pooled else torch.zeros(prepared.samples, 0)
        told = [read_marked(x) for x in stored[len(embeddings.remote) :]]
        told = told or [(a.vectors, a.found) for a in prepared.answers]
        places = [w.duplicates.inverse() for w in prepared.raw]
        vectors = [gather(v, p) for (v, _), p in zip(told, places, strict=True)]
        found = [f.index_select(0, p) for (_, f), p in zip(told, places, strict=True)]
        ctx.mark_non_differentiable(*found)
        return (out, *vectors, *found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        with placing(ctx.embeddings.device):
            ctx.embeddings.take_gradients(ctx.prepared, grads[0], grads[1:], ctx.winners)
        # `prepared.found` knows this node: a circle, in which vectors would wait for the garbage collector.
        ctx.prepared = None
        return None, None, None


def sent_gradient(
    embeddings: ShardedEmbeddings, prepared: Prepared, winners: Winners, arena: Arena, by_group: list[Tensor]
) -> Tensor:
    """The gradient of each vector that a rank got from an arena's owners: of distinct rows, or of parts of bags."""
    part = prepared.parts[arena.number]
    if part.bags is None:
        return row_gradient(embeddings, prepared, winners, arena, by_group).sums()
    number = part.groups[0][0]
    return divide(gather(by_group[number], part.bags.bag), prepared.occurrences[number], part.bags.bag)


def row_gradient(
    embeddings: ShardedEmbeddings, prepared: Prepared, winners: Winners, arena: Arena, by_group: list[Tensor]
) -> Gradient:
    """The gradient of the rows of one arena that a rank looked up."""
    groups, part = embeddings.layout.groups, prepared.parts[arena.number]
    found = part.sorted()
    if len(part.groups) == 1 and groups[part.groups[0][0]].mode == "sum":
        number = part.groups[0][0]
        return Gradient.of_bags(found, by_group[number], prepared.occurrences[number])
    total = torch.zeros(found.unique.numel(), arena.width)
    for number, start, end in part.groups:
        if groups[number].mode == "sum":
            one = Gradient.of_bags(found.part(start, end), by_group[number], prepared.occurrences[number])
            total += one.sums()
            continue
        winner = winners[number]
        if arena.local and not arena.cached and dispatch.by_address(embeddings.weights[arena.number]):
            # Looked up by address, not by distinct row.
            winner = torch.where(winner < 0, winner, torch.searchsorted(found.unique, winner.to(found.unique.dtype)))
        total += max_gradient(by_group[number], winner, found.unique.numel())
    return Gradient.of_sums(found.unique, total)


def _source(embeddings: ShardedEmbeddings, arena: Arena, fetched: Tensor | None, part: Part) -> tuple[Tensor, Tensor]:
    """Float32 rows, and the index into them of each occurrence."""
    weight, cache = embeddings.weights[arena.number], embeddings.caches[arena.number]
    if fetched is not None:
        return fetched, part.sorted().inverse()
    if cache is not None:
        found = part.sorted()
        return decode(cache.look_up(found, embeddings.training)), found.inverse()
    if dispatch.by_address(weight):
        return weight, part.addresses
    found = part.sorted()
    return decode(weight.index_select(0, found.unique)), found.inverse()
