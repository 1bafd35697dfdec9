"""Ids with how often and when they were seen: of those that have a row, and of those that wait for one."""

from __future__ import annotations

import numpy as np

from headrace.embeddings.kernels.id_map_cpu import SLOT_BYTES, IdMap, Ids, slots_for

#: Columns of a table of frequency counts: int64.
ID, FREQUENCY, LAST_SEEN = 0, 1, 2
#: Bytes of an id's record.
RECORD_BYTES = 24
#: So many dead are no reason to tidy up.
_FEW = 1_024


def grown_capacity(rows: int, room: int) -> int:
    """Room for `rows` rows at least, where there was `room`: half as much again."""
    return max(rows, room * 3 // 2, 64)


def grown_records(table: Ids, room: int) -> Ids:
    """The same numbers [M, 3] and zeros to `room` rows, which take memory once they are written."""
    out = np.zeros((room, 3), dtype=np.int64)
    out[: len(table)] = table
    return out


def waiting_bytes(limit: int) -> int:
    """The most that `AdmissionCounts` takes: as many dead as living, and the room of growth by half."""
    most = 2 * limit + _FEW
    return RECORD_BYTES * most * 3 // 2 + SLOT_BYTES * slots_for(most)


class AdmissionCounts:
    """Ids that were seen and have no row yet. Where there are too many, those seen longest ago are forgotten.

    Who leaves stays in the map with a count of 0 until the dead outnumber the living: a map of open addressing cannot
    let go of one id, and to make a new one at each admission would cost a pass over all who wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._map = IdMap()
        self._table: Ids = np.zeros((0, 3), dtype=np.int64)
        self._living = 0

    def __len__(self) -> int:
        return self._living

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._map.nbytes + self._table.nbytes

    def find(self, ids: Ids) -> tuple[Ids, Ids]:
        """(number, times seen) of distinct ids [N]; (-1, 0) of those who were never here."""
        numbers = self._map.find(ids)
        seen = np.zeros(len(ids), dtype=np.int64)
        seen[numbers >= 0] = self._table[numbers[numbers >= 0], FREQUENCY]
        return numbers, seen

    def put(self, ids: Ids, numbers: Ids, seen: Ids, batch: int) -> None:
        """Say of distinct ids, with the numbers that `find` gave, that they were seen so often, last in `batch`."""
        old = numbers >= 0
        self._living += int((~old).sum()) + int((self._table[numbers[old], FREQUENCY] == 0).sum())
        self._table[numbers[old], FREQUENCY] = seen[old]
        self._table[numbers[old], LAST_SEEN] = batch
        first = len(self._map)
        self._map.add(ids[~old])
        if len(self._map) > len(self._table):
            self._table = grown_records(self._table, grown_capacity(len(self._map), len(self._table)))
        self._table[first : len(self._map)] = np.stack(
            [ids[~old], seen[~old], np.full((~old).sum(), batch, dtype=np.int64)], axis=1
        )
        self._tidy()

    def leave(self, numbers: Ids) -> None:
        """Those with these numbers (-1: nobody) wait no more."""
        gone = numbers[numbers >= 0]
        self._living -= int((self._table[gone, FREQUENCY] > 0).sum())
        self._table[gone, FREQUENCY] = 0
        self._tidy()

    def state(self) -> Ids:
        """Who waits: int64 [W, 3] of id, times seen, batch seen last."""
        held = self._table[: len(self._map)]
        return held[held[:, FREQUENCY] > 0]

    def load(self, state: Ids) -> None:
        """Take over what `state` gave, in any order."""
        self._table, self._map, self._living = state.copy(), IdMap(state[:, ID].copy()), len(state)
        self._tidy()

    def _tidy(self) -> None:
        if self._living > self._limit:
            held = self.state()
            # A tenth at once: to choose costs a pass over all.
            stay = max(1, self._limit - self._limit // 10)
            self.load(held[np.lexsort((held[:, ID], -held[:, FREQUENCY], -held[:, LAST_SEEN]))[:stay]])
        elif len(self._map) > 2 * self._living + _FEW:
            self.load(self.state())
