"""Messages by machines against direct ones: the same lookups, the same training, fewer bytes between machines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.comm.base import Collective, ThreadCollective, run_ranks
from headrace.config import EmbeddingOptimizer, Sharding, TableSharding
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.planner.search import plan_tables
from headrace.embeddings.sharding_plan import Lookup, Plan, Storage, Table, blocks_for
from headrace.errors import UserError

LOOKUPS = (Lookup("one", "a"), Lookup("list", "b", 3, True, "mean"), Lookup("max", "a", 2, True, "max"))


def planned(kind: str, world: int, ranks_per_node: int, storage: Storage = "fp32", comm_dtype: str = "fp32") -> Plan:
    tables = (Table("a", 40, 6, storage), Table("b", 11, 6), Table("unused", 3, 5))
    blocks = [b for i, t in enumerate(tables) for b in blocks_for(t, kind, world, i % world)]  # type: ignore[arg-type]
    return Plan(tables, LOOKUPS, tuple(blocks), world, comm_dtype, ranks_per_node)  # type: ignore[arg-type]


def train(c: Collective, plan: Plan, exact: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return the answers of all steps and the last rows.

    `exact`: gradients are small integers, so that sums are exact.
    """
    embeddings = ShardedEmbeddings(plan, c, seed=3)
    embeddings.configure_optimizer(EmbeddingOptimizer(kind="sgd" if exact else "rowwise_adagrad", learning_rate=0.25))
    outs = []
    for step in range(5):
        rng = np.random.default_rng([step, c.world.rank])
        sizes = np.array([40, 11, 11, 11, 40, 40])
        rows = (step + 2 * c.world.rank) % 5
        codes = torch.from_numpy((rng.random((rows, 6)) ** 2 * sizes).astype(np.int64))
        prepared = embeddings.prepare(codes)
        prepared.prefetch()
        vectors = embeddings.features(prepared)
        outs += [f.detach() for f in vectors]
        loss = sum((f * torch.from_numpy(rng.integers(-3, 4, f.shape) * 6.0)).sum() for f in vectors)
        if not exact:
            loss = loss + sum(f.square().sum() for f in vectors)
        loss.backward()
        embeddings.step()
    return outs, [w.clone() for w in embeddings.weights]


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "column_wise"])
@pytest.mark.parametrize(("world", "ranks_per_node"), [(4, 2), (6, 2), (6, 3)])
def test_by_machines_is_as_directly(world: int, ranks_per_node: int, kind: str) -> None:
    for exact in (True, False):
        direct = run_ranks(world, lambda c, w=exact: train(c, planned(kind, world, 1), w))
        by_node = run_ranks(world, lambda c, w=exact: train(c, planned(kind, world, ranks_per_node), w))
        for (outs, weights), (got_outs, got_weights) in zip(direct, by_node, strict=True):
            for got, expected in zip([*got_outs, *got_weights], [*outs, *weights], strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            assert all(torch.equal(a, b) for a, b in zip(got_outs[:3], outs[:3], strict=True))


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
def test_sums_that_are_exact_give_the_same_bits(storage: Storage) -> None:
    """Half and quarter steps of weights that are eighths: no sum is rounded, in whatever order."""

    def rank_main(c: Collective, ranks_per_node: int) -> tuple[list[Tensor], list[Tensor]]:
        embeddings = ShardedEmbeddings(planned("row_wise", 4, ranks_per_node, storage), c, seed=3)
        for w in embeddings.weights:
            w.copy_((w.float() * 100).round() / 8)
        embeddings.configure_optimizer(EmbeddingOptimizer(kind="sgd", learning_rate=0.125))
        outs = []
        for step in range(4):
            rng = np.random.default_rng([step, c.world.rank])
            vectors = embeddings.features(torch.from_numpy(rng.integers(1, 11, (5, 6))))
            outs += [f.detach() for f in vectors]
            # A mean of three divides: its feature gets no gradient.
            sum((vectors[i] * torch.from_numpy(rng.integers(-3, 4, vectors[i].shape))).sum() for i in (0, 2)).backward()
            embeddings.step()
        return outs, embeddings.weights

    for direct, by_node in zip(
        run_ranks(4, lambda c: rank_main(c, 1)), run_ranks(4, lambda c: rank_main(c, 2)), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip([*direct[0], *direct[1]], [*by_node[0], *by_node[1]], strict=True))


class Crossing(ThreadCollective):
    """Counts bytes that leave the machine of two ranks."""

    def __init__(self, inner: ThreadCollective) -> None:
        super().__init__(inner._rendezvous, inner.world.rank)
        self.crossed = self.inside = 0

    def all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        row = x.element_size() * int(np.prod(x.shape[1:]))
        machine = self.world.rank // 2
        self.crossed += row * sum(n for rank, n in enumerate(send_rows) if rank // 2 != machine)
        self.inside += row * sum(
            n for rank, n in enumerate(send_rows) if rank // 2 == machine and rank != self.world.rank
        )
        return super().all_to_all(x, send_rows)


def test_what_two_ranks_of_a_machine_want_crosses_once() -> None:
    def rank_main(c: ThreadCollective, ranks_per_node: int) -> int:
        crossing = Crossing(c)
        embeddings = ShardedEmbeddings(planned("row_wise", 4, ranks_per_node), crossing, seed=1)
        codes = torch.ones(11, 6, dtype=torch.int64)
        codes[:, 0] = codes[:, 4] = codes[:, 1] = torch.arange(11)  # all ranks want the same
        loss = sum(f.sum() for f in embeddings.features(codes))
        loss.backward()
        return crossing.crossed

    direct = sum(run_ranks(4, lambda c: rank_main(c, 1)))
    by_node = sum(run_ranks(4, lambda c: rank_main(c, 2)))
    assert by_node == direct / 2


@pytest.mark.parametrize("exchange", ["direct", "by_machine"])
def test_bytes_between_machines_are_those_that_were_planned(exchange: str) -> None:
    tables = [Table("a", 20_000, 16), Table("b", 300, 16)]
    lookups = [Lookup("a", "a", 3, True), Lookup("b", "b")]
    settings = Sharding.model_validate({"kind": "row_wise", "ranks_per_node": 2, "exchange": exchange, "zipf": 0.0})
    planned = plan_tables(tables, lookups, 4, batch_size=4_000, optimizer="sgd", settings=settings)
    assert planned.plan.ranks_per_node == (2 if exchange == "by_machine" else 1)
    assert planned.traffic is not None
    planned_bytes = planned.traffic.by_machine if exchange == "by_machine" else planned.traffic.direct

    def rank_main(c: ThreadCollective) -> tuple[int, int]:
        crossing = Crossing(c)
        embeddings = ShardedEmbeddings(planned.plan, crossing, seed=1)
        rng = np.random.default_rng(c.world.rank)
        codes = np.concatenate([rng.integers(1, 20_000, (1_000, 3)), rng.integers(0, 300, (1_000, 1))], axis=1)
        embeddings(torch.from_numpy(codes)).sum().backward()
        return crossing.inside, crossing.crossed

    inside, crossed = np.mean(run_ranks(4, rank_main), axis=0)
    assert inside == pytest.approx(planned_bytes.inside, rel=0.02)
    assert crossed == pytest.approx(planned_bytes.across, rel=0.02)


def test_the_faster_way_is_planned() -> None:
    tables, lookups = [Table("a", 1_000_000, 64)], [Lookup("a", "a")]
    rule = {"a": TableSharding(kind="row_wise", pooled=False)}
    for network, ranks_per_node in [(1.0, 8), (2_000.0, 1)]:
        settings = Sharding(kind="auto", tables=rule, ranks_per_node=8, node_gbps=200, network_gbps=network)
        planned = plan_tables(tables, lookups, 32, batch_size=32 * 8_192, optimizer="sgd", settings=settings)
        assert planned.plan.ranks_per_node == ranks_per_node
    with pytest.raises(UserError, match="by_machine needs machines of several ranks"):
        plan_tables(
            tables,
            lookups,
            4,
            batch_size=64,
            optimizer="sgd",
            settings=Sharding(exchange="by_machine", ranks_per_node=8),
        )


def test_machines_that_do_not_make_the_world_are_refused() -> None:
    with pytest.raises(ValueError, match="machines of 3 ranks do not make a world of 4"):
        planned("row_wise", 4, 3)
    table = Table("t", 5, 4)
    blocks = tuple(blocks_for(table, "row_wise", 4, pooled=True))
    with pytest.raises(ValueError, match="do not travel by machines"):
        Plan((table,), (Lookup("f", "t", 2, True),), blocks, 4, "fp32", 2)
