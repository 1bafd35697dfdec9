"""Messages through memory that ranks of one machine share: no kernel takes part.

Each rank has a header and some slots, files in memory without a name (memfd_create) that the others open through
/proc, so nothing is left behind by a process that is killed. A sender writes into a free slot, notes in its header for
whom which rows are, and counts the message; a receiver waits for the count (a futex), reads its rows and notes that the
slot may be used again. So a message is copied twice; or not at all, where its rows are made in the slot and are read
there (`SharedMessages.reserve`). Sums run in rank order on every rank, so all hold the same bits.
"""

from __future__ import annotations

import math
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.comm.base import FlightTicket, InFlight, PeerLost, ReceivedMessage, check_send_rows, unflatten
from headrace.comm.segment import SLOTS, Segment

#: A slot is for messages of a size between this many times as small and as large.
_ALIKE = 4


class SharedMessages:
    """Some ranks' messages to each other. Ranks are numbered among them here, but in what is raised."""

    def __init__(self, segments: Sequence[Segment], me: int, ranks: Sequence[int]) -> None:
        """All ranks' segments in the order of the ranks, whose numbers in the job are `ranks`; this is the `me`-th."""
        self._segments, self._ranks, self._me = list(segments), list(ranks), me
        self._mine = self._segments[me]
        self._others = [(r, segment) for r, segment in enumerate(self._segments) if r != me]
        #: Messages so far, the same number on all ranks.
        self._count = 0
        #: Slots that are being written.
        self._reserved: set[int] = set()
        self._in_flight = InFlight()
        #: Messages that were begun, and that nobody waits for any more.
        self._abandoned: deque[tuple[int, FlightTicket]] = deque()

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self._segments)

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        """See headrace.comm.base.Collective, of a tensor in memory; `send_rows` for each of these ranks."""
        check_send_rows(x, send_rows, self.size)
        rows = torch.split(x.detach(), list(send_rows))
        arrive = self.start(rows)

        def wait() -> tuple[Tensor, list[int]]:
            received = arrive()
            # What a rank sends to itself stays where it is.
            parts = [rows[self._me] if p is None else p for p in received.parts]
            out = torch.cat(parts)
            received.release()
            return out, [p.shape[0] for p in parts]

        return wait

    def start(self, rows: Sequence[Tensor]) -> Callable[[], ReceivedMessage]:
        """Begin an all-to-all: rows for each rank, all of one dtype and trailing shape; what is returned waits."""
        message = self.reserve([len(given) for given in rows], rows[0].shape[1:], rows[0].dtype)
        for part, given in zip(message.parts, rows, strict=True):
            if part is not None:
                part.copy_(given)
        return message.send()

    def reserve(self, send_rows: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> _SlotMessage:
        """See headrace.comm.base.MessageChannel."""
        cuts = [0]
        for rank, rows in enumerate(send_rows):
            cuts.append(cuts[-1] + (0 if rank == self._me else rows))
        size = cuts[-1] * dtype.itemsize * math.prod(shape)
        self._give_up_abandoned()
        ticket = self._in_flight.begin()
        slot = self._free_slot(size)
        self._reserved.add(slot)
        segment = self._mine.slot(slot, size)[:size].view(dtype).view(cuts[-1], *shape)
        parts = [None if r == self._me else segment[cuts[r] : cuts[r + 1]] for r in range(self.size)]
        kind = zlib.crc32(f"all_to_all {dtype} {list(shape)}".encode())
        return _SlotMessage(parts, lambda: self._send(slot, kind, cuts, shape, dtype, ticket))

    def _send(
        self, slot: int, kind: int, cuts: Sequence[int], shape: Sequence[int], dtype: torch.dtype, ticket: FlightTicket
    ) -> Callable[[], ReceivedMessage]:
        self._reserved.discard(slot)
        number = self._publish(slot, kind, cuts)
        row = dtype.itemsize * math.prod(shape)

        def wait() -> ReceivedMessage:
            arrived = [(r, peer, self._arrived(r, peer, number, kind)) for r, peer in self._others]
            parts: list[Tensor | None] = [None] * self.size
            for r, peer, slot_number in arrived:
                first, last = (int(n) for n in peer.cuts[slot_number, self._me : self._me + 2])
                segment = peer.slot(slot_number, last * row)[first * row : last * row]
                parts[r] = segment.view(dtype).view(last - first, *shape)

            def release() -> None:
                for r, _, slot_number in arrived:
                    self._mine.acknowledge(r, slot_number, number)
                ticket.end()

            return ReceivedMessage(parts, release)

        return _Arrival(wait, lambda: self._abandoned.append((number, ticket)))

    def _give_up_abandoned(self) -> None:
        """Let the others use the slots of messages that nobody here waits for any more, where these have come."""
        for _ in range(len(self._abandoned)):
            number, ticket = self._abandoned.popleft()
            if all(peer.has_counted(number, microseconds=0) for _, peer in self._others):
                for r, peer in self._others:
                    self._mine.acknowledge(r, _slot_of(peer, number), number)
                ticket.end()
            else:
                self._abandoned.append((number, ticket))

    def sum(self, dtype: torch.dtype, members: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype by their sums over the ranks."""
        numbers = sum(t.numel() for t in members)
        size = numbers * dtype.itemsize
        kind = zlib.crc32(f"all_reduce {dtype} {numbers}".encode())
        slot = self._free_slot(size)
        parts = [torch.empty(0, dtype=dtype)] * self.size
        parts[self._me] = self._mine.slot(slot, size)[:size].view(dtype)
        torch.cat([t.detach().reshape(-1) for t in members], out=parts[self._me])
        number = self._publish(slot, kind, [numbers] * (self.size + 1))
        arrived = [(r, peer, self._arrived(r, peer, number, kind)) for r, peer in self._others]
        for r, peer, slot_number in arrived:
            parts[r] = peer.slot(slot_number, size)[:size].view(dtype)
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        for r, _, slot_number in arrived:
            self._mine.acknowledge(r, slot_number, number)
        unflatten(members, total)

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
                raise PeerLost(f"rank {self._ranks[lost]} is gone")
            lost = self._lost()
            if lost is None:
                self._give_up_abandoned()
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
                raise PeerLost(f"rank {self._ranks[lost]} is gone")
        slot = _slot_of(peer, number)
        if int(peer.kinds[slot]) != kind:
            other, me = self._ranks[rank], self._ranks[self._me]
            raise RuntimeError(f"rank {other} is in another collective than rank {me} (message {number})")
        return slot

    def _lost(self) -> int | None:
        """A rank that has left or died."""
        return next((rank for rank, segment in self._others if segment.has_left()), None)


def _slot_of(peer: Segment, number: int) -> int:
    """The slot of a rank's message that it has counted."""
    return int(np.flatnonzero(peer.numbers == number & 0xFFFFFFFF)[0])


class _Arrival:
    """What waits for a message; `abandon` is called where it goes and nobody has waited."""

    def __init__(self, wait: Callable[[], ReceivedMessage], abandon: Callable[[], None]) -> None:
        self._wait: Callable[[], ReceivedMessage] | None = wait
        self._abandon = abandon

    def __call__(self) -> ReceivedMessage:
        assert self._wait is not None, "waited for once"
        found = self._wait()
        self._wait = None
        return found

    def __del__(self) -> None:
        if self._wait is not None:
            self._abandon()


class _SlotMessage:
    """See headrace.comm.base.Message."""

    def __init__(self, parts: Sequence[Tensor | None], send: Callable[[], Callable[[], ReceivedMessage]]) -> None:
        self.parts, self.send = parts, send
