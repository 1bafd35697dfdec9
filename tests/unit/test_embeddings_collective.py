"""The collective interface, on one rank and on ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.comm import base
from headrace.comm.base import Collective, LocalCollective, ThreadCollective, run_ranks
from headrace.comm.shared_memory import ByHostCollective, SharedCollective, shared
from headrace.comm.shared_messages import SLOTS, Segment, SharedMessages
from tests.collective_support import many_abandoned, most_expected, most_in_flight

WORLDS = [1, 2, 3, 4]


@pytest.mark.parametrize("size", WORLDS)
def test_all_to_all_delivers_in_sender_order(size: int) -> None:
    # Rank r sends (r + 2 * to) % 3 rows to each rank, also none; each row says from whom, to whom, and its number.
    def rank_main(c: ThreadCollective) -> tuple[Tensor, list[int]]:
        me = c.world.rank
        send = [(me + 2 * to) % 3 for to in range(size)]
        rows = [[me, to, n] for to in range(size) for n in range(send[to])]
        return c.all_to_all(torch.tensor(rows, dtype=torch.int64).reshape(-1, 3), send)

    for me, (rows, counts) in enumerate(run_ranks(size, rank_main)):
        expected = [[sender, me, n] for sender in range(size) for n in range((sender + 2 * me) % 3)]
        assert rows.tolist() == expected
        assert counts == [(sender + 2 * me) % 3 for sender in range(size)]


@pytest.mark.parametrize("size", WORLDS)
def test_sum_gather_broadcast(size: int) -> None:
    def rank_main(c: ThreadCollective) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        me = c.world.rank
        summed = [torch.full((2, 3), me + 1.0), torch.tensor([me], dtype=torch.int64), torch.tensor(0.5 * me)]
        c.all_reduce_sum(summed)
        gathered = c.all_gather(torch.full((me, 2), float(me)))
        broadcast = [torch.full((2,), float(me)), torch.tensor(me)]
        c.broadcast(broadcast, root=size - 1)
        return summed, gathered, broadcast

    total = sum(range(size))
    for summed, gathered, broadcast in run_ranks(size, rank_main):
        assert torch.equal(summed[0], torch.full((2, 3), total + float(size)))
        assert summed[1].tolist() == [total]
        assert float(summed[2]) == 0.5 * total
        assert gathered.tolist() == [[float(r), float(r)] for r in range(size) for _ in range(r)]
        assert broadcast[0].tolist() == [size - 1.0] * 2
        assert int(broadcast[1]) == size - 1


def test_one_rank_is_itself() -> None:
    c: Collective = LocalCollective()
    x = torch.arange(6.0).view(3, 2)
    received, counts = c.all_to_all(x, [3])
    assert torch.equal(received, x)
    assert counts == [3]
    assert torch.equal(c.all_gather(x), x)
    c.all_reduce_sum([x])
    assert torch.equal(x, torch.arange(6.0).view(3, 2))
    with pytest.raises(ValueError, match="does not split 3 rows"):
        c.all_to_all(x, [2])


def test_wrong_splits_are_refused() -> None:
    with pytest.raises(ValueError, match="over 2 ranks"):
        run_ranks(2, lambda c: c.all_to_all(torch.zeros(3), [4, -1]))


def test_a_failing_rank_frees_the_others() -> None:
    def rank_main(c: ThreadCollective) -> None:
        if c.world.rank == 1:
            raise KeyError("rank 1 fails")
        c.barrier()

    with pytest.raises(KeyError, match="rank 1 fails"):
        run_ranks(3, rank_main)
    assert not [t for t in threading.enumerate() if t.name.startswith("rank")]


def test_ranks_in_different_collectives_are_told() -> None:
    with pytest.raises(RuntimeError, match="different collectives"):
        run_ranks(2, lambda c: c.barrier() if c.world.rank else c.all_reduce_sum([torch.zeros(1)]))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["threads", "shared memory", "by host"])
def test_as_many_all_to_alls_are_in_flight_as_the_contract_says(size: int, kind: str) -> None:
    def rank_main(c: ThreadCollective) -> list[Any]:
        collective: Collective = c
        if kind == "shared memory":
            collective = shared(c)
            assert isinstance(collective, SharedCollective)
        elif kind == "by host":
            alone = SharedMessages([Segment.create(1)], 0, [c.world.rank])
            collective = ByHostCollective(c, [[r] for r in range(size)], alone)
        in_flight = most_in_flight(collective)
        many_abandoned(collective)
        return in_flight

    assert run_ranks(size, rank_main) == [most_expected(rank, size) for rank in range(size)]


def at_the_last_moment(
    monkeypatch: pytest.MonkeyPatch,
    waiting: Callable[[SharedCollective], object],
    late: Callable[[SharedCollective], object],
) -> None:
    """Let rank 1 act and leave after rank 0 has stopped waiting for it, just before rank 0 looks for it."""
    looked, acted = threading.Event(), threading.Event()

    def is_left(*_: object) -> bool:
        looked.set()
        assert acted.wait(30)
        return True

    def rank_main(c: ThreadCollective) -> None:
        collective = shared(c)
        assert isinstance(collective, SharedCollective)
        if c.world.rank == 0:
            monkeypatch.setattr(collective._messages._peers[0][1], "has_left", is_left)
            waiting(collective)
        else:
            assert looked.wait(30)
            late(collective)
            acted.set()

    run_ranks(2, rank_main)


def test_a_message_of_a_rank_that_then_left_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    def total(c: SharedCollective) -> None:
        numbers = torch.tensor([1.0 + c.world.rank])
        c.all_reduce_sum([numbers])
        assert numbers.tolist() == [3.0]

    at_the_last_moment(monkeypatch, total, total)


def test_a_slot_that_was_read_by_a_rank_that_then_left_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(c: SharedCollective) -> object:
        return c.start_all_to_all(torch.zeros(2, 1), [1, 1])

    def read(c: SharedCollective) -> None:
        for _ in range(SLOTS):
            c.all_to_all(torch.zeros(2, 1), [1, 1])

    monkeypatch.setattr(base, "MOST_IN_FLIGHT", SLOTS + 1)
    at_the_last_moment(monkeypatch, lambda c: [send(c) for _ in range(SLOTS + 1)], read)
