"""Tables larger than a GPU's memory: all rows in host memory, the hot ones of them on the GPU as well.

    table = CachedTable(rows, 128, capacity=10_000_000, device="cuda")
    vectors = table.look_up(addresses)      # the batch's rows are brought to the GPU, where they are not there yet
    table.step(grad, lr=0.01)               # row-wise Adagrad, on the GPU
    table.hit_rate                          # share of the lookups whose row was there before its batch
    table.flush()                           # host memory holds everything again

A batch works on the GPU's copy alone: its distinct rows must fit there. Where room is needed, rows seen least often
(lfu; of equals those seen longest ago) or longest ago (lru) go back to the host, never one of the batch's own. A row's
count begins anew when it comes again. Four bytes a row say where it is on the GPU, so finding it takes one read.

The ways of others: FBGEMM's TBE caches rows in sets of 32 places under unified virtual memory (LFU or LRU in a set);
HugeCTR's embedding cache likewise. Here any row may be in any place, and what moves does so in two copies a batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from headrace.embeddings.duplicates import Duplicates, find_duplicates, gather
from headrace.embeddings.gpu import dispatch
from headrace.embeddings.gpu.hashing import lexsort


class CachedTable:
    """See the module.

    Args:
        weight: rows in host memory, float32 or 16 bits [N, D]; changed in place. Pinned memory travels faster.
        capacity: rows on the device, C.
        device: where they are.
        evict: who goes first.
        evict_share: share of C that goes at least where room is needed: each eviction costs a pass over C counts.
    """

    def __init__(
        self, weight: Tensor, capacity: int, device: str | torch.device, *, evict: Literal["lfu", "lru"] = "lfu",
        evict_share: float = 0.05,
    ) -> None:  # fmt: skip
        if not 1 <= capacity < 2**31:
            raise ValueError(f"a cache of {capacity} rows")
        self.device = torch.device(device)
        self._evict_rule, self._evict_share = evict, evict_share
        #: What is true of rows that are not on the device: weights and the optimizer's sums, [N, D] and [N, 1].
        self.host = [weight, torch.zeros(len(weight), 1)]
        self._here = [torch.zeros(capacity, full.shape[1], dtype=full.dtype, device=self.device) for full in self.host]
        #: By row its place on the device, or -1: int32 [N].
        self._place_of = torch.full((len(weight),), -1, dtype=torch.int32, device=self.device)
        #: By place: the row (-1: none), how often and in which batch it was last seen, whether it changed.
        self._row_at = torch.full((capacity,), -1, dtype=torch.int64, device=self.device)
        self._seen = torch.zeros(capacity, dtype=torch.int64, device=self.device)
        self._last = torch.zeros(capacity, dtype=torch.int64, device=self.device)
        self._changed = torch.zeros(capacity, dtype=torch.bool, device=self.device)
        self.batches = self.steps = 0
        #: Lookups whose row was there, and all; on the device, so that counting waits for nothing.
        self._hits = torch.zeros(2, dtype=torch.int64, device=self.device)
        self._batch: tuple[Duplicates, Tensor] | None = None

    @property
    def capacity(self) -> int:
        """Rows that fit on the device."""
        return len(self._row_at)

    @property
    def hit_rate(self) -> float | None:
        """Share of all lookups so far whose row was on the device before their batch; None: there were none."""
        hits, lookups = self._hits.tolist()
        return hits / lookups if lookups else None

    def forget_hits(self) -> None:
        """Count hits from 0."""
        self._hits.zero_()

    def look_up(
        self, addresses: Tensor, bags: int | None = None, starts: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """Sums of rows by bag: float32 [bags, D]; see kernels.pool_sum. Its gradient belongs to the next `step`.

        Raises:
            ValueError: the batch has more distinct rows than fit.
        """
        found = find_duplicates(addresses)
        ends = torch.cat([found.starts[1:], found.starts.new_full((1,), addresses.numel())])
        places = self.bring(found.unique.long(), ends[: found.unique.numel()] - found.starts)
        self._batch = found, places
        return dispatch.pool_sum(
            self._here[0], places[found.inverse()], addresses.numel() if bags is None else bags, starts, weights
        )

    def step(
        self, grad: Tensor, lr: float, *, bag: Tensor | None = None, weights: Tensor | None = None,
        divisor: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Row-wise Adagrad of the last lookup's rows; see kernels.rowwise_adagrad."""
        if self._batch is None:
            raise RuntimeError("look_up comes before step")
        (found, places), self._batch = self._batch, None
        self.steps += 1
        dispatch.update(
            "rowwise_adagrad", self._here[0], [self._here[1]], places, found.starts, found.order, found.order.numel(),
            grad, bag=bag, weights=weights, divisor=divisor, lr=lr, decay=0.0, step=self.steps,
        )  # fmt: skip
        self._changed[places] = True

    def bring(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Bring distinct rows int64 [U], looked up `counts` times, to the device: their places there, int64 [U].

        Raises:
            ValueError: they do not fit.
        """
        if len(rows) > self.capacity:
            raise ValueError(
                f"a batch of {len(rows)} distinct rows and a cache of {self.capacity}: enlarge it, or cut the batch"
            )
        self.batches += 1
        places = self._place_of[rows].long()
        there = places >= 0
        self._hits += torch.stack([(counts * there).sum(), counts.sum()])
        missing = rows[~there]
        # Before anybody goes: the batch's own rows stay.
        self._last[places[there]] = self.batches
        self._seen[places[there]] += counts[there]
        if len(missing):
            places[~there] = self._fetch(missing, counts[~there])
        return places

    def flush(self) -> None:
        """Write back what changed; it stays on the device as well."""
        changed = self._changed.nonzero().view(-1)
        self._write_back(changed)

    def _fetch(self, rows: Tensor, counts: Tensor) -> Tensor:
        free = (self._row_at < 0).nonzero().view(-1)
        if len(free) < len(rows):
            free = torch.cat([free, self._make_room(len(rows) - len(free))])
        places = free[: len(rows)]
        wanted = rows.cpu()
        for full, here in zip(self.host, self._here, strict=True):
            here.index_copy_(0, places, self._carry(gather(full, wanted)))
        self._row_at[places], self._place_of[rows] = rows, places.to(torch.int32)
        self._seen[places], self._last[places] = counts, self.batches
        return places

    def _make_room(self, needed: int) -> Tensor:
        """Let `needed` rows go at least: their places."""
        going = ((self._row_at >= 0) & (self._last < self.batches)).nonzero().view(-1)
        first, then = (self._seen, self._last) if self._evict_rule == "lfu" else (self._last, self._seen)
        # Of equals in both the larger row goes.
        order = lexsort(-self._row_at[going], then[going], first[going])
        places = going[order[: max(needed, int(self._evict_share * self.capacity))]]
        self._write_back(places[self._changed[places]])
        self._place_of[self._row_at[places]] = -1
        self._row_at[places] = -1
        return places

    def _write_back(self, places: Tensor) -> None:
        if len(places):
            rows = self._row_at[places].cpu()
            for full, here in zip(self.host, self._here, strict=True):
                full.index_copy_(0, rows, here.index_select(0, places).cpu())
            self._changed[places] = False

    def _carry(self, x: Tensor) -> Tensor:
        if self.device.type == "cpu":
            return x
        return x.pin_memory().to(self.device, non_blocking=True)
