"""Rows of one byte a number: the effects of rounding, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from headrace.comm.base import Collective, LocalCollective, run_ranks
from headrace.config import EmbeddingOptimizer, Sharding, TableSharding
from headrace.embeddings.checkpoint.changes import apply_changes, save_changes
from headrace.embeddings.checkpoint.files import shared_directory, write_index
from headrace.embeddings.checkpoint.shards import load_shards, save_shards
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.planner.search import plan_tables
from headrace.embeddings.sharding_plan import Lookup, Plan, Storage, Table, blocks_for
from headrace.embeddings.storage import decode, encode, noise_for
from headrace.errors import UserError
from headrace.storage import local

ROWS = arrays(
    np.float32, st.tuples(st.integers(0, 5), st.integers(1, 9)), elements=st.floats(-8, 8, width=32, allow_nan=False)
)


def grid(rows: Tensor) -> Tensor:
    """Return the step of each row's grid."""
    return (rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)) / 255


@settings(deadline=None)
@given(rows=ROWS, step=st.integers(0, 2**20))
def test_a_number_is_within_half_a_step_or_by_chance_within_one(rows: np.ndarray, step: int) -> None:
    numbers = torch.from_numpy(rows)
    stored = encode(numbers, torch.uint8)
    assert stored.shape == (len(rows), rows.shape[1] + 8)
    if not len(rows):
        assert decode(stored).shape == numbers.shape
        return
    slack = 1e-6 * (1 + numbers.abs().amax(1, keepdim=True))
    assert bool(((decode(stored) - numbers).abs() <= grid(numbers) / 2 + slack).all())
    by_chance = encode(numbers, torch.uint8, noise_for(torch.arange(len(rows)), rows.shape[1], step))
    assert bool(((decode(by_chance) - numbers).abs() <= grid(numbers) + slack).all())
    # The edges of the row are exact, so the grid does not shrink by being stored again.
    assert bool(((decode(by_chance).amin(1) - numbers.amin(1)).abs() <= slack[:, 0]).all())
    again = decode(encode(decode(stored), torch.uint8))
    torch.testing.assert_close(again, decode(stored), rtol=1e-5, atol=1e-5)


def test_what_is_not_finite_stays_so() -> None:
    numbers = torch.zeros(5, 6)
    numbers[1, 2], numbers[2, 0], numbers[3, 5] = float("nan"), float("inf"), -float("inf")
    numbers[4, 1] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    for noise in (None, noise_for(torch.arange(5), 6, 3)):
        read = decode(encode(numbers, torch.uint8, noise))
        assert (read[0] == 0).all()
        assert not read[1:].isfinite().any()


def test_chance_is_fair() -> None:
    numbers = torch.tensor([[0.0, 0.1234, 0.5, 0.7777, 1.0]])
    drawn = torch.cat(
        [decode(encode(numbers, torch.uint8, noise_for(torch.tensor([7]), 5, step))) for step in range(4_000)]
    )
    # 4 standard errors of numbers that fall on two neighbours.
    assert bool(((drawn.mean(0) - numbers[0]).abs() <= 4 * 0.5 / 255 / 4_000**0.5).all())
    assert drawn[:, 1].unique().numel() == 2


def case(world: int, kind: str, storage: Storage, pooled: bool = False) -> Plan:
    table = Table("t", 37, 6, storage)
    blocks = tuple(blocks_for(table, kind, world, pooled=pooled))  # type: ignore[arg-type]
    return Plan((table,), (Lookup("f", "t", 3, True),), blocks, world)


def train(c: Collective, plan: Plan, optimizer: str = "sgd", steps: int = 6) -> ShardedEmbeddings:
    """Train with gradients that do not depend on the weights, so that two trainings can be compared."""
    embeddings = ShardedEmbeddings(plan, c, seed=3)
    embeddings.configure_optimizer(EmbeddingOptimizer(kind=optimizer, learning_rate=0.1))
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + c.world.rank)
        codes = torch.randint(0, 37, (20, 3), generator=generator)
        pull = torch.randn(20, 1, 6, generator=generator) / 40
        (embeddings(codes) * pull).sum().backward()
        embeddings.step()
    return embeddings


def table_of(ranks: list[ShardedEmbeddings]) -> Tensor:
    out = torch.full((37, 6), torch.nan)
    for e in ranks:
        for fused, weight in zip(e.layout.fused_tables, e.weights, strict=True):
            for _, rows, first in fused.local_blocks:
                out[rows.start :: rows.step] = decode(weight[first : first + len(rows)])
    return out


@pytest.mark.parametrize(
    ("world", "kind", "pooled"),
    [(1, "table_wise", False), (2, "data_parallel", False)]
    + [(world, kind, pooled) for world in (2, 3) for kind in ("table_wise", "row_wise") for pooled in (False, True)],
)
def test_training_errs_by_a_step_of_the_grid_an_update(world: int, kind: str, pooled: bool) -> None:
    exact = table_of(run_ranks(world, lambda c: train(c, case(world, kind, "fp32"))))
    ranks = run_ranks(world, lambda c: train(c, case(world, kind, "int8", pooled)))
    rounded = table_of(ranks)
    assert not torch.equal(exact, rounded)
    start = table_of([ShardedEmbeddings(case(1, "table_wise", "fp32"), LocalCollective(), seed=3)])
    assert float((exact - start).abs().max()) > 0.02
    widest = float(torch.stack([grid(exact), grid(rounded), grid(start)]).max())
    # Half a step at the start, and one for each of six updates; the grids between are no wider than twice the ends'.
    assert float((rounded - exact).abs().max()) <= 2 * 6.5 * widest
    # By chance, not to one side: the mean error is far smaller.
    assert abs(float((rounded - exact).mean())) <= 0.5 * widest
    for first, second in zip(
        ranks, run_ranks(world, lambda c: train(c, case(world, kind, "int8", pooled))), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(first.weights, second.weights, strict=True))


def test_steps_smaller_than_the_grid_are_not_lost() -> None:
    """Rounded to the nearest, weights would stay where they are for ever."""
    embeddings = ShardedEmbeddings(case(1, "table_wise", "int8"), LocalCollective(), seed=3)
    initial = decode(embeddings.weight)
    embeddings.configure_optimizer(EmbeddingOptimizer(kind="sgd", learning_rate=1.0))
    push = torch.zeros(36, 1, 6)
    push[:, :, 2] = float(grid(initial).min()) / 20
    codes = torch.zeros(36, 3, dtype=torch.int64)
    codes[:, 0] = torch.arange(1, 37)
    for _ in range(100):
        (embeddings(codes) * push).sum().backward()
        embeddings.step()
    moved = (initial - decode(embeddings.weight))[1:, 2].mean()
    assert float(moved) == pytest.approx(100 * float(push[0, 0, 2]), rel=0.35)


def test_a_save_keeps_the_bits_and_opens_by_any_storage(tmp_path: Path) -> None:
    def save(c: Collective) -> ShardedEmbeddings:
        embeddings = train(c, case(2, "row_wise", "int8"), "rowwise_adagrad")
        with shared_directory(local(tmp_path / "save"), c) as folder:
            save_shards(embeddings, local(folder), with_optimizer=True)
            c.barrier()
            if c.world.is_chief:
                write_index(local(folder))
        return embeddings

    saved = table_of(run_ranks(2, save))
    for world, kind, storage in [(3, "row_wise", "int8"), (1, "table_wise", "fp32"), (2, "column_wise", "fp32")]:

        def load(c: Collective, plan: Plan = case(world, kind, storage)) -> ShardedEmbeddings:  # noqa: B008
            embeddings = ShardedEmbeddings(plan, c, seed=9)
            load_shards(embeddings, local(tmp_path / "save"), with_optimizer=False)
            return embeddings

        ranks = run_ranks(world, load)
        cut = kind == "column_wise"
        assert torch.equal(torch.cat([w for e in ranks for w in e.weights], 1) if cut else table_of(ranks), saved)


def test_a_dump_of_changes_is_as_stored(tmp_path: Path) -> None:
    plan = case(1, "table_wise", "int8")
    source = ShardedEmbeddings(plan, LocalCollective(), seed=3)
    source.configure_optimizer(EmbeddingOptimizer(kind="sgd", learning_rate=0.1))
    source.track_changes()
    source(torch.tensor([[3, 4, 0]])).sum().backward()
    source.step()
    assert save_changes(source, local(tmp_path)) == 2
    for storage in ("int8", "fp32"):
        target = ShardedEmbeddings(case(1, "table_wise", storage), LocalCollective(), seed=3)  # type: ignore[arg-type]
        assert apply_changes(target, local(tmp_path)) == 12
        assert torch.equal(decode(target.weight)[3:5], decode(source.weight)[3:5])


def test_what_it_takes_is_planned_and_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="stored as int8, by whole rows"):
        case(2, "column_wise", "int8")
    tables, lookups = [Table("t", 1_000, 32)], [Lookup("f", "t")]
    rules = {"t": TableSharding(kind="column_wise")}
    with pytest.raises(UserError, match="int8 stores whole rows"):
        plan_tables(
            tables,
            lookups,
            2,
            batch_size=8,
            optimizer="sgd",
            settings=Sharding(kind="auto", storage="int8", tables=rules),
        )
    planned = plan_tables(
        tables, lookups, 2, batch_size=64, optimizer="sgd", settings=Sharding(kind="row_wise", storage="int8")
    )
    assert planned.load.memory.tolist() == [500 * 40, 500 * 40]
    embeddings = run_ranks(2, lambda c: ShardedEmbeddings(planned.plan, c, seed=1))
    assert [w.numel() * w.element_size() for e in embeddings for w in e.weights] == [500 * 40, 500 * 40]
