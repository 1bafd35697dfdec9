"""A hash table from 64-bit ids to small numbers on a GPU, in Triton: open addressing, whole batches at a time.

The same functions as kernels.id_map_cpu.IdMap has on CPUs, with the same answers. Whoever puts an id claims a
free slot by compare-and-swap; which of two that want one gets it is left to the GPU, and no answer depends on it.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.embeddings.kernels.id_map_cpu import SlotTable, slots_for

#: Ids of a program.
_BLOCK = 256


@triton.jit
def _hash(ids):
    """SplitMix64 (Steele, Lea and Flood, 2014) of ids: see headrace.embeddings.kernels.id_map_cpu.mix."""
    x = ids.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return (x ^ (x >> 31)).to(tl.int64, bitcast=True)


# What changes from batch to batch is kept out of what Triton compiles a kernel anew for: see kernels.
@triton.jit(do_not_specialize=["n", "last"], do_not_specialize_on_alignment=["ids", "out"])
def _find(keys, numbers, ids, out, n, last, BLOCK: tl.constexpr):
    """out[i] = the number of ids[i], or -1. `last`: the slots' number less one, a mask."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    looks = at < n
    wanted = tl.load(ids + at, mask=looks, other=0)
    slot = _hash(wanted) & last
    found = tl.full((BLOCK,), -1, tl.int64)
    while tl.max(looks.to(tl.int32), 0) > 0:
        number = tl.load(numbers + slot, mask=looks, other=-1)
        key = tl.load(keys + slot, mask=looks, other=0)
        looks = looks & (number >= 0)
        found = tl.where(looks & (key == wanted), number, found)
        looks = looks & (key != wanted)
        slot = (slot + 1) & last
    tl.store(out + at, found, mask=at < n)


@triton.jit(do_not_specialize=["n", "last"], do_not_specialize_on_alignment=["ids", "given"])
def _put(keys, numbers, ids, given, n, last, BLOCK: tl.constexpr):
    """Give ids[i], which is not there, the number given[i]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    looks = at < n
    new = tl.load(ids + at, mask=looks, other=0)
    number = tl.load(given + at, mask=looks, other=0)
    free = tl.full((BLOCK,), -1, tl.int64)
    slot = _hash(new) & last
    while tl.max(looks.to(tl.int32), 0) > 0:
        # There is no mask for it: lanes that are done ask the cell behind the last slot, which is never free.
        before = tl.atomic_cas(numbers + tl.where(looks, slot, last + 1), free, number)
        tl.store(keys + slot, new, mask=looks & (before < 0))
        looks = looks & (before >= 0)
        slot = (slot + 1) & last


class DeviceMap(SlotTable):
    """Ids and their numbers. Linear probing, at most half full.

    Nothing is ever taken out alone: who evicts makes a new map of those who stay.

    Args:
        device: where it is.
        ids: int64 [N], distinct: the first of the map, in this order.
    """

    def __init__(self, device: torch.device, ids: Tensor | None = None) -> None:
        self._device = device
        self._used = 0
        self._make(slots_for(1))
        if ids is not None:
            self.add(ids)

    def find(self, ids: Tensor) -> Tensor:
        """The number of each id [N]; -1 where it is not in the map."""
        out = torch.empty_like(ids)
        if len(ids):
            self._launch(_find, ids.contiguous(), out)
        return out

    def add(self, ids: Tensor) -> Tensor:
        """Give distinct new ids [N] the next numbers, in their order: int64 [N]."""
        numbers = torch.arange(self._used, self._used + len(ids), device=self._device)
        self._used += len(ids)
        if 2 * self._used > len(self._keys):
            held = self._numbers[:-1] >= 0
            before = self._keys[held], self._numbers[:-1][held]
            self._make(slots_for(self._used))
            self._put(*before)
        self._put(ids.contiguous(), numbers)
        return numbers

    def _make(self, slots: int) -> None:
        self._keys = torch.zeros(slots, dtype=torch.int64, device=self._device)
        #: -1: the slot is free. One cell more than slots: see `_put`.
        self._numbers = torch.full((slots + 1,), -1, dtype=torch.int64, device=self._device)
        self._numbers[-1] = 0

    def _put(self, ids: Tensor, numbers: Tensor) -> None:
        if len(ids):
            self._launch(_put, ids, numbers)

    def _launch(self, kernel, ids: Tensor, numbers: Tensor) -> None:
        n = len(ids)
        kernel[(triton.cdiv(n, _BLOCK),)](self._keys, self._numbers, ids, numbers, n, len(self._keys) - 1, _BLOCK)
