"""Ids that wait for a row, on a GPU: headrace.embeddings.dynamic.admission_cpu with tensors in place of arrays."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.embeddings.dynamic.admission_cpu import FREQUENCY, ID, LAST_SEEN
from headrace.embeddings.kernels.hashing import lexsort
from headrace.embeddings.kernels.id_map_gpu import DeviceMap


def grown_table(table: Tensor, rows: int, limit: int | None = None) -> Tensor:
    """The same numbers [M, ...] with room for `rows` rows at least: half as many again, to the limit at most."""
    if rows <= len(table):
        return table
    room = max(rows, len(table) * 3 // 2, 64)
    out = table.new_zeros((room if limit is None else max(rows, min(room, limit)), table.shape[1]))
    out[: len(table)] = table
    return out


class DeviceAdmissionCounts:
    """See headrace.embeddings.dynamic.admission_cpu.Waiting.

    The same methods on tensors, the same ids are forgotten.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self._limit, self._device = limit, device
        self._map = DeviceMap(device)
        self._table = torch.zeros(0, 3, dtype=torch.int64, device=device)
        self._living = 0

    def __len__(self) -> int:
        return self._living

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._map.nbytes + self._table.numel() * 8

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(number, times seen) of distinct ids [N]; (-1, 0) of those who were never here."""
        numbers = self._map.find(ids)
        seen = torch.zeros_like(ids)
        there = numbers >= 0
        seen[there] = self._table[numbers[there], FREQUENCY]
        return numbers, seen

    def put(self, ids: Tensor, numbers: Tensor, seen: Tensor, batch: int) -> None:
        """Say of distinct ids, with the numbers that `find` gave, that they were seen so often, last in `batch`."""
        old = numbers >= 0
        here, new = numbers[old], ids[~old]
        self._living += len(new) + int((self._table[here, FREQUENCY] == 0).sum())
        self._table[here, FREQUENCY] = seen[old]
        self._table[here, LAST_SEEN] = batch
        first = len(self._map)
        self._map.add(new)
        self._table = grown_table(self._table, len(self._map))
        self._table[first : len(self._map)] = torch.stack([new, seen[~old], torch.full_like(new, batch)], dim=1)
        self._tidy()

    def leave(self, numbers: Tensor) -> None:
        """Those with these numbers (-1: nobody) wait no more."""
        gone = numbers[numbers >= 0]
        self._living -= int((self._table[gone, FREQUENCY] > 0).sum())
        self._table[gone, FREQUENCY] = 0
        self._tidy()

    def state(self) -> Tensor:
        """Who waits: int64 [W, 3] of id, times seen, batch seen last."""
        held = self._table[: len(self._map)]
        return held[held[:, FREQUENCY] > 0]

    def load(self, state: Tensor) -> None:
        """Take over what `state` gave, in any order, from any device."""
        self._table = state.to(self._device, copy=True)
        self._map, self._living = DeviceMap(self._device, self._table[:, ID].contiguous()), len(state)
        self._tidy()

    def _tidy(self) -> None:
        if self._living > self._limit:
            held = self.state()
            # A tenth at once: to choose costs a pass over all.
            stay = max(1, self._limit - self._limit // 10)
            self.load(held[lexsort(held[:, ID], -held[:, FREQUENCY], -held[:, LAST_SEEN])[:stay]])
        elif len(self._map) > 2 * self._living + 1024:
            self.load(self.state())
