"""Storage of table rows: initial values, number formats, pages of memory, and a cache of hot rows on a GPU.

fp16 and bf16 round to the nearest (in a step on a GPU stochastically: kernels.gpu). int8 is one byte a value on a grid
of the row's own: value = offset + scale * code, scale and offset as two float32 behind the codes (the form of FBGEMM's
fused 8-bit row-wise quantisation). Training rounds stochastically, so that a small step is not lost but taken in the
mean: an update errs by less than one step of the grid, (largest - smallest value of the row) / 255, and on average not
at all (Gupta et al., "Deep Learning with Limited Numerical Precision", 2015). The draw is a function of step, row and
column: reruns give the same bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.compute.counter_random import GOLDEN, mix
from headrace.embeddings.kernels import hashing
from headrace.embeddings.kernels.dispatch import Duplicates, gather
from headrace.embeddings.kernels.hashing import lexsort
from headrace.embeddings.sharding_plan import Storage

#: Rows start uniform in +- this. Independent of the table's size, so that new rows of a grown table start alike.
INIT_BOUND = 0.05
#: Values drawn at once: the memory that is used besides the rows themselves.
_PIECE = 2**20
#: float32 [N, D] -> rows as stored.
Store = Callable[[Tensor], Tensor]


def initial_rows(
    table: str, rows: range, columns: range, seed: int, bound: float, out: Tensor, store: Store | None = None
) -> None:
    """Fill `out` [len(rows), columns as stored] with rows of numbers uniform in [-bound, bound).

    Counter-based: SplitMix64 (Steele, Lea and Flood, 2014) of the row's place, then of the pair of columns; each half
    of the 64 bits is one number of 24 bits. `store` makes of float32 rows what `out` holds.
    """
    is_on_cpu = out.device.type == "cpu"
    step = max(1, (_PIECE if is_on_cpu else 16 * _PIECE) // max(1, len(columns)))
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        if not is_on_cpu:  # drawn where they stay
            ids = torch.arange(part.start, part.stop, part.step, device=out.device)
            drawn = hashing.initial_values(table, ids, columns.stop, seed, bound)[:, columns.start :]
            out[start : start + len(part)] = drawn if store is None else store(drawn)
            continue
        places = np.arange(part.start, part.stop, part.step, dtype=np.uint64)
        values = torch.from_numpy(initial_values(table, places, columns, seed, bound))
        out[start : start + len(places)] = values if store is None else store(values)


def initial_values(
    table: str, places: NDArray[np.uint64], columns: range, seed: int, bound: float
) -> NDArray[np.float32]:
    """Compute the initial values of rows: float32 [len(places), len(columns)]."""
    text = hashlib.sha256(f"{seed}/{table}".encode()).digest()
    key = np.frombuffer(text[:8], dtype="<u8")
    first, last = columns.start // 2, (columns.stop + 1) // 2
    pairs = np.arange(first, last, dtype=np.uint64) * GOLDEN
    hashed = mix(mix(key + places * GOLDEN)[:, None] + pairs)
    halves = hashed.view("<u4").reshape(len(places), 2 * len(pairs))[:, columns.start - 2 * first :][:, : len(columns)]
    values: NDArray[np.float32] = (halves >> np.uint32(8)).astype(np.float32)
    values *= np.float32(bound / 2**23)
    values -= np.float32(bound)
    return values


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.uint8}
#: Bytes of scale and offset behind the codes.
_TAIL = 8


def stored_width(storage: Storage, columns: int) -> int:
    """Return the columns of the matrix that stores rows of `columns` values."""
    return columns + _TAIL if storage == "int8" else columns


def decode(stored: Tensor) -> Tensor:
    """Convert stored rows [N, stored width] to float32 [N, D] (the same tensor where they are float32)."""
    if stored.dtype is not torch.uint8:
        return stored.float()
    scale, offset = _grid(stored)
    return stored[:, :-_TAIL].float().mul_(scale).add_(offset)


def encode(rows: Tensor, dtype: torch.dtype, noise: Tensor | None = None) -> Tensor:
    """Convert float32 [N, D] to stored rows.

    Args:
        rows: the numbers.
        dtype: of the storage.
        noise: int8: numbers uniform in [0, 1), float32 [N, D], that round by chance; None: to the nearest.
    """
    if dtype is not torch.uint8:
        return rows.to(dtype)
    stored = torch.empty(rows.shape[0], rows.shape[1] + _TAIL, dtype=torch.uint8, device=rows.device)
    if rows.numel() == 0:
        return stored
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    scale = (high - low) / 255
    # In a row of equal values all codes are 0, and so is the stored scale.
    scaled = (rows - low) / torch.where(scale > 0, scale, 1.0)
    codes = (scaled + (0.5 if noise is None else noise)).floor_().clamp_(0, 255)
    stored[:, :-_TAIL] = codes.to(torch.uint8)
    stored[:, -_TAIL:] = torch.cat([scale, low], dim=1).view(torch.uint8)
    return stored


def convert(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert stored rows to another storage, rounded to the nearest."""
    return stored if stored.dtype is dtype else encode(decode(stored), dtype)


def numbers_of(stored: Tensor) -> int:
    """Return the number of values in a stored row."""
    return stored.shape[1] - _TAIL if stored.dtype is torch.uint8 else stored.shape[1]


def noise_for(places: Tensor, columns: int, step: int) -> Tensor:
    """Return the noise that rounds rows at a step: float32 [len(places), columns] in [0, 1), by the rows' places
    (int64).
    """
    if places.device.type != "cpu":
        return hashing.initial_values("round", places, columns, step, 0.5).add_(0.5)
    drawn = initial_values("round", places.numpy().astype(np.uint64), range(columns), step, 0.5)
    return torch.from_numpy(drawn).add_(0.5)


def _grid(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and offset of rows: float32 [N, 1] each."""
    tail = stored[:, -_TAIL:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return tail[:, :1], tail[:, 1:]


_HUGE = 2 * 2**20
_MADV_HUGEPAGE = 14  # linux/mman.h


def empty_table(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Create `torch.empty(rows, columns)` and ask for pages of 2 MiB before anything is written to it.

    Linux gives them where /sys/kernel/mm/transparent_hugepage/enabled is `madvise` (the usual) or `always`; elsewhere
    the memory is as it is.
    """
    table = torch.empty(rows, columns, dtype=dtype)
    if table.device.type != "cpu":  # see headrace.embeddings.kernels.dispatch.default_device
        return table
    start = -(-table.data_ptr() // _HUGE) * _HUGE
    size = (table.data_ptr() + table.numel() * table.element_size()) // _HUGE * _HUGE - start
    if sys.platform == "linux" and size > 0:
        # A kernel without huge pages returns an error, which is harmless.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_HUGEPAGE)
    return table


@dataclass(frozen=True)
class CachedSlots:
    """Rows of a batch on the device. U distinct rows, ascending."""

    #: int64 [U].
    rows: Tensor
    #: Weights, then the optimizer's states: [*, width] each.
    matrices: list[Tensor]
    #: Position of the rows in the matrices: int64 [U].
    slots: Tensor
    #: True if the matrices are copies for this batch alone.
    is_copy: bool = False


class RowCache:
    """Cache on a GPU of the hot rows of a table that is in host memory, for tables larger than a GPU's memory.

        rows = RowCache([weight, sums], capacity=10_000_000, device="cuda")
        vectors = rows.look_up(duplicates, admit=True)   # the batch's missing rows are copied to the GPU
        rows.counts                                      # hits and lookups: rows that were cached before their batch
        cached = rows.acquire(duplicates.unique)         # to be changed: matrices on the GPU, and slots
        rows.commit(cached)                              # they were changed
        rows.flush()                                     # host memory holds everything again

    Where room is needed, rows seen least often (lfu; of equals those seen longest ago) or longest ago (lru) are
    evicted to the host, never one of the batch's own. A row's count begins at 0 when it comes again. A batch with more
    distinct rows than `capacity` caches those it looks up most, and works on a copy of its own. Four bytes a row hold
    its slot, so a lookup takes one read.

    FBGEMM's TBE caches rows in sets of 32 slots under unified virtual memory (LFU or LRU in a set), and so does
    HugeCTR's embedding cache. Here any row may be in any slot, and rows move in two copies a batch.

    Args:
        host: matrices in host memory, [N, *] of the same N, changed in place: weights, later the optimizer's states.
        capacity: rows on the device, C.
        device: the GPU.
        ends: last row (exclusive) of each table, one after the other; hits are counted by table. None: one table.
        evict: eviction rule.
        evict_share: least share of C that is evicted at once: each eviction costs a pass over C counts.
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
        #: Matrices in host memory, valid for rows that are not on the device.
        self.host: list[Tensor] = []
        #: Matrices on the device, [C, *].
        self.on_device: list[Tensor] = []
        #: Slot of each row on the device, or -1: int32 [N].
        self._slot_of = torch.full((count,), -1, dtype=torch.int32, device=self.device)
        #: By slot: the row (-1: none), number of lookups, last batch that used it, True if it changed.
        self._row_in_slot = torch.full((capacity,), -1, dtype=torch.int64, device=self.device)
        self._seen = torch.zeros(capacity, dtype=torch.int64, device=self.device)
        self._last = torch.zeros(capacity, dtype=torch.int64, device=self.device)
        self._dirty = torch.zeros(capacity, dtype=torch.bool, device=self.device)
        self._batches = 0
        self._ends = torch.tensor([count] if ends is None else list(ends), dtype=torch.int64, device=self.device)
        #: By table, lookups that hit, and all; on the device, so that counting waits for nothing.
        self._hits = torch.zeros(2, len(self._ends), dtype=torch.int64, device=self.device)
        self.set_matrices(host)

    def set_matrices(self, host: Sequence[Tensor]) -> None:
        """Replace the matrices, the first of them as before; rows that changed on the device are written back."""
        self.invalidate()
        self.host = list(host)
        retained = self.on_device[:1]
        self.on_device = retained + [
            torch.zeros(self.capacity, full.shape[1], dtype=full.dtype, device=self.device)
            for full in self.host[len(retained) :]
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
        """Fetch distinct rows, int32 or int64 [U] on the device, to be changed there; `commit` follows."""
        rows = rows.long()
        if len(rows) > self.capacity:
            return CachedSlots(rows, self.read(rows), torch.arange(len(rows), device=self.device), is_copy=True)
        return CachedSlots(rows, self.on_device, self._fetch_missing(rows))

    def _fetch_missing(self, rows: Tensor, counts: Tensor | None = None) -> Tensor:
        """Return slots of distinct rows int64 [U], at most `capacity`, fetching missing ones.

        `counts`: lookups of each, [U].
        """
        slots = self._slot_of[rows].long()
        present = slots >= 0
        self._batches += 1
        # Before any eviction: the batch's own rows stay.
        self._last[slots[present]] = self._batches
        if counts is not None:
            self._seen[slots[present]] += counts[present]
        missing = rows[~present]
        if len(missing):
            slots[~present] = self._fetch(missing, torch.ones_like(missing) if counts is None else counts[~present])
        return slots

    def look_up(self, duplicates: Duplicates, admit: bool) -> Tensor:
        """Return the stored weights of a batch's distinct rows, [U, *]; with `admit` they are counted and cached.

        They are counted, and are on the device from now on.
        """
        rows = duplicates.unique.long()
        if not admit:
            return self.read(rows, 1)[0]
        ends = torch.cat([duplicates.starts[1:], duplicates.starts.new_full((1,), duplicates.order.numel())])
        counts = ends[: len(rows)] - duplicates.starts
        self._count(rows, counts)
        if len(rows) > self.capacity:
            # Half of the capacity is for rows looked up most in this batch, half for those cached before.
            most = torch.argsort(counts, descending=True, stable=True)[: self.capacity // 2].sort().values
            self._fetch_missing(rows[most], counts[most])
            return self.read(rows, 1)[0]
        return self.on_device[0].index_select(0, self._fetch_missing(rows, counts))

    def commit(self, cached: CachedSlots) -> None:
        """Mark all acquired rows as changed."""
        if not cached.is_copy:
            self._dirty[cached.slots] = True
            return
        slots = self._slot_of[cached.rows].long()
        present = slots >= 0
        self._dirty[slots[present]] = True
        missing = cached.rows[~present].cpu()
        for full, on_device, matrix in zip(self.host, self.on_device, cached.matrices, strict=True):
            on_device.index_copy_(0, slots[present], matrix[present])
            full.index_copy_(0, missing, matrix[~present].cpu())

    def read(self, rows: Tensor, matrices: int | None = None) -> list[Tensor]:
        """Return copies of distinct rows int64 [U] on the device, [U, *] each; the cache stays.

        `matrices`: the first alone.
        """
        slots = self._slot_of[rows].long()
        present = slots >= 0
        missing = rows[~present].cpu()
        copies = []
        for full, on_device in zip(self.host[:matrices], self.on_device[:matrices], strict=True):
            out = on_device.new_empty(len(rows), on_device.shape[1])
            out[present] = on_device.index_select(0, slots[present])
            out[~present] = self._to_device(full, missing)
            copies.append(out)
        return copies

    def flush(self) -> None:
        """Write changed rows back to the host; they stay on the device as well."""
        self._write_back(self._dirty.nonzero().view(-1))

    def invalidate(self) -> None:
        """Write changed rows back, and drop all rows on the device: the host's matrices are then valid."""
        self.flush()
        self._slot_of.fill_(-1)
        self._row_in_slot.fill_(-1)

    def scale(self, matrix: int, by: float) -> None:
        """Multiply one of the matrices, wherever its rows are."""
        self.host[matrix].mul_(by)
        self.on_device[matrix].mul_(by)

    def _count(self, rows: Tensor, counts: Tensor) -> None:
        """Count hits of distinct rows, ascending, with `counts` lookups each."""
        present = self._slot_of[rows] >= 0
        sums = torch.nn.functional.pad(torch.stack([counts * present, counts]).cumsum(1), (1, 0))
        upto = sums[:, torch.searchsorted(rows, self._ends)]
        self._hits += torch.diff(upto, dim=1, prepend=torch.zeros_like(upto[:, :1]))

    def _fetch(self, rows: Tensor, counts: Tensor) -> Tensor:
        free = (self._row_in_slot < 0).nonzero().view(-1)
        if len(free) < len(rows):
            free = torch.cat([free, self._evict(len(rows) - len(free))])
        slots = free[: len(rows)]
        host_rows = rows.cpu()
        for full, on_device in zip(self.host, self.on_device, strict=True):
            on_device.index_copy_(0, slots, self._to_device(full, host_rows))
        self._row_in_slot[slots], self._slot_of[rows] = rows, slots.to(torch.int32)
        self._seen[slots], self._last[slots] = counts, self._batches
        return slots

    def _evict(self, needed: int) -> Tensor:
        """Evict at least `needed` rows; return their slots."""
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
        """Copy rows int64 [N] of a host matrix to the device."""
        with torch.device("cpu"):  # also inside a default device
            copied = gather(full, rows)
            copied = copied.pin_memory() if self.device.type == "cuda" else copied
        return copied.to(self.device, non_blocking=True)
