"""Messages through memory that ranks of one machine share: no kernel takes part.

Each rank has a header and some slots, files in memory without a name (memfd_create) that the others open through
/proc, so nothing is left behind by a process that is killed. A sender writes into a free slot, notes in its header for
whom which rows are, and counts the message; a receiver waits for the count (a futex), reads its rows and notes that the
slot may be used again. So a message is copied twice; or not at all, where its rows are made in the slot and are read
there (`SharedMessages.reserve`). Sums run in rank order on every rank, so all hold the same bits. Waiting is done by
native/cpp/futex.cpp.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import select
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.comm.base import (
    MOST_IN_FLIGHT,
    FlightTicket,
    InFlight,
    PeerLost,
    ReceivedMessage,
    check_send_rows,
    unflatten,
)
from headrace.compute import native

#: Slots of a rank: one for each message in flight and one for a sum; each slot grows to its largest message.
SLOTS = MOST_IN_FLIGHT + 1
_TIMEOUT_MICROSECONDS = 200_000
_NAME = "headrace"
_UINT32 = 2**32 - 1
#: A slot is reused for messages whose size is within this factor of its own.
_ALIKE = 4


class Segment:
    """A rank's header and slots, seen by itself or by another."""

    def __init__(self, world_size: int, pid: int, header: int, slots: Sequence[int], token: int) -> None:
        self.pid, self._header_fd, self._fds, self._token = pid, header, list(slots), token
        numbers = 4 + SLOTS * (3 + world_size) + world_size * SLOTS
        if os.fstat(header).st_size == 0:
            os.ftruncate(header, 8 * numbers)
        #: uint32 [0]: messages so far, a futex; int64 [1]: 1 once the rank has left; [2]: its token.
        self._header = np.frombuffer(mmap.mmap(header, 8 * numbers), dtype=np.int64)
        offset = 4
        self.numbers = self._header[offset : offset + SLOTS]
        self.kinds = self._header[offset + SLOTS : offset + 2 * SLOTS]
        offset += 2 * SLOTS
        #: Rows for rank r of a slot's message: from cuts[slot, r] to cuts[slot, r + 1].
        self.cuts = self._header[offset : offset + SLOTS * (world_size + 1)].reshape(SLOTS, world_size + 1)
        offset += SLOTS * (world_size + 1)
        #: By sender and slot: the number of the last message that this rank has read there.
        self.read = self._header[offset : offset + world_size * SLOTS].reshape(world_size, SLOTS)
        self._segments = [torch.empty(0, dtype=torch.uint8) for _ in range(SLOTS)]
        self._pidfd = -1
        with suppress(OSError):
            self._pidfd = os.pidfd_open(pid)

    @staticmethod
    def no_address() -> list[int]:
        return [-1] * (SLOTS + 3)

    @property
    def address(self) -> list[int]:
        return [self.pid, self._token, self._header_fd, *self._fds]

    @staticmethod
    def create(world_size: int) -> Segment:
        """Create the segment of this process."""
        files = [os.memfd_create(_NAME) for _ in range(SLOTS + 1)]
        segment = Segment(world_size, os.getpid(), files[0], files[1:], secrets.randbits(62))
        segment._header[2] = segment._token
        return segment

    @staticmethod
    def open_peer(world_size: int, address: Sequence[int]) -> Segment:
        """Open the segment of another process.

        Raises:
            OSError: the process cannot be reached.
            ValueError: the process id belongs to another process than the one that sent the address.
        """
        pid, token, *fds = address
        files: list[int] = []
        try:
            for fd in fds:
                path = Path(f"/proc/{pid}/fd/{fd}")
                # The number may be a process of another machine or container: unrelated files must not be opened.
                if not str(path.readlink()).startswith(f"/memfd:{_NAME}"):
                    raise ValueError(f"{path} is another file")
                files.append(os.open(path, os.O_RDWR))
            segment = Segment(world_size, pid, files[0], files[1:], token)
            if int(segment._header[2]) != token:
                raise ValueError(f"process {pid} is another")
        except (OSError, ValueError):
            for fd in files:
                os.close(fd)
            raise
        return segment

    def slot(self, number: int, size: int) -> Tensor:
        """Return the bytes of a slot, uint8 [at least `size`]."""
        if self._segments[number].numel() < size:
            fd = self._fds[number]
            if os.fstat(fd).st_size < size:
                os.ftruncate(fd, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
            self._segments[number] = torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)
        return self._segments[number]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each slot that are mapped here."""
        return [segment.numel() for segment in self._segments]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(self.sizes)

    def set_and_wake(self, count: int) -> None:
        set_and_wake(self._header[0:1], count)

    def has_counted(self, count: int, microseconds: int = _TIMEOUT_MICROSECONDS) -> bool:
        """Wait at most `microseconds` until the rank has sent `count` messages; return whether it has."""
        return wait_until(self._header[0:1], count, microseconds)

    def acknowledge(self, sender: int, slot: int, number: int) -> None:
        """Note that this rank has read a message."""
        set_and_wake(self.read[sender, slot : slot + 1], number)

    def has_left(self) -> bool:
        """Return whether the rank has left or its process has ended."""
        if self._header[1]:
            return True
        if self._pidfd >= 0:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            return bool(poll.poll(0))
        return not Path(f"/proc/{self.pid}").exists()

    def close(self) -> None:
        if self.pid == os.getpid():
            self._header[1] = 1
        for fd in (self._header_fd, *self._fds, self._pidfd):
            if fd >= 0:
                os.close(fd)
        self._header_fd, self._fds, self._pidfd = -1, [], -1


def set_and_wake(word: NDArray[np.int64], value: int) -> None:
    """Set the lower half of a number in shared memory, after all earlier writes, and wake the processes that wait."""
    lib = native.library()
    assert lib is not None
    lib.headrace_set_and_wake(word.ctypes.data, value & _UINT32)


def wait_until(word: NDArray[np.int64], value: int, microseconds: int) -> bool:
    """Wait until `set_and_wake` has set a number to `value` or more (it may wrap around); False after the timeout."""
    lib = native.library()
    assert lib is not None
    return bool(lib.headrace_wait_until(word.ctypes.data, value & _UINT32, microseconds))


class SharedMessages:
    """Messages between the ranks that share memory. Ranks are numbered inside this group, in errors by the job."""

    def __init__(self, segments: Sequence[Segment], me: int, ranks: Sequence[int]) -> None:
        """Connect the segments of all ranks.

        Args:
            segments: in order of the ranks.
            me: number of this rank in the group.
            ranks: numbers of the ranks in the job.
        """
        self._segments, self._ranks, self._me = list(segments), list(ranks), me
        self._local_segment = self._segments[me]
        self._peers = [(r, segment) for r, segment in enumerate(self._segments) if r != me]
        #: Messages so far, the same number on all ranks.
        self._count = 0
        #: Slots that are being written.
        self._reserved: set[int] = set()
        self._in_flight = InFlight()
        #: Messages that were started and that nothing waits for any more.
        self._abandoned: deque[tuple[int, FlightTicket]] = deque()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._segments)

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        """Start an all-to-all of a CPU tensor, see headrace.comm.base.Collective; `send_rows` for each rank here."""
        check_send_rows(x, send_rows, self.size)
        rows = torch.split(x.detach(), list(send_rows))
        arrive = self.start(rows)

        def wait() -> tuple[Tensor, list[int]]:
            received = arrive()
            # Rows that a rank sends to itself stay where they are.
            parts = [rows[self._me] if p is None else p for p in received.parts]
            out = torch.cat(parts)
            received.release()
            return out, [p.shape[0] for p in parts]

        return wait

    def start(self, rows: Sequence[Tensor]) -> Callable[[], ReceivedMessage]:
        """Start an all-to-all of rows for each rank, all of one dtype and trailing shape; return what waits for it."""
        message = self.reserve([len(part_rows) for part_rows in rows], rows[0].shape[1:], rows[0].dtype)
        for part, part_rows in zip(message.parts, rows, strict=True):
            if part is not None:
                part.copy_(part_rows)
        return message.send()

    def reserve(self, send_rows: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> _SlotMessage:
        """See headrace.comm.base.MessageChannel."""
        cuts = [0]
        for rank, rows in enumerate(send_rows):
            cuts.append(cuts[-1] + (0 if rank == self._me else rows))
        size = cuts[-1] * dtype.itemsize * math.prod(shape)
        self._release_abandoned()
        ticket = self._in_flight.begin()
        slot = self._free_slot(size)
        self._reserved.add(slot)
        segment = self._local_segment.slot(slot, size)[:size].view(dtype).view(cuts[-1], *shape)
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
            arrived = [(r, peer, self._wait_for_slot(r, peer, number, kind)) for r, peer in self._peers]
            parts: list[Tensor | None] = [None] * self.size
            for r, peer, slot_number in arrived:
                first, last = (int(n) for n in peer.cuts[slot_number, self._me : self._me + 2])
                segment = peer.slot(slot_number, last * row)[first * row : last * row]
                parts[r] = segment.view(dtype).view(last - first, *shape)

            def release() -> None:
                for r, _, slot_number in arrived:
                    self._local_segment.acknowledge(r, slot_number, number)
                ticket.end()

            return ReceivedMessage(parts, release)

        return _Arrival(wait, lambda: self._abandoned.append((number, ticket)))

    def _release_abandoned(self) -> None:
        """Free the peers' slots of messages that have arrived and that nothing here waits for any more."""
        for _ in range(len(self._abandoned)):
            number, ticket = self._abandoned.popleft()
            if all(peer.has_counted(number, microseconds=0) for _, peer in self._peers):
                for r, peer in self._peers:
                    self._local_segment.acknowledge(r, _slot_of(peer, number), number)
                ticket.end()
            else:
                self._abandoned.append((number, ticket))

    def sum(self, dtype: torch.dtype, members: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype by their sums over the ranks, in place."""
        numbers = sum(t.numel() for t in members)
        size = numbers * dtype.itemsize
        kind = zlib.crc32(f"all_reduce {dtype} {numbers}".encode())
        slot = self._free_slot(size)
        parts = [torch.empty(0, dtype=dtype)] * self.size
        parts[self._me] = self._local_segment.slot(slot, size)[:size].view(dtype)
        torch.cat([t.detach().reshape(-1) for t in members], out=parts[self._me])
        number = self._publish(slot, kind, [numbers] * (self.size + 1))
        arrived = [(r, peer, self._wait_for_slot(r, peer, number, kind)) for r, peer in self._peers]
        for r, peer, slot_number in arrived:
            parts[r] = peer.slot(slot_number, size)[:size].view(dtype)
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        for r, _, slot_number in arrived:
            self._local_segment.acknowledge(r, slot_number, number)
        unflatten(members, total)

    def close(self) -> None:
        """Tell the others that this rank leaves: who waits for it raises PeerLost."""
        for segment in self._segments:
            segment.close()

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that this rank's messages take, until it leaves."""
        return self._local_segment.nbytes

    def _free_slot(self, size: int) -> int:
        """Return a slot whose message all ranks have read: preferably of about `size` bytes, then an unused one.

        So small messages (ids) take no slot of large ones (vectors), and few slots become large.
        """
        segment = self._local_segment.sizes

        def dislike(slot: int) -> tuple[int, bool, int]:
            is_alike = 0 < size <= _ALIKE * segment[slot] <= _ALIKE**2 * size
            return 0 if is_alike else 1 if not segment[slot] else 2, segment[slot] < size, abs(segment[slot] - size)

        liked = sorted(range(SLOTS), key=dislike)
        lost: int | None = None
        while True:
            for slot in liked:
                if slot not in self._reserved and self._is_read(slot):
                    return slot
            # Look at the slots once more after a rank is gone: it may have read its messages before it left.
            if lost is not None:
                raise PeerLost(f"rank {self._ranks[lost]} is gone")
            lost = self._lost_peer()
            if lost is None:
                self._release_abandoned()
                time.sleep(1e-4)

    def _is_read(self, slot: int) -> bool:
        number = int(self._local_segment.numbers[slot])
        return all(int(segment.read[self._me, slot]) == number for _, segment in self._peers)

    def _publish(self, slot: int, kind: int, cuts: Sequence[int]) -> int:
        self._count += 1
        local_segment = self._local_segment
        local_segment.kinds[slot], local_segment.cuts[slot] = kind, cuts
        local_segment.numbers[slot] = self._count & 0xFFFFFFFF
        local_segment.set_and_wake(self._count)
        return self._count

    def _wait_for_slot(self, rank: int, peer: Segment, number: int, kind: int) -> int:
        """Wait until a rank has sent its message of this number; return the slot of that message.

        Raises:
            PeerLost: the rank has left or died.
            RuntimeError: the rank is in another collective.
        """
        while not peer.has_counted(number):
            lost = self._lost_peer()
            # The message may have been sent since the wait ended, by a rank that then left.
            if lost is not None and not peer.has_counted(number, microseconds=0):
                raise PeerLost(f"rank {self._ranks[lost]} is gone")
        slot = _slot_of(peer, number)
        if int(peer.kinds[slot]) != kind:
            peer_rank, local_rank = self._ranks[rank], self._ranks[self._me]
            raise RuntimeError(f"rank {peer_rank} is in another collective than rank {local_rank} (message {number})")
        return slot

    def _lost_peer(self) -> int | None:
        """Return a rank that has left or died; None if all are there."""
        return next((rank for rank, segment in self._peers if segment.has_left()), None)


def _slot_of(peer: Segment, number: int) -> int:
    """Return the slot of a rank's message with this number."""
    return int(np.flatnonzero(peer.numbers == number & 0xFFFFFFFF)[0])


class _Arrival:
    """Function that waits for a message; it calls `abandon` when it is deleted without having been called."""

    def __init__(self, wait: Callable[[], ReceivedMessage], abandon: Callable[[], None]) -> None:
        self._wait: Callable[[], ReceivedMessage] | None = wait
        self._abandon = abandon

    def __call__(self) -> ReceivedMessage:
        assert self._wait is not None, "waited for once"
        message = self._wait()
        self._wait = None
        return message

    def __del__(self) -> None:
        if self._wait is not None:
            self._abandon()


class _SlotMessage:
    """Message in a slot; see headrace.comm.base.Message."""

    def __init__(self, parts: Sequence[Tensor | None], send: Callable[[], Callable[[], ReceivedMessage]]) -> None:
        self.parts, self.send = parts, send
