"""Ranks on several hosts, those of a host through shared memory: messages are those between threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.comm import World
from headrace.comm.base import Collective, PeerLost, ThreadCollective, run_ranks
from headrace.comm.shared_memory import ByHostCollective, SharedCollective, may_share_memory, shared
from headrace.embeddings.hierarchical_exchange import SubgroupCollective


class OnHosts(ThreadCollective):
    """Threads that say of themselves what ranks on hosts of so many ranks do; counts the rows that it is given."""

    def __init__(self, threads: ThreadCollective, world: World) -> None:
        super().__init__(threads._rendezvous, world.rank)
        self._world, self.carried = world, 0

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        self.carried += len(x)
        return super().start_all_to_all(x, send_rows)

    @staticmethod
    def on_hosts(threads: ThreadCollective, hosts: Sequence[int]) -> OnHosts:
        rank = threads.world.rank
        ends = list(accumulate(hosts))
        host = next(i for i, end in enumerate(ends) if rank < end)
        first = ends[host] - hosts[host]
        return OnHosts(threads, World(rank, sum(hosts), rank - first, hosts[host]))


@dataclass(frozen=True)
class Case:
    """Ranks by host; and of each message the rows that each rank sends to each, its dtype and trailing shape."""

    hosts: tuple[int, ...]
    messages: tuple[tuple[tuple[tuple[int, ...], ...], torch.dtype, tuple[int, ...]], ...]

    def run(self, c: Collective) -> list[tuple[Tensor, list[int]]]:
        """Send all messages, two of them under way at a time, and return those received."""
        received, under_way = [], list[Callable[[], tuple[Tensor, list[int]]]]()
        for number, (rows, dtype, shape) in enumerate(self.messages):
            send_rows = rows[c.world.rank]
            generator = torch.Generator().manual_seed(100 * number + c.world.rank)
            x = torch.randint(0, 100, (sum(send_rows), *shape), generator=generator).to(dtype)
            under_way.append(c.start_all_to_all(x, send_rows))
            if len(under_way) == 2:
                second, first = under_way.pop(), under_way.pop()
                received += [second(), first()]
        received += [wait() for wait in under_way]
        total = torch.tensor([1.0 + c.world.rank])
        c.all_reduce_sum([total])
        if len(set(self.hosts)) == 1 < min(len(self.hosts), self.hosts[0]):
            # Those of a host alone: rank by rank, what it is sent by its own.
            first = c.world.rank // self.hosts[0] * self.hosts[0]
            part = SubgroupCollective(c, range(first, first + self.hosts[0]))
            for number in range(2):
                send = [(c.world.rank + to + number) % 3 for to in range(self.hosts[0])]
                received.append(part.start_all_to_all(torch.arange(sum(send)) + 10 * c.world.rank, send)())
        return [*received, (total, [])]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    hosts = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda h: sum(h) <= 6)))
    size = sum(hosts)
    rows = st.tuples(*[st.tuples(*[st.integers(0, 4)] * size)] * size)
    dtypes = st.sampled_from([torch.int64, torch.float32, torch.bfloat16, torch.uint8])
    message = st.tuples(rows, dtypes, st.sampled_from([(), (3,), (2, 2)]))
    return Case(hosts, tuple(draw(st.lists(message, min_size=1, max_size=4))))


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_messages_arrive_as_between_threads(case: Case) -> None:
    def by_host(threads: ThreadCollective) -> tuple[list[tuple[Tensor, list[int]]], int, bool]:
        inner = OnHosts.on_hosts(threads, case.hosts)
        promised = may_share_memory(inner)
        c = shared(inner)
        kinds = ByHostCollective, SharedCollective
        assert isinstance(c, kinds) is promised is (max(case.hosts) > 1)
        inner.carried = 0
        received = case.run(c)
        inner.barrier()
        if isinstance(c, kinds):
            c.close()
        return received, inner.carried, promised

    ranks = run_ranks(sum(case.hosts), by_host)
    host_of = [host for host, n in enumerate(case.hosts) for _ in range(n)]
    for rank, expected in enumerate(run_ranks(sum(case.hosts), case.run)):
        received, carried, promised = ranks[rank]
        for (got, got_rows), (expected_tensor, rows) in zip(received, expected, strict=True):
            assert got.dtype is expected_tensor.dtype
            assert torch.equal(got, expected_tensor)
            assert got_rows == rows
        alone = case.hosts[host_of[rank]] == 1
        outside_host = [r for r, host in enumerate(host_of) if not promised or alone or host != host_of[rank]]
        assert carried == sum(rows[rank][r] for rows, _, _ in case.messages for r in outside_host)


def test_who_waits_for_a_rank_of_its_host_that_left_hears_which() -> None:
    def rank_main(threads: ThreadCollective) -> str | None:
        c = shared(OnHosts.on_hosts(threads, [1, 2]))
        assert isinstance(c, ByHostCollective)
        wait = c.start_all_to_all(torch.zeros(3), [1, 1, 1])
        if c.world.rank == 2:
            c.close()
            return None
        wait()
        if c.world.rank == 0:
            return None
        assert c._messages is not None
        with pytest.raises(PeerLost) as e:
            c._messages.start([torch.zeros(1)] * 2)()
        return str(e.value)

    assert run_ranks(3, rank_main) == [None, "rank 2 is gone", None]


def test_claims_that_do_not_fit_share_nothing() -> None:
    """Some ranks of a job, which are counted anew, share nothing."""

    def rank_main(threads: ThreadCollective) -> bool:
        rank = threads.world.rank
        inner = OnHosts(threads, World(rank, 3, (1, 0, 0)[rank], 2))
        return shared(inner) is inner and not may_share_memory(inner)

    assert run_ranks(3, rank_main) == [True] * 3
