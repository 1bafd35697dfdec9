"""How well the caches of a model's tables serve: for reports."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.embeddings.lookup.local_tables import LocalTables


@dataclass(frozen=True)
class CacheUse:
    """A cached table over all ranks, and its lookups in training; a row that travels counts once a rank that asks."""

    rows: int
    #: Share of the rows that the GPUs hold at most.
    share: float
    lookups: int
    #: Of these, whose row was on the GPU before its batch.
    hits: int

    @property
    def hit_rate(self) -> float | None:
        """None: nobody looked anything up."""
        return self.hits / self.lookups if self.lookups else None


def cache_use(embeddings: LocalTables) -> dict[str, CacheUse]:
    """By table that is cached. Collective where there is one; the same on all ranks."""
    fused_tables = [a for a in embeddings.layout.fused_tables if a.cached]
    names = sorted({b.table for a in fused_tables for b in a.blocks})
    if not names:
        return {}
    answered = torch.zeros(len(names), 2, dtype=torch.float64)
    for fused in fused_tables:
        cache = embeddings.caches[fused.number]
        assert cache is not None
        for (block, _, _), (hits, lookups) in zip(fused.local_blocks, cache.counts.T.tolist(), strict=False):
            answered[names.index(block.table)] += torch.tensor([hits, lookups])
    answered = answered.to(embeddings.device)
    embeddings.collective.all_reduce_sum([answered])
    tables = embeddings.plan.by_name
    return {
        name: CacheUse(tables[name].rows, tables[name].cached, int(lookups), int(hits))
        for name, (hits, lookups) in zip(names, answered.tolist(), strict=True)
    }
