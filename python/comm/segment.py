"""The memory that one rank shares with those of its machine: a header and slots, seen by itself or by another rank."""

from __future__ import annotations

import mmap
import os
import secrets
import select
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.comm import futex
from headrace.comm.base import MOST_IN_FLIGHT

#: Messages of a rank that may be under way, the last of them a sum; each slot grows to its largest message.
SLOTS = MOST_IN_FLIGHT + 1
_TIMEOUT_MICROSECONDS = 200_000
_NAME = "headrace"


class Segment:
    """A rank's header and slots, seen by itself or by another."""

    def __init__(self, world_size: int, pid: int, header: int, slots: Sequence[int], token: int) -> None:
        self.pid, self._header_fd, self._fds, self._token = pid, header, list(slots), token
        numbers = 4 + SLOTS * (3 + world_size) + world_size * SLOTS
        if os.fstat(header).st_size == 0:
            os.ftruncate(header, 8 * numbers)
        #: uint32 [0]: messages so far, a futex; int64 [1]: whether the rank left; [2]: its token.
        self._header = np.frombuffer(mmap.mmap(header, 8 * numbers), dtype=np.int64)
        at = 4
        self.numbers = self._header[at : at + SLOTS]
        self.kinds = self._header[at + SLOTS : at + 2 * SLOTS]
        at += 2 * SLOTS
        #: Rows for rank r of a slot's message: from cuts[slot, r] to cuts[slot, r + 1].
        self.cuts = self._header[at : at + SLOTS * (world_size + 1)].reshape(SLOTS, world_size + 1)
        at += SLOTS * (world_size + 1)
        #: By sender and slot: the number of the last message that this rank has read there.
        self.read = self._header[at : at + world_size * SLOTS].reshape(world_size, SLOTS)
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
    def make(world_size: int) -> Segment:
        """This process's."""
        files = [os.memfd_create(_NAME) for _ in range(SLOTS + 1)]
        segment = Segment(world_size, os.getpid(), files[0], files[1:], secrets.randbits(62))
        segment._header[2] = segment._token
        return segment

    @staticmethod
    def of_peer(world_size: int, address: Sequence[int]) -> Segment:
        """Another process's.

        Raises:
            OSError: it cannot be reached.
            ValueError: it is another process than the one that was meant.
        """
        pid, token, *fds = address
        files: list[int] = []
        try:
            for fd in fds:
                path = Path(f"/proc/{pid}/fd/{fd}")
                # The number may be a process of another machine or container: nobody's files are opened by chance.
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
        """A slot's bytes, at least so many."""
        if self._segments[number].numel() < size:
            fd = self._fds[number]
            if os.fstat(fd).st_size < size:
                os.ftruncate(fd, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
            self._segments[number] = torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)
        return self._segments[number]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each slot, as they are seen here."""
        return [segment.numel() for segment in self._segments]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(self.sizes)

    def set_and_wake(self, count: int) -> None:
        futex.set_and_wake(self._header[0:1], count)

    def has_counted(self, count: int, microseconds: int = _TIMEOUT_MICROSECONDS) -> bool:
        """Wait a little until the rank has sent so many messages; whether it has."""
        return futex.wait_until(self._header[0:1], count, microseconds)

    def acknowledge(self, sender: int, slot: int, number: int) -> None:
        """This rank has read that message."""
        futex.set_and_wake(self.read[sender, slot : slot + 1], number)

    def has_left(self) -> bool:
        """Whether the rank has left, or its process ended."""
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
