"""What ranks say to each other: one small interface, so that all above it is ignorant of who carries the bytes.

Every method is collective: each rank calls the same methods in the same order, also with nothing to send. No method
is seen by autograd; gradients travel by explicit calls (headrace.embeddings.sharded).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from headrace.world import World

#: All-to-alls of a rank that may be in flight: begun, and not yet waited for. One of a channel is in flight from
#: `reserve` until its rows are released.
MOST_IN_FLIGHT = 16


class PeerLost(RuntimeError):
    """A rank that others wait for is gone."""


class TooManyInFlight(RuntimeError):
    """A rank began more all-to-alls than MOST_IN_FLIGHT before it waited for any of them."""


class InFlight:
    """The all-to-alls of a rank that are in flight, counted alike by every collective."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: set[int] = set()

    def begin(self) -> FlightTicket:
        """Count one more, before any of it is sent.

        Raises:
            TooManyInFlight: there are as many as there may be.
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
    """The place of one all-to-all among those in flight; it is free after `end`, or when nobody can wait any more."""

    def __init__(self, tickets: set[int], number: int) -> None:
        self._tickets, self._number = tickets, number

    def end(self) -> None:
        """It was waited for."""
        self._tickets.discard(self._number)

    def __del__(self) -> None:
        self.end()


class Collective(Protocol):
    """The ranks of one job. Implementations: LocalCollective, ThreadCollective, HorovodCollective,
    TorchCollective, and SharedCollective and ByHostCollective around these."""

    @property
    def world(self) -> World:
        """Which rank this is, of how many."""
        ...

    def all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Send consecutive rows of `x` to the ranks in order; receive theirs.

        Args:
            x: [N, ...], any dtype; the trailing shape and dtype are the same on all ranks.
            send_rows: rows for each rank, [world.size], summing to N; zeros are fine.

        Returns:
            The received rows in the order of their senders, [M, ...] (may share memory with `x`: read it only), and
            how many came from each rank, [world.size].
        """
        ...

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        """Begin an `all_to_all`; the function that is returned waits for it. `x` must stay as it is until then.

        What starts before another message is waited for in any order, which is that of all ranks, and starts in the
        same order on all ranks. At most MOST_IN_FLIGHT may be begun and not yet waited for; sums may come in between.

        Raises:
            TooManyInFlight: there are as many; at once, on each rank, and nothing is sent.
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
    """What one part of the ranks says to itself, while the others do likewise."""

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        """See Collective; `send_rows` for each rank of the part."""
        ...


def within(collective: object, ranks: Sequence[int]) -> AllToAll | None:
    """An all-to-all for some ranks, this one among them, without the others; None: there is none.

    The same answer on all ranks, where each asks for its own part and all parts are of one size.
    """
    find: Callable[[Sequence[int]], AllToAll | None] | None = getattr(collective, "within", None)
    return None if find is None else find(ranks)


class ReceivedMessage:
    """What the ranks sent here, where they wrote it. It may be read until `release`, which the end of this calls."""

    def __init__(self, parts: Sequence[Tensor | None], release: Callable[[], None]) -> None:
        #: Rows by sender; None: of this rank, whose rows stay where they are.
        self.parts = list(parts)
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """The senders may use the memory again."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __del__(self) -> None:
        self.release()


class Message(Protocol):
    """A message that is written where its receivers read it. No other message starts between its making and `send`."""

    @property
    def parts(self) -> Sequence[Tensor | None]:
        """Where the rows for each rank go; None: for this rank, whose rows are not sent."""
        ...

    def send(self) -> Callable[[], ReceivedMessage]:
        """Begin the all-to-all; what is returned waits for the others' messages."""
        ...


class MessageChannel(Protocol):
    """An all-to-all without copies, for ranks that share memory. To the others it is one like any other."""

    def reserve(self, send_rows: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> Message:
        """Memory for rows of a shape, so many for each rank.

        Raises:
            TooManyInFlight: see `Collective.start_all_to_all`.
        """
        ...


def channel_of(collective: object) -> MessageChannel | None:
    """The message channel of a collective; None: it has none."""
    found: MessageChannel | None = getattr(collective, "channel", None)
    return found


def check_send_rows(x: Tensor, send_rows: Sequence[int], size: int) -> None:
    """Raise ValueError unless `send_rows` splits the rows of `x` over `size` ranks."""
    if len(send_rows) != size or min(send_rows, default=0) < 0 or sum(send_rows) != x.shape[0]:
        raise ValueError(f"send_rows {list(send_rows)} does not split {x.shape[0]} rows over {size} ranks")


class LocalCollective:
    """One rank: every exchange is with itself."""

    @property
    def world(self) -> World:
        return World()

    def all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        check_send_rows(x, send_rows, 1)
        return x, [x.shape[0]]

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        found = self.all_to_all(x, send_rows)
        return lambda: found

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
    """Pack tensors into one buffer a dtype: one message instead of many. [(members, flat buffer)] in a fixed order."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        groups.setdefault(t.dtype, []).append(t)
    return [(group, torch.cat([t.detach().reshape(-1) for t in group])) for group in groups.values()]


def unflatten(members: Sequence[Tensor], flat: Tensor) -> None:
    """Copy the parts of a buffer of `flatten_by_dtype` back into its members, in place."""
    with torch.no_grad():
        for t, part in zip(members, torch.split(flat, [t.numel() for t in members]), strict=True):
            t.copy_(part.view_as(t))
