"""Collectives whose ranks exchange messages by shared memory within a machine.

    collective = shared(HorovodCollective())   # unchanged where no two of its ranks share a machine

If all ranks share one machine, the all-to-alls and all-reduces of a step go through memory
(headrace.comm.shared_messages), and other calls through the wrapped collective.

On several machines the rows of an all-to-all go through memory within a host, and through the wrapped collective
between hosts. All-reduces stay with the wrapped collective: a sum by hosts has other bits than one in the order of the
ranks, so the model would depend on the placement of its ranks. For all-to-alls of two levels see
`train.sharding.exchange`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from headrace.comm import World
from headrace.comm.base import AllToAll, Collective, MessageChannel, check_send_rows
from headrace.comm.shared_messages import Segment, SharedMessages
from headrace.compute import native

log = logging.getLogger("headrace.comm")
#: Most ranks of a machine that share memory: each rank reads the sums of all others, so traffic grows with the square.
MOST_RANKS = 8


def may_share_memory(collective: Collective) -> bool:
    """Return whether `shared` tries shared memory for any ranks, the same result on all of them. Collective."""
    if collective.world.size == 1:
        return False
    return any(len(ranks) > 1 for ranks in _hosts(collective))


def shared(inner: Collective) -> Collective:
    """Wrap `inner` so that ranks of one host use shared memory; return `inner` where no two ranks can. Collective."""
    world = inner.world
    if world.size == 1:
        return inner
    hosts = _hosts(inner)
    members = next(ranks for ranks in hosts if world.rank in ranks)
    segments = _segments(inner, members)
    messages = None if segments is None else SharedMessages(segments, members.index(world.rank), members)
    sharing = inner.all_gather(torch.tensor([int(messages is not None)])).tolist()
    if not any(sharing):
        return inner
    if messages is not None and messages.size == world.size:
        return SharedCollective(inner, messages)
    return ByHostCollective(
        inner, [part for h in hosts for part in ([h] if sharing[h[0]] else [[r] for r in h])], messages
    )


def _hosts(inner: Collective) -> list[list[int]]:
    """Return lists of ranks that can share memory: one a host, whose ranks launchers number consecutively."""
    world = inner.world
    host_ranges: list[list[int]] = inner.all_gather(
        torch.tensor([[world.rank - world.local_rank, world.local_size]])
    ).tolist()
    if all(size >= world.size for _, size in host_ranges):
        return [list(range(world.size))] if world.size <= MOST_RANKS else [[rank] for rank in range(world.size)]
    hosts: list[list[int]] = []
    rank = 0
    while rank < world.size:
        first, size = host_ranges[rank]
        is_host = first == rank and size <= MOST_RANKS and host_ranges[rank : rank + size] == [[first, size]] * size
        hosts.append(list(range(rank, rank + (size if is_host else 1))))
        rank = hosts[-1][-1] + 1
    return hosts


def _segments(inner: Collective, members: Sequence[int]) -> list[Segment] | None:
    """Map the memory segments of `members`, which include this rank; None if one fails. Collective over `inner`."""
    world = inner.world
    own_segment: Segment | None = None
    if len(members) > 1 and sys.platform == "linux" and native.library() is not None:
        with suppress(OSError):
            own_segment = Segment.create(len(members))
    addresses = inner.all_gather(
        torch.tensor([Segment.no_address() if own_segment is None else own_segment.address])
    ).tolist()
    segments: list[Segment] = []
    if own_segment is not None:
        with suppress(OSError, ValueError):
            segments = [
                own_segment if r == world.rank else Segment.open_peer(len(members), addresses[r]) for r in members
            ]
    votes = inner.all_gather(torch.tensor([int(len(segments) == len(members))])).tolist()
    if all(votes[r] for r in members):
        return segments
    for segment in [*segments, *([] if own_segment is None else [own_segment])]:
        segment.close()
    if len(members) > 1:
        log.info("the ranks share no memory, though the launcher says that they share a machine")
    return None


class SharedCollective:
    """Ranks of one machine, whose all-to-alls and sums go through shared memory; created by `shared`."""

    def __init__(self, inner: Collective, messages: SharedMessages) -> None:
        self._inner, self._messages = inner, messages

    @property
    def world(self) -> World:
        return self._inner.world

    def all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        return self.start_all_to_all(x, send_rows)()

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        if x.device.type != "cpu":
            return self._inner.start_all_to_all(x, send_rows)
        return self._messages.start_all_to_all(x, send_rows)

    @property
    def channel(self) -> MessageChannel:
        """Channel of messages in the slots of shared memory."""
        return self._messages

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        groups: dict[torch.dtype, list[Tensor]] = {}
        for t in tensors:
            groups.setdefault(t.dtype, []).append(t)
        if any(t.device.type != "cpu" for t in tensors):
            return self._inner.all_reduce_sum(tensors)
        for dtype, members in groups.items():
            self._messages.sum(dtype, members)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._inner.all_gather(x)

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        self._inner.broadcast(tensors, root)

    def barrier(self) -> None:
        self._inner.barrier()

    def close(self) -> None:
        """Mark this rank as gone: a rank that waits for it raises PeerLost."""
        self._messages.close()

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that this rank's messages take until `close`."""
        return self._messages.nbytes


class ByHostCollective:
    """Ranks of several hosts: shared memory within a host, the wrapped collective between; created by `shared`."""

    def __init__(self, inner: Collective, hosts: Sequence[Sequence[int]], messages: SharedMessages | None) -> None:
        """Combine a collective with messages by shared memory.

        Args:
            inner: the collective of all ranks.
            hosts: all ranks, in a list for each group that shares memory.
            messages: messages within this rank's group; None if the rank is alone in it.
        """
        self._inner, self._hosts, self._messages = inner, [list(h) for h in hosts], messages
        self._members = next(h for h in self._hosts if inner.world.rank in h)
        self._remote_ranks = [r for r in range(inner.world.size) if r not in self._members]

    @property
    def world(self) -> World:
        return self._inner.world

    def all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        return self.start_all_to_all(x, send_rows)()

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        # All hosts take the same branch: either all have their tables on GPUs, or none has.
        if x.device.type != "cpu" or self._messages is None:
            return self._inner.start_all_to_all(x, send_rows)
        check_send_rows(x, send_rows, self.world.size)
        rows = torch.split(x.detach(), list(send_rows))
        remote_counts = [0 if r in self._members else n for r, n in enumerate(send_rows)]
        # Start the slower one first.
        wait_remote = self._inner.start_all_to_all(torch.cat([rows[r] for r in self._remote_ranks]), remote_counts)
        wait_local = self._messages.start([rows[r] for r in self._members])

        def wait() -> tuple[Tensor, list[int]]:
            local_messages = wait_local()
            received, counts = wait_remote()
            parts = list(torch.split(received, counts))
            for r, part in zip(self._members, local_messages.parts, strict=True):
                # Rows that a rank sends to itself stay where they are.
                parts[r] = rows[r] if part is None else part
            out = torch.cat(parts)
            local_messages.release()
            return out, [p.shape[0] for p in parts]

        return wait

    def subgroup_all_to_all(self, ranks: Sequence[int]) -> AllToAll | None:
        """Return the messages of this host if `ranks` are its ranks and all hosts have as many; else None."""
        is_host_group = list(ranks) == self._members and len({len(h) for h in self._hosts}) == 1
        return self._messages if is_host_group else None

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        self._inner.all_reduce_sum(tensors)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._inner.all_gather(x)

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        self._inner.broadcast(tensors, root)

    def barrier(self) -> None:
        self._inner.barrier()

    def close(self) -> None:
        """Mark this rank as gone: a rank of its host that waits for it raises PeerLost."""
        if self._messages is not None:
            self._messages.close()
