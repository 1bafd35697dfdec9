"""Autograd of a lookup: pooling of rows to vectors, and gradients of vectors to those of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.embeddings.addressing import JaggedIndices
from headrace.embeddings.dynamic.tables import split_found_flags
from headrace.embeddings.fused_optimizer import Gradient
from headrace.embeddings.kernels import dispatch
from headrace.embeddings.kernels.dispatch import default_device
from headrace.embeddings.kernels.duplicates import find_duplicates, gather, sum_bags
from headrace.embeddings.layout import FusedTable
from headrace.embeddings.lookup.handle import LookupHandle, TableLookup
from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.storage import decode


class LookupFunction(torch.autograd.Function):
    """(anchor, embeddings, handle) -> `Layout`'s outputs, then by table of raw ids vectors [N, D], then has_row [N].

    Two all-to-alls forward (one in `prepare`), one backward.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, embeddings: LocalTables, handle: LookupHandle) -> tuple[Tensor, ...]:
        layout = embeddings.layout
        stored = handle.rows()
        fetched = {a.number: decode(r) for a, r in zip(embeddings.remote, stored, strict=False)}
        winners: dict[int, Tensor] = {}
        pooled: list[Tensor] = [anchor] * len(layout.groups)
        for fused, lookup in zip(layout.fused_tables, handle.lookups, strict=True):
            if lookup.bags is not None:
                jagged = handle.jagged[lookup.groups[0][0]]
                pooled[lookup.groups[0][0]] = divide(lookup.bags.sum(fetched[fused.number], jagged.num_bags), jagged)
                continue
            rows, index = _source(embeddings, fused, fetched.get(fused.number), lookup)
            for number, start, end in lookup.groups:
                jagged = handle.jagged[number]
                if layout.groups[number].mode == "sum":
                    pooled[number] = pool_sum(rows, index[start:end], jagged)
                else:
                    pooled[number], winners[number] = pool_max(rows, index[start:end], jagged)
        ctx.embeddings, ctx.handle, ctx.winners = embeddings, handle, winners
        outs = layout.join(pooled, handle.samples)
        answered = [split_found_flags(x) for x in stored[len(embeddings.remote) :]]
        answered = answered or [(a.vectors, a.has_row) for a in handle.answers]
        positions = [w.duplicates.inverse() for w in handle.raw]
        vectors = [gather(v, p) for (v, _), p in zip(answered, positions, strict=True)]
        has_row = [f.index_select(0, p) for (_, f), p in zip(answered, positions, strict=True)]
        ctx.mark_non_differentiable(*has_row)
        return (*outs, *vectors, *has_row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        with default_device(ctx.embeddings.device):
            outputs = 1 + len(ctx.embeddings.layout.sequences)
            route_gradients(ctx.embeddings, ctx.handle, grads[:outputs], grads[outputs:], ctx.winners)
        # `handle.raw_vectors` refers to this node: a cycle, in which vectors would wait for the garbage collector.
        ctx.handle = None
        return None, None, None


def _source(
    embeddings: LocalTables, fused: FusedTable, fetched: Tensor | None, lookup: TableLookup
) -> tuple[Tensor, Tensor]:
    """Return float32 rows, and the index into them of each occurrence."""
    weight, cache = embeddings.weights[fused.number], embeddings.caches[fused.number]
    if fetched is not None:
        return fetched, lookup.sorted().inverse()
    if cache is not None:
        duplicates = lookup.sorted()
        return decode(cache.look_up(duplicates, embeddings.training)), duplicates.inverse()
    if dispatch.reads_directly(weight):
        return weight, lookup.indices
    duplicates = lookup.sorted()
    return decode(weight.index_select(0, duplicates.unique)), duplicates.inverse()


#: By group, the row of each bag's largest value, by column: see `pool_max`.
Winners = dict[int, Tensor]


def route_gradients(
    embeddings: LocalTables,
    handle: LookupHandle,
    of_outputs: Sequence[Tensor],
    of_raw: Sequence[Tensor] = (),
    winners: Winners | None = None,
) -> None:
    """Run the backward pass of a lookup: send gradients to their rows' owners, and store those that arrive. Collective.

    Args:
        embeddings: this rank's tables.
        handle: of the lookup.
        of_outputs: of the layout's outputs.
        of_raw: of the vectors of each table of raw ids.
        winners: what `pool_max` found, by group.
    """
    by_group = embeddings.layout.cut(of_outputs)
    for fused in embeddings.layout.fused_tables:
        if fused.is_local:
            embeddings.add_gradient(fused, row_gradient(embeddings, handle, winners or {}, fused, by_group))
    raw = [w.duplicates.sum_rows(g.contiguous()) for w, g in zip(handle.raw, of_raw, strict=False)]
    if handle.request is not None and embeddings.exchange is not None:
        sent = [remote_gradient(embeddings, handle, winners or {}, a, by_group) for a in embeddings.remote]
        raw = embeddings.send_gradients(handle.request, [*sent, *raw])
    if embeddings.dynamic is not None:
        embeddings.dynamic.add_gradients(handle.answers, raw)


def remote_gradient(
    embeddings: LocalTables, handle: LookupHandle, winners: Winners, fused: FusedTable, by_group: list[Tensor]
) -> Tensor:
    """Return the gradient of each vector that this rank fetched from a fused table's owners.

    Of distinct rows, or of parts of bags.
    """
    lookup = handle.lookups[fused.number]
    if lookup.bags is None:
        return row_gradient(embeddings, handle, winners, fused, by_group).sums()
    number = lookup.groups[0][0]
    return divide(gather(by_group[number], lookup.bags.bag_ids), handle.jagged[number], lookup.bags.bag_ids)


def row_gradient(
    embeddings: LocalTables, handle: LookupHandle, winners: Winners, fused: FusedTable, by_group: list[Tensor]
) -> Gradient:
    """Return the gradient of the rows of one fused table that this rank looked up."""
    groups, lookup = embeddings.layout.groups, handle.lookups[fused.number]
    duplicates = lookup.sorted()
    if len(lookup.groups) == 1 and groups[lookup.groups[0][0]].mode == "sum":
        number = lookup.groups[0][0]
        return Gradient.of_bags(duplicates, by_group[number], handle.jagged[number])
    total = torch.zeros(duplicates.unique.numel(), fused.width)
    for number, start, end in lookup.groups:
        if groups[number].mode == "sum":
            part_gradient = Gradient.of_bags(duplicates.part(start, end), by_group[number], handle.jagged[number])
            total += part_gradient.sums()
            continue
        winner = winners[number]
        if fused.is_local and not fused.cached and dispatch.reads_directly(embeddings.weights[fused.number]):
            # Looked up by index, not by distinct row.
            winner = torch.where(
                winner < 0, winner, torch.searchsorted(duplicates.unique, winner.to(duplicates.unique.dtype))
            )
        total += max_gradient(by_group[number], winner, duplicates.unique.numel())
    return Gradient.of_sums(duplicates.unique, total)


_MAX = 2  # torch.embedding_bag's number for it


def pool_sum(rows: Tensor, index: Tensor, jagged: JaggedIndices) -> Tensor:
    """Pool rows[index[i]] over each bag's occurrences to sums, weighted sums or means: [bags, D]; zeros for empty
    bags.
    """
    if jagged.offsets is None:
        return dispatch.pool_sum(rows, index, jagged.num_bags) if dispatch.usable(rows) else gather(rows, index)
    return divide(sum_bags(rows, index, jagged.offsets, jagged.weights), jagged)


def divide(vectors: Tensor, jagged: JaggedIndices, bag: Tensor | None = None) -> Tensor:
    """Divide vectors [N, D] of bags `bag` (None: all, in order) by their bags' divisors, in place."""
    if jagged.divisor is None:
        return vectors
    return vectors.div_(jagged.divisor if bag is None else jagged.divisor.index_select(0, bag))


def pool_max(rows: Tensor, index: Tensor, jagged: JaggedIndices) -> tuple[Tensor, Tensor]:
    """Return the largest value by column of each bag [bags, D], zeros for empty bags, and its row (-1: empty).

    Of equal numbers the first of the bag counts, as in torch's EmbeddingBag.
    """
    if index.numel() == 0:
        empty = torch.full((jagged.num_bags, rows.shape[1]), -1)
        return rows.new_zeros(empty.shape, dtype=torch.float32), empty
    starts = torch.arange(jagged.num_bags) if jagged.offsets is None else jagged.offsets
    pooled, _, sizes, winner = torch.embedding_bag(rows, index, starts.to(index.dtype), False, _MAX)
    return pooled.float(), winner.long().masked_fill_(sizes.unsqueeze(1) == 0, -1)


def max_gradient(grad: Tensor, winner: Tensor, rows: int) -> Tensor:
    """Return the gradient of each distinct row [rows, D]: each bag's goes to its winner [bags, D], by column."""
    width = grad.shape[1]
    is_taken = winner >= 0
    position = (winner * width + torch.arange(width))[is_taken]
    if dispatch.usable(grad):  # on a GPU `index_add_` adds in any order
        duplicates = find_duplicates(position)
        sums = duplicates.sum_rows(grad[is_taken].unsqueeze(1)).squeeze(1)
        return grad.new_zeros(rows * width).index_copy_(0, duplicates.unique, sums).view(rows, width)
    # One serial pass over a vector: repeated positions are summed in order.
    return grad.new_zeros(rows * width).index_add_(0, position, grad[is_taken]).view(rows, width)
