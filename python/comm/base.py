"""Collectives: the messages between the ranks of a job, one small interface for every carrier.

Every method is collective: each rank calls the same methods in the same order, also with nothing to send. No method
is seen by autograd; gradients travel by explicit calls (headrace.embeddings.layer). `LocalCollective` and
`ThreadCollective` need no launcher: one rank, and ranks as threads of one process, in which a plan for W ranks is
shown and tested.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from headrace.comm import World

#: All-to-alls of a rank that may be in flight: started, and not yet waited for. One of a channel is in flight from
#: `reserve` until its rows are released.
MOST_IN_FLIGHT = 16


class PeerLost(RuntimeError):
    """A rank that other ranks wait for has left or died."""


class TooManyInFlight(RuntimeError):
    """A rank started more all-to-alls than MOST_IN_FLIGHT before it waited for any of them."""


class InFlight:
    """The all-to-alls of a rank that are in flight, counted alike by every collective."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: set[int] = set()

    def begin(self) -> FlightTicket:
        """Count one more, before any of it is sent.

        Raises:
            TooManyInFlight: MOST_IN_FLIGHT are counted already.
        """
        if len(self._open) >= MOST_IN_FLIGHT:
            raise TooManyInFlight(
                f"{MOST_IN_FLIGHT} all-to-alls of this rank are in flight, and there may be no more: wait for one "
                f"before the next begins"
            )
        number = next(self._numbers)
        self._open.add(number)
        return FlightTicket(self._open, number)


class FlightTicket:
    """The place of one all-to-all among those in flight, freed by `end` or when nothing refers to the ticket."""

    def __init__(self, tickets: set[int], number: int) -> None:
        self._tickets, self._number = tickets, number

    def end(self) -> None:
        """Free the place: the all-to-all was waited for."""
        self._tickets.discard(self._number)

    def __del__(self) -> None:
        self.end()


class Collective(Protocol):
    """The ranks of one job. Implementations: LocalCollective, ThreadCollective, HorovodCollective,
    TorchCollective, and SharedCollective and ByHostCollective around these."""

    @property
    def world(self) -> World:
        """Number of this rank, and the number of ranks."""
        ...

    def all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Send consecutive rows of `x` to the ranks in order; receive their rows.

        Args:
            x: [N, ...], any dtype; the trailing shape and dtype are the same on all ranks.
            send_rows: rows for each rank, [world.size], summing to N; zeros are fine.

        Returns:
            The received rows in the order of their senders, [M, ...] (may share memory with `x`: read it only), and
            how many came from each rank, [world.size].
        """
        ...

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        """Start an `all_to_all`; the function that is returned waits for it. `x` must stay unchanged until then.

        All ranks start their messages in one order, and wait for them in one order, which may be another. At most
        MOST_IN_FLIGHT may be started and not yet waited for; sums may come in between.

        Raises:
            TooManyInFlight: one more than MOST_IN_FLIGHT; raised on each rank at once, before anything is sent.
        """
        ...

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, in place. Same shapes and dtypes on all ranks."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' `x` [N_r, ...] in rank order along dim 0; N_r may differ, also be 0."""
        ...

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        """Replace each tensor by the root's, in place. Same shapes and dtypes on all ranks."""
        ...

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        ...


class AllToAll(Protocol):
    """All-to-all inside a subgroup of the ranks, while the other subgroups run theirs."""

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        """See Collective; `send_rows` for each rank of the subgroup."""
        ...


def subgroup_all_to_all(collective: object, ranks: Sequence[int]) -> AllToAll | None:
    """Return an all-to-all for some ranks, this one among them, that needs no other rank; None if there is none.

    All ranks get the same answer where each asks for its own subgroup and all subgroups have one size.
    """
    find: Callable[[Sequence[int]], AllToAll | None] | None = getattr(collective, "subgroup_all_to_all", None)
    return None if find is None else find(ranks)


class ReceivedMessage:
    """Rows that the ranks sent here, in the memory that they wrote. Readable until `release`, which deletion calls."""

    def __init__(self, parts: Sequence[Tensor | None], release: Callable[[], None]) -> None:
        #: Rows by sender; None for this rank, whose rows stay where they are.
        self.parts = list(parts)
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Let the senders use the memory again."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __del__(self) -> None:
        self.release()


class Message(Protocol):
    """A message that is written where its receivers read it. No other message starts between `reserve` and `send`."""

    @property
    def parts(self) -> Sequence[Tensor | None]:
        """Memory for the rows of each receiver; None for this rank, whose rows are not sent."""
        ...

    def send(self) -> Callable[[], ReceivedMessage]:
        """Start the all-to-all; the function that is returned waits for the other ranks' messages."""
        ...


class MessageChannel(Protocol):
    """All-to-all without copies, for ranks that share memory. It may meet an ordinary all-to-all of another rank."""

    def reserve(self, send_rows: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> Message:
        """Reserve memory for `send_rows` rows of one shape for each rank.

        Raises:
            TooManyInFlight: see `Collective.start_all_to_all`.
        """
        ...


def channel_of(collective: object) -> MessageChannel | None:
    """Return the message channel of a collective; None if it has none."""
    channel: MessageChannel | None = getattr(collective, "channel", None)
    return channel


def check_send_rows(x: Tensor, send_rows: Sequence[int], size: int) -> None:
    """Raise ValueError unless `send_rows` splits the rows of `x` over `size` ranks."""
    if len(send_rows) != size or min(send_rows, default=0) < 0 or sum(send_rows) != x.shape[0]:
        raise ValueError(f"send_rows {list(send_rows)} does not split {x.shape[0]} rows over {size} ranks")


class LocalCollective:
    """Collective of one rank, which exchanges with itself."""

    @property
    def world(self) -> World:
        return World()

    def all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        check_send_rows(x, send_rows, 1)
        return x, [x.shape[0]]

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        received = self.all_to_all(x, send_rows)
        return lambda: received

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        return None

    def all_gather(self, x: Tensor) -> Tensor:
        return x.detach()

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        if root != 0:
            raise ValueError(f"no rank {root} in a world of 1")

    def barrier(self) -> None:
        return None


def flatten_by_dtype(tensors: Sequence[Tensor]) -> list[tuple[list[Tensor], Tensor]]:
    """Pack tensors into one buffer a dtype: one message instead of many. Return [(members, flat buffer)] by dtype."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        groups.setdefault(t.dtype, []).append(t)
    return [(group, torch.cat([t.detach().reshape(-1) for t in group])) for group in groups.values()]


def unflatten(members: Sequence[Tensor], flat: Tensor) -> None:
    """Copy the parts of a buffer that `flatten_by_dtype` packed back into its members, in place."""
    with torch.no_grad():
        for t, part in zip(members, torch.split(flat, [t.numel() for t in members]), strict=True):
            t.copy_(part.view_as(t))


T = TypeVar("T")
_TIMEOUT_SECONDS = 120.0


class _Rendezvous:
    """Meeting point of the threads: each brings one item, all read all items, all go on."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.table: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def exchange(self, rank: int, kind: str, item: Any) -> list[Any]:
        self.table[rank] = (kind, item)
        self.barrier.wait(_TIMEOUT_SECONDS)
        entries = list(self.table)
        self.barrier.wait(_TIMEOUT_SECONDS)
        kinds = {k for k, _ in entries}
        if len(kinds) > 1:
            raise RuntimeError(f"ranks are in different collectives: {sorted(kinds)}")
        return [i for _, i in entries]


class ThreadCollective:
    """Collective of W threads of one process. Sums run in rank order on every rank, so all hold the same bits.

    A thread that calls another method than its peers raises RuntimeError; one that does not come breaks the barrier
    for all (threading.BrokenBarrierError) instead of hanging.
    """

    def __init__(self, rendezvous: _Rendezvous, rank: int) -> None:
        self._rendezvous, self._in_flight = rendezvous, InFlight()
        self._world = World(rank=rank, size=rendezvous.size, local_rank=rank, local_size=rendezvous.size)

    @property
    def world(self) -> World:
        return self._world

    def all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        check_send_rows(x, send_rows, self.world.size)
        parts = [p.clone() for p in torch.split(x.detach(), list(send_rows))]
        kind = f"all_to_all {x.dtype} {list(x.shape[1:])}"
        received = [sent[self.world.rank] for sent in self._rendezvous.exchange(self.world.rank, kind, parts)]
        return torch.cat(received), [p.shape[0] for p in received]

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        ticket = self._in_flight.begin()
        received = self.all_to_all(x, send_rows)

        def wait() -> tuple[Tensor, list[int]]:
            ticket.end()
            return received

        return wait

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        for members, flat in flatten_by_dtype(tensors):
            kind = f"all_reduce {flat.dtype} {flat.numel()}"
            first, *rest = self._rendezvous.exchange(self.world.rank, kind, flat)
            total = first.clone()
            for tensor in rest:
                total += tensor
            unflatten(members, total)

    def all_gather(self, x: Tensor) -> Tensor:
        kind = f"all_gather {x.dtype} {list(x.shape[1:])}"
        return torch.cat(self._rendezvous.exchange(self.world.rank, kind, x.detach().clone()))

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        for members, flat in flatten_by_dtype(tensors):
            kind = f"broadcast {root} {flat.dtype} {flat.numel()}"
            unflatten(members, self._rendezvous.exchange(self.world.rank, kind, flat)[root])

    def barrier(self) -> None:
        self._rendezvous.exchange(self.world.rank, "barrier", None)


def run_ranks(size: int, rank_main: Callable[[ThreadCollective], T]) -> list[T]:
    """Run `rank_main(collective)` on `size` threads; return what each rank returned, in rank order.

    The first rank's error is raised again here; the other ranks are then released from their barriers.
    """
    rendezvous = _Rendezvous(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = rank_main(ThreadCollective(rendezvous, rank))
        except BaseException as e:
            errors.append(e)
            rendezvous.barrier.abort()

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank{rank}") for rank in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results
