"""Rows of a table larger than a GPU's memory: all of them in host memory, the hot ones on the GPU as well.

    rows = CachedRows([weight, sums], capacity=10_000_000, device="cuda")
    vectors = rows.look_up(found, stay=True)    # the batch's rows are brought to the GPU where they are not there yet
    rows.counts                                 # hits and lookups: whose row was there before its batch
    opened = rows.open(found.unique)            # to be changed: matrices on the GPU, and the rows' places in them
    rows.close(opened)                          # they were changed
    rows.flush()                                # host memory holds everything again

Where room is needed, rows seen least often (lfu; of equals those seen longest ago) or longest ago (lru) go back to the
host, never one of the batch's own. A row's count begins anew when it comes again. A batch with more distinct rows than
there is room for brings those it looks up most, and works on a copy of its own. Four bytes a row say where it is on the
GPU, so finding it takes one read.

The ways of others: FBGEMM's TBE caches rows in sets of 32 places under unified virtual memory (LFU or LRU in a set);
HugeCTR's embedding cache likewise. Here any row may be in any place, and what moves does so in two copies a batch.
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
class Opened:
    """Rows of a batch on the device. U distinct rows, ascending."""

    #: int64 [U].
    rows: Tensor
    #: Weights, then the optimizer's states: [*, width] each.
    matrices: list[Tensor]
    #: Where in the matrices the rows are: int64 [U].
    places: Tensor
    #: Whether the matrices are the batch's own, which nobody else sees.
    own: bool = False


class CachedRows:
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
        self.here: list[Tensor] = []
        #: By row its place on the device, or -1: int32 [N].
        self._place_of = torch.full((count,), -1, dtype=torch.int32, device=self.device)
        #: By place: the row (-1: none), how often and in which batch it was last seen, whether it changed.
        self._row_at = torch.full((capacity,), -1, dtype=torch.int64, device=self.device)
        self._seen = torch.zeros(capacity, dtype=torch.int64, device=self.device)
        self._last = torch.zeros(capacity, dtype=torch.int64, device=self.device)
        self._changed = torch.zeros(capacity, dtype=torch.bool, device=self.device)
        self._batches = 0
        self._ends = torch.tensor([count] if ends is None else list(ends), dtype=torch.int64, device=self.device)
        #: By table, lookups whose row was there, and all; on the device, so that counting waits for nothing.
        self._hits = torch.zeros(2, len(self._ends), dtype=torch.int64, device=self.device)
        self.hold(host)

    def hold(self, host: Sequence[Tensor]) -> None:
        """Matrices that are kept from now on, the first of them as before; what changed on the device is written."""
        self.settle()
        self.host = list(host)
        kept = self.here[:1]
        self.here = kept + [
            torch.zeros(self.capacity, full.shape[1], dtype=full.dtype, device=self.device)
            for full in self.host[len(kept) :]
        ]

    @property
    def capacity(self) -> int:
        """Rows that fit on the device."""
        return len(self._row_at)

    @property
    def counts(self) -> Tensor:
        """Lookups so far whose row was on the device before their batch, and all, by table: int64 [2, T], on the host.

        A copy from the device.
        """
        return self._hits.cpu()

    def forget_hits(self) -> None:
        """Count hits from 0."""
        self._hits.zero_()

    def open(self, rows: Tensor) -> Opened:
        """Bring distinct rows, int32 or int64 [U] on the device, to be changed there; then comes `close`."""
        rows = rows.long()
        if len(rows) > self.capacity:
            return Opened(rows, self.read(rows), torch.arange(len(rows), device=self.device), own=True)
        return Opened(rows, self.here, self._bring(rows))

    def _bring(self, rows: Tensor, counts: Tensor | None = None) -> Tensor:
        """Places of distinct rows int64 [U], at most as many as there is room for. `counts`: times looked up, [U]."""
        places = self._place_of[rows].long()
        there = places >= 0
        self._batches += 1
        # Before anybody goes: the batch's own rows stay.
        self._last[places[there]] = self._batches
        if counts is not None:
            self._seen[places[there]] += counts[there]
        missing = rows[~there]
        if len(missing):
            places[~there] = self._fetch(missing, torch.ones_like(missing) if counts is None else counts[~there])
        return places

    def look_up(self, found: Duplicates, stay: bool) -> Tensor:
        """The weights of a batch's distinct rows as stored, [U, *]. `stay`: they are counted, and stay here."""
        rows = found.unique.long()
        if not stay:
            return self.read(rows, 1)[0]
        ends = torch.cat([found.starts[1:], found.starts.new_full((1,), found.order.numel())])
        counts = ends[: len(rows)] - found.starts
        self._count(rows, counts)
        if len(rows) > self.capacity:
            # Half of the room is for those looked up most in this batch, half for who was here.
            most = torch.argsort(counts, descending=True, stable=True)[: self.capacity // 2].sort().values
            self._bring(rows[most], counts[most])
            return self.read(rows, 1)[0]
        return self.here[0].index_select(0, self._bring(rows, counts))

    def close(self, opened: Opened) -> None:
        """Say that all opened rows changed."""
        if not opened.own:
            self._changed[opened.places] = True
            return
        places = self._place_of[opened.rows].long()
        there = places >= 0
        self._changed[places[there]] = True
        gone = opened.rows[~there].cpu()
        for full, here, given in zip(self.host, self.here, opened.matrices, strict=True):
            here.index_copy_(0, places[there], given[there])
            full.index_copy_(0, gone, given[~there].cpu())

    def read(self, rows: Tensor, matrices: int | None = None) -> list[Tensor]:
        """Copies of distinct rows int64 [U] on the device, [U, *] each; nobody moves. `matrices`: the first alone."""
        places = self._place_of[rows].long()
        there = places >= 0
        missing = rows[~there].cpu()
        found = []
        for full, here in zip(self.host[:matrices], self.here[:matrices], strict=True):
            out = here.new_empty(len(rows), here.shape[1])
            out[there] = here.index_select(0, places[there])
            out[~there] = self._carry(full, missing)
            found.append(out)
        return found

    def flush(self) -> None:
        """Write back what changed; it stays on the device as well."""
        self._write_back(self._changed.nonzero().view(-1))

    def settle(self) -> None:
        """Write back what changed, and hold nothing on the device: what is written to the host is then true."""
        self.flush()
        self._place_of.fill_(-1)
        self._row_at.fill_(-1)

    def scale(self, matrix: int, by: float) -> None:
        """Multiply one of the matrices, wherever its rows are."""
        self.host[matrix].mul_(by)
        self.here[matrix].mul_(by)

    def _count(self, rows: Tensor, counts: Tensor) -> None:
        """Count hits of distinct rows, ascending, that are looked up so often."""
        there = self._place_of[rows] >= 0
        sums = torch.nn.functional.pad(torch.stack([counts * there, counts]).cumsum(1), (1, 0))
        upto = sums[:, torch.searchsorted(rows, self._ends)]
        self._hits += torch.diff(upto, dim=1, prepend=torch.zeros_like(upto[:, :1]))

    def _fetch(self, rows: Tensor, counts: Tensor) -> Tensor:
        free = (self._row_at < 0).nonzero().view(-1)
        if len(free) < len(rows):
            free = torch.cat([free, self._make_room(len(rows) - len(free))])
        places = free[: len(rows)]
        wanted = rows.cpu()
        for full, here in zip(self.host, self.here, strict=True):
            here.index_copy_(0, places, self._carry(full, wanted))
        self._row_at[places], self._place_of[rows] = rows, places.to(torch.int32)
        self._seen[places], self._last[places] = counts, self._batches
        return places

    def _make_room(self, needed: int) -> Tensor:
        """Let `needed` rows go at least: their places."""
        going = ((self._row_at >= 0) & (self._last < self._batches)).nonzero().view(-1)
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
            for full, here in zip(self.host, self.here, strict=True):
                full.index_copy_(0, rows, here.index_select(0, places).cpu())
            self._changed[places] = False

    def _carry(self, full: Tensor, rows: Tensor) -> Tensor:
        """Rows of a matrix of the host, int64 [N] on the host, as they arrive on the device."""
        with torch.device("cpu"):  # whatever is around it
            found = gather(full, rows)
            found = found.pin_memory() if self.device.type == "cuda" else found
        return found.to(self.device, non_blocking=True)
