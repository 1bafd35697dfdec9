"""Sharded tables against plain torch: nn.Embedding-style lookups in one process, torch.optim, the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import embedding

from headrace.comm.base import Collective, LocalCollective, ThreadCollective, run_ranks
from headrace.config import Optimizer
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.sharding_plan import Block, Lookup, Plan, Table, row_wise
from headrace.errors import UserError

STEPS = 10
DIM = 5


@dataclass(frozen=True)
class Case:
    """Tables, features, and how many rows each rank has in each step."""

    tables: tuple[Table, ...]
    lookups: tuple[Lookup, ...]
    rows: tuple[tuple[int, ...], ...]  # [STEPS][world]
    seed: int

    @property
    def world(self) -> int:
        return len(self.rows[0])

    def codes(self, step: int, rank: int) -> Tensor:
        """Draw codes, skewed to low ones: many duplicates, and much padding."""
        rng = np.random.default_rng([self.seed, step, rank])
        tables = {t.name: t.rows for t in self.tables}
        sizes = [tables[x.table] for x in self.lookups for _ in range(x.length)]
        u = rng.random((self.rows[step][rank], len(sizes))) ** 2
        return torch.from_numpy((u * np.array(sizes)).astype(np.int64))

    def target(self, step: int, rank: int) -> Tensor:
        rng = np.random.default_rng([self.seed, step, rank, 1])
        return torch.from_numpy(rng.normal(size=(self.rows[step][rank], len(self.lookups), DIM)).astype(np.float32))

    def loss(self, out: Tensor, step: int, rank: int) -> Tensor:
        """Return this rank's share of the global batch's mean of a loss that is not linear in the embeddings."""
        return ((out.sin() - self.target(step, rank)) ** 2).sum() / max(1, sum(self.rows[step]))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world = draw(st.integers(1, 4))
    rows = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    tables = tuple(Table(f"t{i}", n, DIM) for i, n in enumerate(rows))
    lookups = []
    # Every table is used, and some by two features.
    for i, table in enumerate([*range(len(tables)), *draw(st.lists(st.integers(0, len(tables) - 1), max_size=2))]):
        length = draw(st.sampled_from([None, 1, 3]))
        lookups.append(Lookup(f"f{i}", f"t{table}", length or 1, length is not None))
    sizes = st.tuples(*[st.sampled_from([0, 1, 2, 7]) for _ in range(world)])
    steps = tuple(draw(sizes) for _ in range(STEPS))
    return Case(tables, tuple(lookups), steps, draw(st.integers(0, 2**20)))


def full_tables(plan: Plan, weights: Sequence[Tensor]) -> dict[str, Tensor]:
    """Put a row-wise plan's tables together by the rule that row r is on rank r % world."""
    world = len(weights)
    used = [0] * world
    out = {}
    for t in plan.tables:
        out[t.name] = torch.empty(t.rows, t.dim)
        for rank in range(world):
            n = len(range(rank, t.rows, world))
            out[t.name][rank::world] = weights[rank][used[rank] : used[rank] + n]
            used[rank] += n
    assert used == [len(w) for w in weights]
    return out


def plain_lookup(case: Case, tables: dict[str, Tensor], codes: Tensor) -> Tensor:
    """Compute the forward pass by definition: feature by feature, list columns summed without code 0."""
    out, slot = [], 0
    for x in case.lookups:
        pooled = torch.zeros(codes.shape[0], DIM)
        for column in codes[:, slot : slot + x.length].T:
            rows = torch.arange(len(column))
            if x.is_list:
                rows = rows[column != 0]
            pooled = pooled.index_add(0, rows, embedding(column[rows], tables[x.table], sparse=True))
        out.append(pooled)
        slot += x.length
    return torch.stack(out, dim=1)


def reference(case: Case, start: dict[str, Tensor], optimizer: Optimizer) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Ten steps on the whole batch with torch.optim: each step's output, the last tables."""
    tables = {name: torch.nn.Parameter(t.clone()) for name, t in start.items()}
    parameters = list(tables.values())
    lr = optimizer.learning_rate
    optim: torch.optim.Optimizer
    if optimizer.kind == "sgd":
        optim = torch.optim.SGD(parameters, lr=lr)
    elif optimizer.kind == "adagrad":
        optim = torch.optim.Adagrad(parameters, lr=lr)
    else:
        optim = torch.optim.SparseAdam(parameters, lr=lr)
    outs = []
    for step in range(STEPS):
        optim.zero_grad()
        pieces = [plain_lookup(case, tables, case.codes(step, r)) for r in range(case.world)]
        sum(case.loss(out, step, r) for r, out in enumerate(pieces)).backward()
        if optimizer.kind != "adam":
            for p in parameters:
                p.grad = p.grad.to_dense()
        optim.step()
        outs.append(torch.cat(pieces).detach())
    return outs, {name: p.detach() for name, p in tables.items()}


def train(case: Case, plan: Plan, optimizer: Optimizer, collective: Collective) -> tuple[Tensor, list[Tensor], Tensor]:
    """Take ten steps on this rank's part: return the first weight, outputs, and the last weight."""
    embeddings = ShardedEmbeddings(plan, collective, case.seed)
    start = embeddings.weight.clone()
    embeddings.configure_optimizer(optimizer)
    outs = []
    for step in range(STEPS):
        rank = collective.world.rank
        out = embeddings(case.codes(step, rank))
        case.loss(out, step, rank).backward()
        embeddings.step()
        outs.append(out.detach())
    return start, outs, embeddings.weight


@settings(max_examples=60, deadline=None)
@given(case=cases(), kind=st.sampled_from(["sgd", "adagrad", "adam"]))
def test_ten_steps_equal_plain_torch(case: Case, kind: str) -> None:
    optimizer = Optimizer(kind=kind, learning_rate=0.1)
    plan = row_wise(case.tables, case.lookups, case.world)
    ranks = run_ranks(case.world, lambda c: train(case, plan, optimizer, c))
    outs, last = reference(case, full_tables(plan, [start for start, _, _ in ranks]), optimizer)
    # Where gradients of several steps nearly cancel, Adam divides their rounding by their size: a thousandth of a step.
    atol = 1e-4 if kind == "adam" else 2e-5
    for step in range(STEPS):
        got = torch.cat([o[step] for _, o, _ in ranks])
        torch.testing.assert_close(got, outs[step], rtol=1e-4, atol=atol)
    for name, table in full_tables(plan, [w for _, _, w in ranks]).items():
        torch.testing.assert_close(table, last[name], rtol=1e-4, atol=atol)


def example(world: int, rows: int = 64) -> Case:
    tables = (Table("a", 40, DIM), Table("b", 3, DIM), Table("c", 2_500, DIM))
    lookups = (Lookup("fa", "a"), Lookup("fb", "b"), Lookup("fc", "c", 4, True), Lookup("fc2", "c"))
    return Case(tables, lookups, ((rows,) * world,) * STEPS, seed=3)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gradients_equal_plain_torch(world: int) -> None:
    # SGD with rate 1 from one backward pass: the change of the weight is the gradient.
    case = example(world)
    plan = row_wise(case.tables, case.lookups, world)

    def rank_main(c: ThreadCollective) -> tuple[Tensor, Tensor]:
        embeddings = ShardedEmbeddings(plan, c, seed=7)
        embeddings.configure_optimizer(Optimizer(kind="sgd", learning_rate=1.0))
        start = embeddings.weight.clone()
        case.loss(embeddings(case.codes(0, c.world.rank)), 0, c.world.rank).backward()
        embeddings.step()
        return start, start - embeddings.weight

    ranks = run_ranks(world, rank_main)
    tables = {n: t.requires_grad_() for n, t in full_tables(plan, [start for start, _ in ranks]).items()}
    sum(case.loss(plain_lookup(case, tables, case.codes(0, r)), 0, r) for r in range(world)).backward()
    for name, got in full_tables(plan, [g for _, g in ranks]).items():
        torch.testing.assert_close(got, tables[name].grad.to_dense(), rtol=1e-4, atol=1e-6)


def test_several_backward_passes_are_one_step() -> None:
    case = example(2)
    plan = row_wise(case.tables, case.lookups, 2)

    def rank_main(c: ThreadCollective, parts: int) -> Tensor:
        embeddings = ShardedEmbeddings(plan, c, seed=7)
        embeddings.configure_optimizer(Optimizer(kind="adagrad", learning_rate=0.1))
        codes, target = case.codes(0, c.world.rank), case.target(0, c.world.rank)
        for piece, goal in zip(codes.chunk(parts), target.chunk(parts), strict=True):
            ((embeddings(piece) - goal) ** 2).sum().backward()
        embeddings.step()
        return embeddings.weight

    for once, thrice in zip(
        run_ranks(2, lambda c: rank_main(c, 1)), run_ranks(2, lambda c: rank_main(c, 3)), strict=True
    ):
        torch.testing.assert_close(once, thrice, rtol=1e-5, atol=1e-6)


def test_the_same_seed_gives_the_same_bits() -> None:
    case = example(3)
    plan = row_wise(case.tables, case.lookups, 3)
    optimizer = Optimizer(kind="adagrad", learning_rate=0.1)
    first, second = (run_ranks(3, lambda c: train(case, plan, optimizer, c)) for _ in range(2))
    for (_, outs, weight), (_, outs2, weight2) in zip(first, second, strict=True):
        assert torch.equal(weight, weight2)
        assert all(torch.equal(a, b) for a, b in zip(outs, outs2, strict=True))


def test_the_start_does_not_depend_on_world_or_size() -> None:
    case = example(1)
    starts = {}
    for world in (1, 2, 3, 4):
        plan = row_wise(case.tables, case.lookups, world)
        weights = run_ranks(world, lambda c, plan=plan: ShardedEmbeddings(plan, c, seed=5).weight)
        starts[world] = full_tables(plan, weights)
    for world in (2, 3, 4):
        for name, table in starts[1].items():
            assert torch.equal(table, starts[world][name])
    big = row_wise((Table("c", 3_048, DIM),), (), 1)
    grown = ShardedEmbeddings(big, LocalCollective(), seed=5).weight
    assert torch.equal(grown[:2_500], starts[1]["c"])
    # It is a draw: rows differ, blocks differ, seeds differ, and it fills its interval evenly.
    assert len(torch.unique(grown, dim=0)) == len(grown)
    assert abs(float(grown.mean())) < 0.001
    assert float(grown.std()) == pytest.approx(0.05 / 3**0.5, rel=0.03)
    reseeded = ShardedEmbeddings(big, LocalCollective(), seed=6).weight
    assert not torch.equal(grown, reseeded)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ((Block("a", range(3)),), "not held once"),
        ((Block("a", range(DIM)), Block("a", range(DIM), 1)), "not held once"),
        ((Block("a", range(2)), Block("a", range(1, DIM))), "not held once"),
        ((), "not held once"),
        ((Block("a", range(DIM), 2),), "outside a world of 2"),
        ((Block("a", range(DIM), 0, 3),), "outside a world of 2"),
        ((Block("a", range(2), 0, 0), Block("a", range(2, DIM), 0, 0)), "replicate it whole"),
        ((Block("a", range(DIM)), Block("b", range(DIM))), "table 'b', which is not planned"),
    ],
)
def test_plans_that_lose_rows_are_refused(blocks: tuple[Block, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan((Table("a", 4, DIM),), (Lookup("f", "a"),), blocks, world_size=2)


@pytest.mark.parametrize("code", [-1, 40])
def test_a_code_outside_its_table_is_refused_by_name(code: int) -> None:
    case = example(1)
    embeddings = ShardedEmbeddings(row_wise(case.tables, case.lookups, 1), LocalCollective(), seed=1)
    codes = case.codes(0, 0)
    codes[3, 0] = code
    with pytest.raises(UserError, match=rf"feature 'fa': code {code} is outside its embedding table of 40 rows"):
        embeddings(codes)


def test_padding_counts_nothing_and_learns_nothing() -> None:
    plan = row_wise((Table("t", 6, DIM),), (Lookup("list", "t", 3, True), Lookup("scalar", "t")), 1)
    embeddings = ShardedEmbeddings(plan, LocalCollective(), seed=1)
    embeddings.configure_optimizer(Optimizer(kind="sgd", learning_rate=1.0))
    start = embeddings.weight.clone()
    out = embeddings(torch.tensor([[0, 0, 0, 2], [3, 0, 3, 4]]))
    assert torch.equal(out[0, 0], torch.zeros(DIM))
    torch.testing.assert_close(out[1, 0], 2 * start[3])
    out.sum().backward()
    embeddings.step()
    moved = (start - embeddings.weight).round(decimals=4)
    assert moved[:, 0].tolist() == [0, 0, 1, 2, 1, 0]
    # For a scalar, code 0 is a row like any other: the value that is missing.
    embeddings(torch.tensor([[0, 0, 0, 0]])).sum().backward()
    initial = embeddings.weight.clone()
    embeddings.step()
    assert (initial - embeddings.weight).round(decimals=4)[:, 0].tolist() == [1, 0, 0, 0, 0, 0]


def test_codes_of_scalars_may_lie_column_by_column() -> None:
    """The loader's batches lie so."""
    plan = row_wise((Table("t", 9, DIM), Table("u", 4, DIM)), (Lookup("f", "t"), Lookup("g", "u")), 1)
    embeddings = ShardedEmbeddings(plan, LocalCollective(), seed=1)
    codes = torch.tensor([[8, 1], [0, 3], [8, 2]])
    by_column = codes.T.contiguous().T
    assert not by_column.is_contiguous()
    with torch.no_grad():
        assert torch.equal(embeddings(by_column), embeddings(codes))


def test_weight_decay_pulls_touched_rows_only() -> None:
    plan = row_wise((Table("t", 4, DIM),), (Lookup("f", "t"),), 1)
    embeddings = ShardedEmbeddings(plan, LocalCollective(), seed=1)
    embeddings.configure_optimizer(Optimizer(kind="sgd", learning_rate=0.5, weight_decay=0.1))
    start = embeddings.weight.clone()
    (embeddings(torch.tensor([[1], [1]])) * 0).sum().backward()
    embeddings.step()
    torch.testing.assert_close(embeddings.weight[1], start[1] * (1 - 0.5 * 0.1))
    assert torch.equal(embeddings.weight[[0, 2, 3]], start[[0, 2, 3]])


def test_scoring_leaves_nothing_behind() -> None:
    case = example(2)
    plan = row_wise(case.tables, case.lookups, 2)

    def rank_main(c: ThreadCollective) -> bool:
        embeddings = ShardedEmbeddings(plan, c, seed=1)
        with torch.no_grad():
            no_grad = embeddings(case.codes(0, c.world.rank))
        with torch.inference_mode():
            inference = embeddings(case.codes(0, c.world.rank))
        assert not no_grad.requires_grad
        assert torch.equal(no_grad, inference)
        return not embeddings.state and not embeddings.state_dict() and not list(embeddings.parameters())

    assert run_ranks(2, rank_main) == [True, True]


def test_no_tables_no_messages() -> None:
    class Silent(LocalCollective):
        def all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> tuple[Tensor, list[int]]:
            raise AssertionError("nothing to say")

    embeddings = ShardedEmbeddings(row_wise((), (), 1), Silent(), seed=1)
    assert embeddings(torch.zeros(3, 0, dtype=torch.int64)).shape == (3, 0, 0)


def test_wrong_codes_and_missing_optimizer_are_refused() -> None:
    case = example(1)
    embeddings = ShardedEmbeddings(row_wise(case.tables, case.lookups, 1), LocalCollective(), seed=1)
    with pytest.raises(ValueError, match=r"int64 \[B, 7\]"):
        embeddings(torch.zeros(2, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"int64 \[B, 7\]"):
        embeddings(torch.zeros(2, 7, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="configure_optimizer"):
        embeddings.step()
    with pytest.raises(ValueError, match="a plan for 2 ranks in a world of 1"):
        ShardedEmbeddings(row_wise(case.tables, case.lookups, 2), LocalCollective(), seed=1)
