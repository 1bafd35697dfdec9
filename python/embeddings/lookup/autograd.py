"""Rows that came to vectors, and gradients of vectors to those of rows: what autograd sees of a lookup."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.embeddings.dynamic.tables import read_marked
from headrace.embeddings.kernels import dispatch
from headrace.embeddings.kernels.dispatch import placing
from headrace.embeddings.kernels.duplicates import gather
from headrace.embeddings.lookup.backward import take_gradients
from headrace.embeddings.lookup.handle import Part, Prepared
from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.lookup.pooling import divide, pool_max, pool_sum
from headrace.embeddings.sharding.layout import Arena
from headrace.embeddings.storage.dtypes import decode


class Lookup(torch.autograd.Function):
    """(anchor, embeddings, prepared) -> [B, width], then by table of raw ids vectors [N, D], then found [N] of each.

    Two all-to-alls forward (one in `prepare`), one backward.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, embeddings: LocalTables, prepared: Prepared) -> tuple[Tensor, ...]:
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
            take_gradients(ctx.embeddings, ctx.prepared, grads[0], grads[1:], ctx.winners)
        # `prepared.found` knows this node: a circle, in which vectors would wait for the garbage collector.
        ctx.prepared = None
        return None, None, None


def _source(embeddings: LocalTables, arena: Arena, fetched: Tensor | None, part: Part) -> tuple[Tensor, Tensor]:
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
