"""Rows that came to vectors, and gradients of vectors to those of rows: what autograd sees of a lookup."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.embeddings.dynamic.tables import split_found_flags
from headrace.embeddings.kernels import dispatch
from headrace.embeddings.kernels.dispatch import default_device
from headrace.embeddings.kernels.duplicates import gather
from headrace.embeddings.lookup.backward import route_gradients
from headrace.embeddings.lookup.handle import LookupHandle, TableLookup
from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.lookup.pooling import divide, pool_max, pool_sum
from headrace.embeddings.sharding.layout import FusedTable
from headrace.embeddings.storage.dtypes import decode


class Lookup(torch.autograd.Function):
    """(anchor, embeddings, prepared) -> `Layout`'s outputs, then by table of raw ids vectors [N, D], then found [N].

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
        answered = answered or [(a.vectors, a.found) for a in handle.answers]
        positions = [w.duplicates.inverse() for w in handle.raw]
        vectors = [gather(v, p) for (v, _), p in zip(answered, positions, strict=True)]
        found = [f.index_select(0, p) for (_, f), p in zip(answered, positions, strict=True)]
        ctx.mark_non_differentiable(*found)
        return (*outs, *vectors, *found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        with default_device(ctx.embeddings.device):
            outputs = 1 + len(ctx.embeddings.layout.sequences)
            route_gradients(ctx.embeddings, ctx.handle, grads[:outputs], grads[outputs:], ctx.winners)
        # `handle.found` knows this node: a circle, in which vectors would wait for the garbage collector.
        ctx.handle = None
        return None, None, None


def _source(
    embeddings: LocalTables, fused: FusedTable, fetched: Tensor | None, lookup: TableLookup
) -> tuple[Tensor, Tensor]:
    """Float32 rows, and the index into them of each occurrence."""
    weight, cache = embeddings.weights[fused.number], embeddings.caches[fused.number]
    if fetched is not None:
        return fetched, lookup.sorted().inverse()
    if cache is not None:
        found = lookup.sorted()
        return decode(cache.look_up(found, embeddings.training)), found.inverse()
    if dispatch.reads_directly(weight):
        return weight, lookup.indices
    found = lookup.sorted()
    return decode(weight.index_select(0, found.unique)), found.inverse()
