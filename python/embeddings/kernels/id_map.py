"""A hash table from 64-bit ids to small numbers: open addressing, whole batches at a time.

By the loops of native/cpp/id_map.cpp, where `make native` has built them, else in NumPy. The two may put ids
otherwise; what is found does not depend on it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.compute import native

Ids = NDArray[np.int64]

#: Slots of the smallest map.
_LEAST = 16
#: Ids that are inserted at a time: the memory besides the map stays small.
_AT_ONCE = 2**16
#: Bytes of a slot: an id and its number.
SLOT_BYTES = 16
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(ids: Ids, salt: int = 0) -> NDArray[np.uint64]:
    """Hash ids by SplitMix64 (Steele, Lea and Flood, 2014): uint64 [N]. Distinct ids have distinct hashes."""
    x = ids.view(np.uint64) + np.uint64((salt + 1) * int(_GOLDEN) % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def slots_for(ids: int) -> int:
    """Return the number of slots of a map of `ids` ids: a power of two, at most half of them taken."""
    return max(_LEAST, 1 << (2 * ids - 1).bit_length())


class SlotTable:
    """Size and load of a hash table, in host memory or on a GPU."""

    #: Id of each slot.
    _keys: Any
    _used: int

    def __len__(self) -> int:
        return self._used

    @property
    def load(self) -> float:
        """Share of slots that are taken."""
        return self._used / len(self._keys)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return SLOT_BYTES * len(self._keys)


class IdMap(SlotTable):
    """Map from ids to numbers. Linear probing, at most half full, so that a few rounds over a batch find everything.

    Nothing is ever taken out alone: who evicts begins anew with those who stay.
    """

    def __init__(self, ids: Ids | None = None) -> None:
        self._keys: Ids = np.zeros(_LEAST, dtype=np.int64)
        #: -1: the slot is free.
        self._numbers: Ids = np.full(_LEAST, -1, dtype=np.int64)
        self._used = 0
        #: A flag in place of the library: maps are copied.
        self._by_loops = native.library() is not None
        if ids is not None:
            self.add(ids)

    def find(self, ids: Ids) -> Ids:
        """Return the number of each id [N]; -1 where the map lacks it."""
        loops = native.library() if self._by_loops else None
        if loops is not None:
            ids, out = np.ascontiguousarray(ids), np.empty(len(ids), dtype=np.int64)
            arguments = self._keys.ctypes, self._numbers.ctypes, len(self._keys), ids.ctypes, len(ids), out.ctypes
            loops.headrace_id_map_find(*arguments)
            return out
        result = np.full(len(ids), -1, dtype=np.int64)
        mask = len(self._keys) - 1
        slot = (mix(ids) & np.uint64(mask)).astype(np.int64)
        open_ = np.arange(len(ids))
        while len(open_):
            open_slots = slot[open_]
            numbers = self._numbers[open_slots]
            hit = (numbers >= 0) & (self._keys[open_slots] == ids[open_])
            result[open_[hit]] = numbers[hit]
            open_ = open_[(numbers >= 0) & ~hit]
            slot[open_] = (slot[open_] + 1) & mask
        return result

    def replace(self, ids: Ids) -> None:
        """Replace the content by distinct ids [N], numbered in their order. Never holds two maps."""
        slots = _LEAST if 2 * len(ids) <= _LEAST else slots_for(len(ids))
        if slots != len(self._keys):
            self._keys = self._numbers = np.zeros(0, dtype=np.int64)
            self._keys, self._numbers = np.zeros(slots, dtype=np.int64), np.empty(slots, dtype=np.int64)
        self._numbers.fill(-1)
        self._used = 0
        self.add(ids)

    def add(self, ids: Ids) -> Ids:
        """Insert distinct new ids [N] with the next numbers, in their order: int64 [N]."""
        numbers = np.arange(self._used, self._used + len(ids), dtype=np.int64)
        self._used += len(ids)
        if 2 * self._used > len(self._keys):
            held = self._numbers >= 0
            ids_before, numbers_before = self._keys[held], self._numbers[held]
            size = slots_for(self._used)
            self._keys, self._numbers = np.zeros(size, dtype=np.int64), np.full(size, -1, dtype=np.int64)
            self._put(ids_before, numbers_before)
        self._put(ids, numbers)
        return numbers

    def _put(self, ids: Ids, numbers: Ids) -> None:
        loops = native.library() if self._by_loops else None
        if loops is not None:
            ids, slots = np.ascontiguousarray(ids), len(self._keys)
            loops.headrace_id_map_insert(
                self._keys.ctypes, self._numbers.ctypes, slots, ids.ctypes, numbers.ctypes, len(ids)
            )
            return
        for first in range(0, len(ids), _AT_ONCE):
            self._put_some(ids[first : first + _AT_ONCE], numbers[first : first + _AT_ONCE])

    def _put_some(self, ids: Ids, numbers: Ids) -> None:
        mask = len(self._keys) - 1
        slot = (mix(ids) & np.uint64(mask)).astype(np.int64)
        open_ = np.arange(len(ids))
        while len(open_):
            open_slots = slot[open_]
            free = self._numbers[open_slots] < 0
            # Of several ids for one free slot the last gets it.
            self._keys[open_slots[free]] = ids[open_[free]]
            self._numbers[open_slots[free]] = numbers[open_[free]]
            open_ = open_[self._numbers[open_slots] != numbers[open_]]
            slot[open_] = (slot[open_] + 1) & mask
