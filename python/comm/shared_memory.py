"""Ranks of one machine that talk through memory they share: no kernel takes part.

    collective = shared(HorovodCollective())   # or TorchCollective; itself, where its ranks do not share a machine

The all-to-alls and all-reduces of a step go this way, the rare rest through the collective that is wrapped. Each rank
has a header and some slots, files in memory without a name (memfd_create) that the others open through /proc, so
nothing is left behind by a process that is killed. A sender writes into a free slot, notes in its header for whom which
rows are, and counts the message; a receiver waits for the count (a futex), reads its rows and notes that the slot may
be used again. So a message is copied twice; or not at all, where its rows are made in the slot and are read there
(`SharedCollective.channel`). Sums run in rank order on every rank, so all hold the same bits.
"""

from __future__ import annotations

import logging
import math
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from headrace import native
from headrace.comm.base import Collective, MessageChannel, PeerLost, ReceivedMessage, check_send_rows, unflatten
from headrace.comm.segment import SLOTS, Segment
from headrace.world import World

log = logging.getLogger("headrace.comm")
#: A slot is for messages of a size between this many times as small and as large.
_ALIKE = 4
#: Beyond so many ranks their sums would be read by too many.
_MOST_RANKS = 8


def may_share(world: World) -> bool:
    """Whether `shared` tries it."""
    return 1 < world.size <= _MOST_RANKS and world.local_size >= world.size


def shared(inner: Collective) -> Collective:
    """The same ranks through shared memory; `inner` where they have none, or are too many. Collective."""
    world = inner.world
    if not may_share(world):
        return inner
    mine: Segment | None = None
    if sys.platform == "linux" and native.library() is not None:
        with suppress(OSError):
            mine = Segment.make(world.size)
    addresses = inner.all_gather(torch.tensor([Segment.no_address() if mine is None else mine.address]))
    segments: list[Segment] = []
    if mine is not None:
        with suppress(OSError, ValueError):
            segments = [
                mine if rank == world.rank else Segment.of_peer(world.size, address)
                for rank, address in enumerate(addresses.tolist())
            ]
    votes = torch.tensor([len(segments) == world.size], dtype=torch.int64)
    inner.all_reduce_sum([votes])
    if int(votes) < world.size:
        for segment in [*segments, *([] if mine is None else [mine])]:
            segment.close()
        log.info("the ranks share no memory, though they say that they share a machine")
        return inner
    return SharedCollective(inner, segments)


class SharedCollective:
    """See the module; made by `shared`."""

    def __init__(self, inner: Collective, segments: Sequence[Segment]) -> None:
        self._inner = inner
        self._segments = list(segments)
        self._me = inner.world.rank
        self._mine = self._segments[self._me]
        self._others = [(r, segment) for r, segment in enumerate(self._segments) if r != self._me]
        #: Messages so far, the same number on all ranks.
        self._count = 0
        #: Slots that are being written.
        self._reserved: set[int] = set()

    @property
    def world(self) -> World:
        return self._inner.world

    def all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        return self.start_all_to_all(x, send_rows)()

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        if x.device.type != "cpu":
            return self._inner.start_all_to_all(x, send_rows)
        check_send_rows(x, send_rows, self.world.size)
        rows = torch.split(x.detach(), list(send_rows))
        message = self.reserve(send_rows, x.shape[1:], x.dtype)
        for part, given in zip(message.parts, rows, strict=True):
            if part is not None:
                part.copy_(given)
        arrive = message.send()

        def wait() -> tuple[Tensor, list[int]]:
            received = arrive()
            # What a rank sends to itself stays where it is.
            parts = [rows[self._me] if p is None else p for p in received.parts]
            out = torch.cat(parts)
            received.release()
            return out, [p.shape[0] for p in parts]

        return wait

    @property
    def channel(self) -> MessageChannel:
        """Messages that are made and read in the slots."""
        return self

    def reserve(self, send_rows: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> _SlotMessage:
        """See headrace.comm.base.Post."""
        cuts = [0]
        for rank, rows in enumerate(send_rows):
            cuts.append(cuts[-1] + (0 if rank == self._me else rows))
        size = cuts[-1] * dtype.itemsize * math.prod(shape)
        slot = self._free_slot(size)
        self._reserved.add(slot)
        segment = self._mine.slot(slot, size)[:size].view(dtype).view(cuts[-1], *shape)
        parts = [None if r == self._me else segment[cuts[r] : cuts[r + 1]] for r in range(self.world.size)]
        kind = zlib.crc32(f"all_to_all {dtype} {list(shape)}".encode())
        return _SlotMessage(parts, lambda: self._send(slot, kind, cuts, shape, dtype))

    def _send(
        self, slot: int, kind: int, cuts: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> Callable[[], ReceivedMessage]:
        self._reserved.discard(slot)
        number = self._publish(slot, kind, cuts)
        row = dtype.itemsize * math.prod(shape)

        def wait() -> ReceivedMessage:
            arrived = [(r, peer, self._arrived(r, peer, number, kind)) for r, peer in self._others]
            parts: list[Tensor | None] = [None] * self.world.size
            for r, peer, slot_number in arrived:
                first, last = (int(n) for n in peer.cuts[slot_number, self._me : self._me + 2])
                segment = peer.slot(slot_number, last * row)[first * row : last * row]
                parts[r] = segment.view(dtype).view(last - first, *shape)

            def release() -> None:
                for r, _, slot_number in arrived:
                    self._mine.acknowledge(r, slot_number, number)

            return ReceivedMessage(parts, release)

        return wait

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        groups: dict[torch.dtype, list[Tensor]] = {}
        for t in tensors:
            groups.setdefault(t.dtype, []).append(t)
        if any(t.device.type != "cpu" for t in tensors):
            return self._inner.all_reduce_sum(tensors)
        for dtype, members in groups.items():
            self._sum(dtype, members)

    def _sum(self, dtype: torch.dtype, members: Sequence[Tensor]) -> None:
        numbers = sum(t.numel() for t in members)
        size = numbers * dtype.itemsize
        kind = zlib.crc32(f"all_reduce {dtype} {numbers}".encode())
        slot = self._free_slot(size)
        parts = [torch.empty(0, dtype=dtype)] * self.world.size
        parts[self._me] = self._mine.slot(slot, size)[:size].view(dtype)
        torch.cat([t.detach().reshape(-1) for t in members], out=parts[self._me])
        number = self._publish(slot, kind, [numbers] * (self.world.size + 1))
        arrived = [(r, peer, self._arrived(r, peer, number, kind)) for r, peer in self._others]
        for r, peer, slot_number in arrived:
            parts[r] = peer.slot(slot_number, size)[:size].view(dtype)
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        for r, _, slot_number in arrived:
            self._mine.acknowledge(r, slot_number, number)
        unflatten(members, total)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._inner.all_gather(x)

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        self._inner.broadcast(tensors, root)

    def barrier(self) -> None:
        self._inner.barrier()

    def close(self) -> None:
        """Tell the others that this rank leaves: who waits for it raises PeerLost."""
        for segment in self._segments:
            segment.close()

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that this rank's messages take, until it leaves."""
        return self._mine.nbytes

    def _free_slot(self, size: int) -> int:
        """A slot whose message everybody has read: best one of about so many bytes, then one that was never used.

        So small messages (ids) take no slot of large ones (vectors), and few slots become large.
        """
        segment = self._mine.sizes

        def dislike(slot: int) -> tuple[int, bool, int]:
            is_alike = 0 < size <= _ALIKE * segment[slot] <= _ALIKE**2 * size
            return 0 if is_alike else 1 if not segment[slot] else 2, segment[slot] < size, abs(segment[slot] - size)

        liked = sorted(range(SLOTS), key=dislike)
        lost: int | None = None
        while True:
            for slot in liked:
                if slot not in self._reserved and self._is_read(slot):
                    return slot
            # One more look at the slots after one is found to be gone: it may have read its messages before it left.
            if lost is not None:
                raise PeerLost(f"rank {lost} is gone")
            lost = self._lost()
            if lost is None:
                time.sleep(1e-4)

    def _is_read(self, slot: int) -> bool:
        number = int(self._mine.numbers[slot])
        return all(int(segment.read[self._me, slot]) == number for _, segment in self._others)

    def _publish(self, slot: int, kind: int, cuts: Sequence[int]) -> int:
        self._count += 1
        mine = self._mine
        mine.kinds[slot], mine.cuts[slot] = kind, cuts
        mine.numbers[slot] = self._count & 0xFFFFFFFF
        mine.set_and_wake(self._count)
        return self._count

    def _arrived(self, rank: int, peer: Segment, number: int, kind: int) -> int:
        """Wait until a rank has sent its message of this number; the slot that it is in.

        Raises:
            PeerLost: the rank is gone.
            RuntimeError: it is in another collective.
        """
        while not peer.has_counted(number):
            lost = self._lost()
            # It may have been sent since the wait ended, and by a rank that then left.
            if lost is not None and not peer.has_counted(number, microseconds=0):
                raise PeerLost(f"rank {lost} is gone")
        slot = int(np.flatnonzero(peer.numbers == number & 0xFFFFFFFF)[0])
        if int(peer.kinds[slot]) != kind:
            raise RuntimeError(f"rank {rank} is in another collective than rank {self._me} (message {number})")
        return slot

    def _lost(self) -> int | None:
        """A rank that has left or died."""
        return next((rank for rank, segment in self._others if segment.has_left()), None)


class _SlotMessage:
    """See headrace.comm.base.Message."""

    def __init__(self, parts: Sequence[Tensor | None], send: Callable[[], Callable[[], ReceivedMessage]]) -> None:
        self.parts, self.send = parts, send
