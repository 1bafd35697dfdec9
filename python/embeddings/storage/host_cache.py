"""Rows of a table larger than a GPU's memory: all of them in host memory, the hot ones on the GPU as well.

    rows = RowCache([weight, sums], capacity=10_000_000, device="cuda")
    vectors = rows.look_up(found, admit=True)   # the batch's rows are copied to the GPU where they are not there yet
    rows.counts                                 # hits and lookups: whose row was there before its batch
    cached = rows.acquire(found.unique)         # to be changed: matrices on the GPU, and the rows' slots in them
    rows.commit(cached)                         # they were changed
    rows.flush()                                # host memory holds everything again

Where room is needed, rows seen least often (lfu; of equals those seen longest ago) or longest ago (lru) go back to the
host, never one of the batch's own. A row's count begins anew when it comes again. A batch with more distinct rows than
there is room for brings those it looks up most, and works on a copy of its own. Four bytes a row say where it is on the
GPU, so finding it takes one read.

The ways of others: FBGEMM's TBE caches rows in sets of 32 slots under unified virtual memory (LFU or LRU in a set);
HugeCTR's embedding cache likewise. Here any row may be in any slot, and what moves does so in two copies a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headrace.embeddings.kernels.duplicates import Duplicates, gather
from headrace.embeddings.kernels.hashing import lexsort


@dataclass(frozen=True)
class CachedSlots:
    """Rows of a batch on the device. U distinct rows, ascending."""

    #: int64 [U].
    rows: Tensor
    #: Weights, then the optimizer's states: [*, width] each.
    matrices: list[Tensor]
    #: Where in the matrices the rows are: int64 [U].
    slots: Tensor
    #: Whether the matrices are the batch's own, which nobody else sees.
    is_copy: bool = False


class RowCache:
    """See the module.

    Args:
        host: matrices in host memory, [N, *] of the same N, changed in place: weights, later the optimizer's states.
        capacity: rows on the device, C.
        device: where they are.
        ends: rows are of tables, one after the other, that end before these rows; hits are counted by table. None: one.
        evict: who goes first.
        evict_share: share of C that goes at least where room is needed: each eviction costs a pass over C counts.
    """

    def __init__(
        self,
        host: Sequence[Tensor],
        capacity: int,
        device: str | torch.device,
        *,
        ends: Sequence[int] | None = None,
        evict: Literal["lfu", "lru"] = "lfu",
        evict_share: float = 0.05,
    ) -> None:
        if not 1 <= capacity < 2**31:
            raise ValueError(f"a cache of {capacity} rows")
        self.device = torch.device(device)
        self._evict_rule, self._evict_share = evict, evict_share
        count = len(host[0])
        #: What is true of rows that are not on the device.
        self.host: list[Tensor] = []
        #: Matrices on the device, [C, *].
        self.on_device: list[Tensor] = []
        #: By row its slot on the device, or -1: int32 [N].
        self._slot_of = torch.full((count,), -1, dtype=torch.int32, device=self.device)
        #: By slot: the row (-1: none), how often and in which batch it was last seen, whether it changed.
        self._row_in_slot = torch.full((capacity,), -1, dtype=torch.int64, device=self.device)
        self._seen = torch.zeros(capacity, dtype=torch.int64, device=self.device)
        self._last = torch.zeros(capacity, dtype=torch.int64, device=self.device)
        self._dirty = torch.zeros(capacity, dtype=torch.bool, device=self.device)
        self._batches = 0
        self._ends = torch.tensor([count] if ends is None else list(ends), dtype=torch.int64, device=self.device)
        #: By table, lookups whose row was there, and all; on the device, so that counting waits for nothing.
        self._hits = torch.zeros(2, len(self._ends), dtype=torch.int64, device=self.device)
        self.set_matrices(host)

    def set_matrices(self, host: Sequence[Tensor]) -> None:
        """Matrices that are kept from now on, the first of them as before; what changed on the device is written."""
        self.invalidate()
        self.host = list(host)
        kept = self.on_device[:1]
        self.on_device = kept + [
            torch.zeros(self.capacity, full.shape[1], dtype=full.dtype, device=self.device)
            for full in self.host[len(kept) :]
        ]

    @property
    def capacity(self) -> int:
        """Rows that fit on the device."""
        return len(self._row_in_slot)

    @property
    def counts(self) -> Tensor:
        """Lookups so far whose row was on the device before their batch, and all, by table: int64 [2, T], on the host.

        A copy from the device.
        """
        return self._hits.cpu()

    def forget_hits(self) -> None:
        """Count hits from 0."""
        self._hits.zero_()

    def acquire(self, rows: Tensor) -> CachedSlots:
        """Bring distinct rows, int32 or int64 [U] on the device, to be changed there; then comes `commit`."""
        rows = rows.long()
        if len(rows) > self.capacity:
            return CachedSlots(rows, self.read(rows), torch.arange(len(rows), device=self.device), is_copy=True)
        return CachedSlots(rows, self.on_device, self._fetch_missing(rows))

    def _fetch_missing(self, rows: Tensor, counts: Tensor | None = None) -> Tensor:
        """Slots of distinct rows int64 [U], at most as many as there is room for. `counts`: times looked up, [U]."""
        slots = self._slot_of[rows].long()
        present = slots >= 0
        self._batches += 1
        # Before anybody goes: the batch's own rows stay.
        self._last[slots[present]] = self._batches
        if counts is not None:
            self._seen[slots[present]] += counts[present]
        missing = rows[~present]
        if len(missing):
            slots[~present] = self._fetch(missing, torch.ones_like(missing) if counts is None else counts[~present])
        return slots

    def look_up(self, found: Duplicates, admit: bool) -> Tensor:
        """The weights of a batch's distinct rows as stored, [U, *]. `admit`.

        They are counted, and are on the device from now on.
        """
        rows = found.unique.long()
        if not admit:
            return self.read(rows, 1)[0]
        ends = torch.cat([found.starts[1:], found.starts.new_full((1,), found.order.numel())])
        counts = ends[: len(rows)] - found.starts
        self._count(rows, counts)
        if len(rows) > self.capacity:
            # Half of the room is for those looked up most in this batch, half for who was here.
            most = torch.argsort(counts, descending=True, stable=True)[: self.capacity // 2].sort().values
            self._fetch_missing(rows[most], counts[most])
            return self.read(rows, 1)[0]
        return self.on_device[0].index_select(0, self._fetch_missing(rows, counts))

    def commit(self, cached: CachedSlots) -> None:
        """Say that all opened rows changed."""
        if not cached.is_copy:
            self._dirty[cached.slots] = True
            return
        slots = self._slot_of[cached.rows].long()
        present = slots >= 0
        self._dirty[slots[present]] = True
        gone = cached.rows[~present].cpu()
        for full, on_device, given in zip(self.host, self.on_device, cached.matrices, strict=True):
            on_device.index_copy_(0, slots[present], given[present])
            full.index_copy_(0, gone, given[~present].cpu())

    def read(self, rows: Tensor, matrices: int | None = None) -> list[Tensor]:
        """Copies of distinct rows int64 [U] on the device, [U, *] each; nobody moves. `matrices`: the first alone."""
        slots = self._slot_of[rows].long()
        present = slots >= 0
        missing = rows[~present].cpu()
        found = []
        for full, on_device in zip(self.host[:matrices], self.on_device[:matrices], strict=True):
            out = on_device.new_empty(len(rows), on_device.shape[1])
            out[present] = on_device.index_select(0, slots[present])
            out[~present] = self._to_device(full, missing)
            found.append(out)
        return found

    def flush(self) -> None:
        """Write back what changed; it stays on the device as well."""
        self._write_back(self._dirty.nonzero().view(-1))

    def invalidate(self) -> None:
        """Write back what changed, and hold nothing on the device: what is written to the host is then true."""
        self.flush()
        self._slot_of.fill_(-1)
        self._row_in_slot.fill_(-1)

    def scale(self, matrix: int, by: float) -> None:
        """Multiply one of the matrices, wherever its rows are."""
        self.host[matrix].mul_(by)
        self.on_device[matrix].mul_(by)

    def _count(self, rows: Tensor, counts: Tensor) -> None:
        """Count hits of distinct rows, ascending, that are looked up so often."""
        present = self._slot_of[rows] >= 0
        sums = torch.nn.functional.pad(torch.stack([counts * present, counts]).cumsum(1), (1, 0))
        upto = sums[:, torch.searchsorted(rows, self._ends)]
        self._hits += torch.diff(upto, dim=1, prepend=torch.zeros_like(upto[:, :1]))

    def _fetch(self, rows: Tensor, counts: Tensor) -> Tensor:
        free = (self._row_in_slot < 0).nonzero().view(-1)
        if len(free) < len(rows):
            free = torch.cat([free, self._evict(len(rows) - len(free))])
        slots = free[: len(rows)]
        wanted = rows.cpu()
        for full, on_device in zip(self.host, self.on_device, strict=True):
            on_device.index_copy_(0, slots, self._to_device(full, wanted))
        self._row_in_slot[slots], self._slot_of[rows] = rows, slots.to(torch.int32)
        self._seen[slots], self._last[slots] = counts, self._batches
        return slots

    def _evict(self, needed: int) -> Tensor:
        """Let `needed` rows go at least: their slots."""
        going = ((self._row_in_slot >= 0) & (self._last < self._batches)).nonzero().view(-1)
        first, then = (self._seen, self._last) if self._evict_rule == "lfu" else (self._last, self._seen)
        # Of equals in both the larger row goes.
        order = lexsort(-self._row_in_slot[going], then[going], first[going])
        slots = going[order[: max(needed, int(self._evict_share * self.capacity))]]
        self._write_back(slots[self._dirty[slots]])
        self._slot_of[self._row_in_slot[slots]] = -1
        self._row_in_slot[slots] = -1
        return slots

    def _write_back(self, slots: Tensor) -> None:
        if len(slots):
            rows = self._row_in_slot[slots].cpu()
            for full, on_device in zip(self.host, self.on_device, strict=True):
                full.index_copy_(0, rows, on_device.index_select(0, slots).cpu())
            self._dirty[slots] = False

    def _to_device(self, full: Tensor, rows: Tensor) -> Tensor:
        """Rows of a matrix of the host, int64 [N] on the host, as they arrive on the device."""
        with torch.device("cpu"):  # whatever is around it
            found = gather(full, rows)
            found = found.pin_memory() if self.device.type == "cuda" else found
        return found.to(self.device, non_blocking=True)
