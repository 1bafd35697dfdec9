"""Ranks that talk through memory where they share a machine.

    collective = shared(HorovodCollective())   # or TorchCollective; itself, where no two of its ranks share a machine

Where all share one, the all-to-alls and all-reduces of a step go through memory (headrace.comm.shared_messages), the
rare rest through the collective that is wrapped. On several machines: headrace.comm.by_host.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from headrace import native
from headrace.comm.base import Collective, MessageChannel
from headrace.comm.by_host import ByHostCollective
from headrace.comm.segment import Segment
from headrace.comm.shared_messages import SharedMessages
from headrace.world import World

log = logging.getLogger("headrace.comm")
#: Beyond so many ranks of a machine their sums would be read by too many.
MOST_RANKS = 8


def some_may_share(collective: Collective) -> bool:
    """Whether `shared` tries it for some ranks: the same answer on all. Collective."""
    if collective.world.size == 1:
        return False
    return any(len(ranks) > 1 for ranks in _hosts(collective))


def shared(inner: Collective) -> Collective:
    """The same ranks, those of a host through shared memory; `inner` where no two have any. Collective."""
    world = inner.world
    if world.size == 1:
        return inner
    hosts = _hosts(inner)
    members = next(ranks for ranks in hosts if world.rank in ranks)
    segments = _segments(inner, members)
    mine = None if segments is None else SharedMessages(segments, members.index(world.rank), members)
    sharing = inner.all_gather(torch.tensor([int(mine is not None)])).tolist()
    if not any(sharing):
        return inner
    if mine is not None and mine.size == world.size:
        return SharedCollective(inner, mine)
    return ByHostCollective(inner, [part for h in hosts for part in ([h] if sharing[h[0]] else [[r] for r in h])], mine)


def _hosts(inner: Collective) -> list[list[int]]:
    """The ranks of each host, as far as they are to share memory; launchers number those of a host one by one."""
    world = inner.world
    said: list[list[int]] = inner.all_gather(torch.tensor([[world.rank - world.local_rank, world.local_size]])).tolist()
    if all(size >= world.size for _, size in said):
        return [list(range(world.size))] if world.size <= MOST_RANKS else [[rank] for rank in range(world.size)]
    found: list[list[int]] = []
    rank = 0
    while rank < world.size:
        first, size = said[rank]
        together = first == rank and size <= MOST_RANKS and said[rank : rank + size] == [[first, size]] * size
        found.append(list(range(rank, rank + (size if together else 1))))
        rank = found[-1][-1] + 1
    return found


def _segments(inner: Collective, members: Sequence[int]) -> list[Segment] | None:
    """The memory of some ranks, this one among them; None: they have none. Collective, for all ranks of `inner`."""
    world = inner.world
    mine: Segment | None = None
    if len(members) > 1 and sys.platform == "linux" and native.library() is not None:
        with suppress(OSError):
            mine = Segment.make(len(members))
    addresses = inner.all_gather(torch.tensor([Segment.no_address() if mine is None else mine.address])).tolist()
    segments: list[Segment] = []
    if mine is not None:
        with suppress(OSError, ValueError):
            segments = [mine if r == world.rank else Segment.of_peer(len(members), addresses[r]) for r in members]
    votes = inner.all_gather(torch.tensor([int(len(segments) == len(members))])).tolist()
    if all(votes[r] for r in members):
        return segments
    for segment in [*segments, *([] if mine is None else [mine])]:
        segment.close()
    if len(members) > 1:
        log.info("the ranks share no memory, though they say that they share a machine")
    return None


class SharedCollective:
    """See the module; made by `shared`."""

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
        """Messages that are made and read in the slots."""
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
        """Tell the others that this rank leaves: who waits for it raises PeerLost."""
        self._messages.close()

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that this rank's messages take, until it leaves."""
        return self._messages.nbytes
