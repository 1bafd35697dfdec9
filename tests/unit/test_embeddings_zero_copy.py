"""Vectors that are read where they lie: the bits of those that are brought together, for any plan and on any ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm.base import Collective, LocalCollective, run_ranks
from headrace.comm.shared_memory import SharedCollective, shared
from headrace.config import EmbeddingOptimizer
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.lookup.zero_copy import ZeroCopyVectors
from headrace.embeddings.sharding_plan import Lookup, Plan, Table, blocks_for
from headrace.models.dlrm import dot_interaction
from headrace.train.callbacks.tracing import InstrumentedCollective, NoOpTracer
from headrace.train.callbacks.watchdog import Watchdog

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """Three steps of two backward passes each on some ranks."""

    plan: Plan
    kind: str
    clip_norm: float | None
    seed: int
    threads: int = 1

    def run(self, collective: Collective, zero_copy: bool) -> list[torch.Tensor]:
        """Return all that a rank computes."""
        embeddings = ShardedEmbeddings(self.plan, collective, seed=self.seed, init_bound=1.0)
        embeddings.configure_optimizer(EmbeddingOptimizer(kind=self.kind, learning_rate=0.1, clip_norm=self.clip_norm))
        generator = torch.Generator().manual_seed(self.seed * 10 + collective.world.rank)
        rows = [self.plan.by_name[x.table].rows for x in self.plan.lookups for _ in range(x.length)]
        tensors = []
        for step in range(3):
            for _ in range(1 + step % 2):
                samples = int(torch.randint(0, 9, (1,), generator=generator))
                codes = torch.stack([torch.randint(0, r, (samples,), generator=generator) for r in rows], dim=1)
                bottom = torch.randn(samples, self.plan.tables[0].dim, generator=generator, requires_grad=True)
                vectors = embeddings(embeddings.prepare(codes, zero_copy=zero_copy))
                assert isinstance(vectors, ZeroCopyVectors) == zero_copy
                out = dot_interaction(bottom, vectors)
                out.backward(torch.randn(out.shape, generator=generator))
                assert bottom.grad is not None
                tensors += [out.detach(), bottom.grad]
            embeddings.step()
            with torch.no_grad():  # looked up by nobody: what was reserved is given back
                embeddings(embeddings.prepare(codes, zero_copy=zero_copy))
        return [*tensors, *embeddings.weights, *(s for states in embeddings.states for s in states.values())]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world, dim = draw(st.integers(1, 3)), draw(st.sampled_from([2, 16, 21]))
    storages = st.sampled_from(["fp32", "fp32", "bf16"])
    tables = [Table(f"t{i}", draw(st.integers(1, 12)), dim) for i in range(3)]
    kinds = [draw(st.sampled_from(["row_wise", "row_wise", "table_wise", "data_parallel"])) for _ in tables]
    if world > 1 and "data_parallel" not in kinds:
        storage = draw(storages)
        tables = [replace(t, storage=storage) for t in tables]
    owners_sum = world > 1 and draw(st.booleans())
    if owners_sum:
        kinds = ["table_wise"] * 3
    blocks = [
        b
        for t, k in zip(tables, kinds, strict=True)
        for b in blocks_for(t, k, world, draw(st.integers(0, world - 1)), pooled=owners_sum)
    ]
    length = 3 if owners_sum else 1
    lookups = [
        Lookup(f"f{i}", f"t{draw(st.integers(0, 2))}", length, owners_sum) for i in range(draw(st.integers(1, 6)))
    ]
    wire = draw(st.sampled_from(["fp32", "fp32", "bf16"]))
    plan = Plan(tuple(tables), tuple(lookups), tuple(blocks), world, wire)
    kind = draw(st.sampled_from(["sgd", "rowwise_adagrad", "adam"]))
    clip = draw(st.sampled_from([None, None, 0.5]))
    return Case(plan, kind, clip, draw(st.integers(0, 99)), draw(st.sampled_from([1, 2])))


def through_memory(collective: Collective, run: Callable[[Collective], T]) -> T:
    """Run a rank's work with messages through shared memory, watched as in training."""
    channel = shared(collective)
    assert isinstance(channel, SharedCollective)
    result = run(InstrumentedCollective(channel, Watchdog(), NoOpTracer()))
    collective.barrier()
    channel.close()
    return result


def everywhere(case: Case, zero_copy: bool, shares: bool = False) -> list[list[torch.Tensor]]:
    def run(collective: Collective) -> list[torch.Tensor]:
        return case.run(collective, zero_copy)

    if case.plan.world_size == 1:
        return [run(LocalCollective())]
    return run_ranks(case.plan.world_size, lambda c: through_memory(c, run) if shares else run(c))


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_bits_are_those_of_vectors_side_by_side(case: Case) -> None:
    """Single ids by any plan, and lists whose owners sum them; through any collective; by one thread and by two."""
    expected_by_rank = everywhere(case, zero_copy=False)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(case.threads)
        runs = [everywhere(case, zero_copy=True)]
        if case.plan.world_size > 1:
            runs += [everywhere(case, zero_copy, shares=True) for zero_copy in (True, False)]
    finally:
        torch.set_num_threads(threads)
    for tensors_by_rank in runs:
        for got, expected in zip(tensors_by_rank, expected_by_rank, strict=True):
            assert len(got) == len(expected)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def small(world: int) -> Plan:
    table = Table("t", 50, 16)
    return Plan((table,), (Lookup("a", "t"), Lookup("b", "t")), tuple(blocks_for(table, "row_wise", world)), world)


def test_memory_of_lookups_that_nobody_uses_is_given_back() -> None:
    """More lookups than a rank has slots, each without a backward pass."""

    def run(collective: Collective) -> None:
        embeddings = ShardedEmbeddings(small(2), collective, seed=1)
        for _ in range(40):
            vectors = embeddings(embeddings.prepare(torch.tensor([[1, 2], [3, 4]]), zero_copy=True))
            assert isinstance(vectors, ZeroCopyVectors)
            del vectors
        embeddings.prepare(torch.tensor([[1, 2]]), zero_copy=True).drop()
        started = embeddings.prepare(torch.tensor([[1, 2]]), zero_copy=True)
        started.start()
        started.drop()

    run_ranks(2, lambda c: through_memory(c, run))


def test_vectors_that_have_changed_are_refused() -> None:
    embeddings = ShardedEmbeddings(small(1), LocalCollective(), seed=1)
    embeddings.configure_optimizer(EmbeddingOptimizer(kind="sgd", learning_rate=0.1))

    def look_up() -> torch.Tensor:
        prepared = embeddings.prepare(torch.tensor([[1, 2]]), zero_copy=True)
        return dot_interaction(torch.ones(1, 16, requires_grad=True), embeddings(prepared)).sum()

    first, second = look_up(), look_up()
    first.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward pass"):
        first.backward()
    embeddings.step()
    with pytest.raises(RuntimeError, match="a step between"):
        second.backward()
    with pytest.raises(ValueError, match=r"no float32 \[1, 16\]"):
        dot_interaction(
            torch.ones(1, 16).double(), embeddings(embeddings.prepare(torch.tensor([[1, 2]]), zero_copy=True))
        )


def test_rows_of_other_ranks_are_read_where_they_were_written() -> None:
    """Ranks that share memory have a message channel, watched or not, and lookups use it."""

    def run(collective: Collective) -> bool:
        embeddings = ShardedEmbeddings(small(2), collective, seed=1)
        handle = embeddings.prepare(torch.tensor([[1, 2], [3, 4]]), zero_copy=True)
        handle.start()
        shares_memory = handle.remote_rows is not None
        handle.drop()
        return shares_memory

    assert run_ranks(2, lambda c: through_memory(c, run)) == [True, True]
    assert run_ranks(2, run) == [False, False]
