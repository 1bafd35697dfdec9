"""Ranks as threads of one process: what a plan does on W ranks, shown and tested without launching any."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from headrace.comm.base import InFlight, check_send_rows, flatten_by_dtype, unflatten
from headrace.world import World

T = TypeVar("T")
_TIMEOUT_SECONDS = 120.0


class _Rendezvous:
    """Where the threads meet: each gives something, all read, all go on."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.table: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def exchange(self, rank: int, kind: str, item: Any) -> list[Any]:
        self.table[rank] = (kind, item)
        self.barrier.wait(_TIMEOUT_SECONDS)
        found = list(self.table)
        self.barrier.wait(_TIMEOUT_SECONDS)
        kinds = {k for k, _ in found}
        if len(kinds) > 1:
            raise RuntimeError(f"ranks are in different collectives: {sorted(kinds)}")
        return [i for _, i in found]


class ThreadCollective:
    """One of W threads. Sums run in rank order on every rank, so all hold the same bits.

    A thread that calls another method than its peers raises RuntimeError; one that stays away breaks the barrier for
    all (threading.BrokenBarrierError) instead of hanging.
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
        mine = [sent[self.world.rank] for sent in self._rendezvous.exchange(self.world.rank, kind, parts)]
        return torch.cat(mine), [p.shape[0] for p in mine]

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        ticket = self._in_flight.begin()
        found = self.all_to_all(x, send_rows)

        def wait() -> tuple[Tensor, list[int]]:
            ticket.end()
            return found

        return wait

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        for members, flat in flatten_by_dtype(tensors):
            kind = f"all_reduce {flat.dtype} {flat.numel()}"
            first, *rest = self._rendezvous.exchange(self.world.rank, kind, flat)
            total = first.clone()
            for other in rest:
                total += other
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
