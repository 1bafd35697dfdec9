"""A collective whose waiting is seen by the watchdog and traced as spans `exchange`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from headrace.comm.base import (
    AllToAll,
    Collective,
    Message,
    MessageChannel,
    ReceivedMessage,
    channel_of,
    subgroup_all_to_all,
)
from headrace.train.callbacks.tracing import Tracer
from headrace.train.callbacks.watchdog import Watchdog
from headrace.world import World


class InstrumentedCollective:
    """A Collective whose waiting is noted: for the watchdog's deadline, and as spans `exchange`."""

    def __init__(self, inner: Collective, watchdog: Watchdog, tracer: Tracer) -> None:
        self._inner, self._watchdog, self._tracer = inner, watchdog, tracer

    @property
    def world(self) -> World:
        return self._inner.world

    @contextmanager
    def _waits(self, message: str) -> Iterator[None]:
        with self._tracer.span("exchange"), self._watchdog.waiting(message):
            yield

    def subgroup_all_to_all(self, ranks: Sequence[int]) -> AllToAll | None:
        """See headrace.comm.base.subgroup_all_to_all."""
        found = subgroup_all_to_all(self._inner, ranks)
        return None if found is None else _InstrumentedAllToAll(found, self._waits)

    def all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        with self._waits("all_to_all"):
            return self._inner.all_to_all(x, send_rows)

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        return _InstrumentedAllToAll(self._inner, self._waits).start_all_to_all(x, send_rows)

    @property
    def channel(self) -> MessageChannel | None:
        """See headrace.comm.base.channel_of."""
        return None if channel_of(self._inner) is None else self

    def reserve(self, send_rows: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> Message:
        """See headrace.comm.base.MessageChannel."""
        channel = channel_of(self._inner)
        assert channel is not None
        with self._waits("all_to_all"):
            return _InstrumentedMessage(channel.reserve(send_rows, shape, dtype), self._waits)

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        with self._waits("all_reduce_sum"):
            self._inner.all_reduce_sum(tensors)

    def all_gather(self, x: Tensor) -> Tensor:
        with self._waits("all_gather"):
            return self._inner.all_gather(x)

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        with self._waits("broadcast"):
            self._inner.broadcast(tensors, root)

    def barrier(self) -> None:
        with self._waits("barrier"):
            self._inner.barrier()


class _InstrumentedAllToAll:
    """See InstrumentedCollective."""

    def __init__(self, inner: AllToAll, waits: Callable[[str], AbstractContextManager[None]]) -> None:
        self._inner, self._waits = inner, waits

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        with self._waits("all_to_all"):
            finish = self._inner.start_all_to_all(x, send_rows)

        def wait() -> tuple[Tensor, list[int]]:
            with self._waits("all_to_all"):
                return finish()

        return wait


class _InstrumentedMessage:
    """A message whose waiting is noted."""

    def __init__(self, inner: Message, waits: Callable[[str], AbstractContextManager[None]]) -> None:
        self._inner, self._waits = inner, waits

    @property
    def parts(self) -> Sequence[Tensor | None]:
        return self._inner.parts

    def send(self) -> Callable[[], ReceivedMessage]:
        with self._waits("all_to_all"):
            finish = self._inner.send()

        def wait() -> ReceivedMessage:
            with self._waits("all_to_all"):
                return finish()

        return wait
