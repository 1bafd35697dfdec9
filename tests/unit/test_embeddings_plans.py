"""Every kind of sharding, pooling, optimizer and world against one dense torch model in one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import embedding

from headrace import native
from headrace.comm.base import Collective, LocalCollective
from headrace.comm.threads import run_ranks
from headrace.config import EmbeddingOptimizer, TableOptimizer
from headrace.embeddings.checkpoint.delta import apply_changes, save_changes
from headrace.embeddings.checkpoint.index import write_index
from headrace.embeddings.checkpoint.shards import load_shards, save_shards
from headrace.embeddings.checkpoint.shared_directory import shared_directory
from headrace.embeddings.input.addressing import KeyedJagged
from headrace.embeddings.sharded import ShardedEmbeddings
from headrace.embeddings.sharding.plan import Block, Lookup, Plan, Table, blocks_for, can_pool
from headrace.embeddings.storage.dtypes import DTYPES
from headrace.errors import UserError
from headrace.storage import local

# Said once by torch, of its own optimizers.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

STEPS = 10
KINDS = ["table_wise", "row_wise", "column_wise", "data_parallel"]
OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam"]


@dataclass(frozen=True)
class Case:
    """A plan, an optimizer, and how many rows each rank has in each step."""

    plan: Plan
    rows: tuple[tuple[int, ...], ...]  # [steps][world]
    seed: int
    optimizer: EmbeddingOptimizer = field(default_factory=EmbeddingOptimizer)
    ragged: bool = False

    def padded(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Codes and weights [B, S]: skewed to low codes, with both edges of each table; much padding."""
        rng = np.random.default_rng([self.seed, step, rank])
        sizes = np.array([self.plan.by_name[x.table].rows for x in self.plan.lookups for _ in range(x.length)])
        shape = (self.rows[step][rank], len(sizes))
        codes = (rng.random(shape) ** 2 * sizes).astype(np.int64)
        codes = np.where(rng.random(shape) < 0.1, sizes - 1, codes)
        return torch.from_numpy(codes), torch.from_numpy(rng.normal(size=shape).astype(np.float32))

    def batch(self, step: int, rank: int) -> tuple[Tensor | KeyedJagged, Tensor | None]:
        """What a rank is given."""
        codes, weights = self.padded(step, rank)
        weighted = any(x.weighted for x in self.plan.lookups)
        if not self.ragged:
            return codes, weights if weighted else None
        bags = self.bags(step, rank)
        values = [c for feature in bags for bag in feature for c, _ in bag]
        given = [w for feature in bags for bag in feature for _, w in bag]
        lengths = torch.tensor([[len(bag) for bag in feature] for feature in bags], dtype=torch.int64)
        lengths = lengths.view(len(self.plan.lookups), self.rows[step][rank])
        return KeyedJagged(
            torch.tensor(values, dtype=torch.int64), lengths, torch.tensor(given) if weighted else None
        ), None

    def bags(self, step: int, rank: int) -> list[list[list[tuple[int, float]]]]:
        """(code, weight) of each feature and sample; padding left out."""
        codes, weights = self.padded(step, rank)
        rng = np.random.default_rng([self.seed, step, rank, 2])
        found, slot = [], 0
        for x in self.plan.lookups:
            of_feature = []
            for row in range(len(codes)):
                pairs = [(int(codes[row, slot + i]), float(weights[row, slot + i])) for i in range(x.length)]
                if self.ragged:  # code 0 is a row; any number of codes, also for scalars
                    pairs = (pairs * 3)[: int(rng.integers(0, x.length + (2 if x.pooling != "none" else 1)))]
                elif x.is_list:
                    pairs = [p for p in pairs if p[0] != 0]
                of_feature.append(pairs)
            found.append(of_feature)
            slot += x.length
        return found

    def loss(self, outs: Sequence[Tensor], step: int, rank: int) -> Tensor:
        """Not linear in the embeddings; this rank's share of the global batch's mean."""
        rng = np.random.default_rng([self.seed, step, rank, 1])
        share = 1.0 / max(1, sum(self.rows[step]))
        total = torch.zeros(())
        for out in outs:
            target = torch.from_numpy(rng.normal(size=out.shape).astype(np.float32))
            total = total + ((out.sin() - target) ** 2).sum() * share
        return total


def look_up(case: Case, tables: dict[str, Tensor], step: int, rank: int) -> list[Tensor]:
    """The forward pass by definition: the rows of all bags, then bags as a matrix times rows; sequences keep places."""
    codes, _ = case.padded(step, rank)
    outs, slot = [], 0
    for x, bags in zip(case.plan.lookups, case.bags(step, rank), strict=True):
        flat = [(sample, code, w) for sample, bag in enumerate(bags) for code, w in bag]
        rows = embedding(torch.tensor([c for _, c, _ in flat], dtype=torch.int64), tables[x.table], sparse=True)
        samples = [s for s, _, _ in flat]
        if x.pooling == "none":
            places = []
            for sample, bag in enumerate(bags):
                inside = [i for i in range(x.length) if not (x.is_list and codes[sample, slot + i] == 0)]
                places += [sample * x.length + i for i in (range(len(bag)) if case.ragged else inside)]
            out = torch.zeros(len(bags) * x.length, rows.shape[1])
            outs.append(
                out.index_copy(0, torch.tensor(places, dtype=torch.int64), rows).view(len(bags), x.length, -1)
                if len(bags)
                else rows.unsqueeze(1).expand(0, x.length, rows.shape[1])
            )
        elif x.pooling == "max":
            out = [rows[[i for i, s in enumerate(samples) if s == sample]] for sample in range(len(bags))]
            zero = torch.zeros(rows.shape[1]) + rows.sum() * 0
            outs.append(torch.stack([o.max(dim=0).values if len(o) else zero for o in out]) if out else rows[:0])
        else:
            matrix = torch.zeros(len(bags), len(flat))
            for i, (sample, _, w) in enumerate(flat):
                matrix[sample, i] = w if x.weighted else 1.0 / len(bags[sample]) if x.pooling == "mean" else 1.0
            outs.append(matrix @ rows)
        slot += x.length
    return outs


class DenseOptimizer:
    """torch.optim on whole tables with sparse gradients; row-wise Adagrad by its formula."""

    def __init__(self, tables: dict[str, torch.nn.Parameter], conf: EmbeddingOptimizer) -> None:
        self.tables, self.conf = tables, conf
        groups = [{"params": [p], "lr": self.of(name, "learning_rate")} for name, p in tables.items()]
        kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}
        self.torch = kinds[conf.kind](groups, lr=1.0) if conf.kind in kinds else None
        self.sums = {name: torch.zeros(len(p), 1) for name, p in tables.items()}

    def of(self, table: str, key: str) -> float:
        own = getattr(self.conf.tables.get(table, TableOptimizer()), key)
        return getattr(self.conf, key) if own is None else own

    def step(self) -> None:
        grads = {n: p.grad.coalesce() for n, p in self.tables.items() if p.grad is not None}
        rows = {n: g.indices()[0] for n, g in grads.items()}
        values = {n: g.values().clone() for n, g in grads.items()}
        if self.conf.clip_norm is not None:
            norm = sum(float(v.double().square().sum()) for v in values.values()) ** 0.5
            values = {n: v * min(1.0, self.conf.clip_norm / max(norm, 1e-30)) for n, v in values.items()}
        for name, p in self.tables.items():
            if name not in grads:
                continue
            with torch.no_grad():
                values[name] += self.of(name, "weight_decay") * p[rows[name]]
                if self.torch is None:
                    self.sums[name][rows[name]] += values[name].square().mean(1, keepdim=True)
                    step = values[name] / (self.sums[name][rows[name]].sqrt() + 1e-10)
                    p[rows[name]] -= self.of(name, "learning_rate") * step
                p.grad = torch.sparse_coo_tensor(
                    rows[name][None], values[name], p.shape, is_coalesced=True, check_invariants=False
                )
        if self.torch is not None:
            self.torch.step()
        for p in self.tables.values():
            p.grad = None


def reference(case: Case, start: dict[str, Tensor]) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """All steps on the whole batch: each step's features (ranks one after the other), the last tables."""
    tables = {name: torch.nn.Parameter(t.clone()) for name, t in start.items()}
    optimizer = DenseOptimizer(tables, case.optimizer)
    outs = []
    for step, sizes in enumerate(case.rows):
        pieces = [look_up(case, tables, step, rank) for rank in range(len(sizes))]
        loss = sum((case.loss(p, step, rank) for rank, p in enumerate(pieces)), torch.zeros((), requires_grad=True))
        loss.backward()
        optimizer.step()
        for name, p in tables.items():  # what the storage keeps of it
            p.data.copy_(p.data.to(DTYPES[case.plan.by_name[name].storage]))
        outs.append([torch.cat(of_feature).detach() for of_feature in zip(*pieces, strict=True)])
    return outs, {name: p.detach() for name, p in tables.items()}


def full_tables(
    plan: Plan, ranks: Sequence[ShardedEmbeddings], weights: Sequence[Sequence[Tensor]]
) -> dict[str, Tensor]:
    """Put the tables together, every number from the rank that the plan says."""
    out = {t.name: torch.full((t.rows, t.dim), torch.nan) for t in plan.tables}
    for rank, embeddings in enumerate(ranks):
        for fused, weight in zip(embeddings.layout.fused_tables, weights[rank], strict=True):
            for block, rows, first in fused.local_blocks:
                every, size = range(plan.by_name[block.table].rows), plan.world_size
                mine = [r for r in every if block.ranks == 0 or (block.first_rank + r % block.ranks) % size == rank]
                assert list(rows) == mine
                part = weight[first : first + len(rows)].float().cpu()
                cell = out[block.table][rows.start :: rows.step, block.columns.start : block.columns.stop]
                if block.ranks == 0 and rank > 0:
                    assert torch.equal(cell, part), "replicas differ"
                cell.copy_(part)
    return out


@dataclass
class Run:
    embeddings: ShardedEmbeddings
    start: list[Tensor]
    outs: list[list[Tensor]]


def train(case: Case, collective: Collective, ahead: bool = False, rows_ahead: bool = False) -> Run:
    embeddings = ShardedEmbeddings(case.plan, collective, case.seed)
    start = [w.clone() for w in embeddings.weights]
    embeddings.configure_optimizer(case.optimizer)
    outs = []
    rank = collective.world.rank
    prepared = embeddings.prepare(*case.batch(0, rank)) if ahead else None
    for step in range(len(case.rows)):
        found = embeddings.features(prepared) if prepared else embeddings.features(*case.batch(step, rank))
        if ahead:
            prepared = embeddings.prepare(*case.batch(step + 1, rank)) if step + 1 < len(case.rows) else None
        loss = case.loss(found, step, rank)
        if prepared and rows_ahead:
            prepared.prefetch()
        loss.backward() if loss.requires_grad else None
        embeddings.step()
        if prepared and rows_ahead and step % 2:
            prepared.start()
        outs.append([o.detach() for o in found])
    return Run(embeddings, start, outs)


#: What a dense model gives does not depend on the plan: found once for all plans of one seed, world and optimizer.
KNOWN: dict[tuple[object, ...], tuple[dict[str, Tensor], list[list[Tensor]], dict[str, Tensor]]] = {}


def check(case: Case, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    ranks = run_ranks(case.plan.world_size, lambda c: train(case, c))
    embeddings = [r.embeddings for r in ranks]
    start = full_tables(case.plan, embeddings, [r.start for r in ranks])
    key = (case.plan.tables, case.plan.lookups, case.rows, case.seed, repr(case.optimizer), case.ragged)
    same, outs, last = KNOWN.setdefault(key, (start, [], {}))
    assert all(torch.equal(start[name], t) for name, t in same.items()), "the start depends on the plan"
    if not outs:
        found, tables = reference(case, start)
        outs += found
        last.update(tables)
    for step in range(len(case.rows)):
        for i in range(len(case.plan.lookups)):
            got = torch.cat([r.outs[step][i] for r in ranks])
            torch.testing.assert_close(got, outs[step][i], rtol=rtol, atol=atol)
    for name, table in full_tables(case.plan, embeddings, [e.weights for e in embeddings]).items():
        torch.testing.assert_close(table, last[name], rtol=rtol, atol=atol)
        assert not torch.equal(table, start[name]) or not any(map(sum, case.rows)), f"{name} did not move"


TABLES = (Table("a", 40, 6), Table("tiny", 2, 6), Table("b", 11, 6), Table("wide", 7, 9))
LOOKUPS = (
    Lookup("scalar", "a"),
    Lookup("flag", "tiny"),
    Lookup("sum", "a", 3, True),
    Lookup("mean", "b", 4, True, "mean"),
    Lookup("max", "b", 3, True, "max"),
    Lookup("weighted", "a", 3, True, "sum", True),
    Lookup("sequence", "b", 2, True, "none"),
    Lookup("wide", "wide", 2, True),
)


def planned(kinds: Sequence[str], world: int, tables: tuple[Table, ...] = TABLES) -> Plan:
    blocks = [b for i, t in enumerate(tables) for b in blocks_for(t, kinds[i], world, first_rank=(3 * i) % world)]
    return Plan(tables, LOOKUPS, tuple(blocks), world)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("sharding", [*KINDS, "mixed"])
def test_ten_steps_equal_a_dense_model(sharding: str, kind: str, world: int) -> None:
    # All poolings at once; one rank without rows in some steps.
    kinds = KINDS if sharding == "mixed" else [sharding] * 4
    rows = tuple(tuple((step + 2 * rank) % 4 if world > 1 else 4 for rank in range(world)) for step in range(STEPS))
    check(Case(planned(kinds, world), rows, 5, EmbeddingOptimizer(kind=kind, learning_rate=0.1), world % 2 == 0))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
def test_bags_summed_by_their_owners_equal_a_dense_model(sharding: str, kind: str, world: int) -> None:
    lookups = (
        Lookup("sum", "a", 3, True),
        Lookup("mean", "b", 4, True, "mean"),
        Lookup("weighted", "a", 5, True, "sum", True),
        Lookup("max", "tiny", 3, True, "max"),
        Lookup("wide", "wide", 2, True),
        Lookup("again", "b", 2, True),
    )
    blocks = [
        b for i, t in enumerate(TABLES) for b in blocks_for(t, sharding, world, i % world, pooled=t.name != "tiny")
    ]
    rows = tuple(tuple((step + 2 * rank) % 4 for rank in range(world)) for step in range(STEPS))
    plan = Plan(TABLES, lookups, tuple(blocks), world)
    check(Case(plan, rows, 6, EmbeddingOptimizer(kind=kind, learning_rate=0.1), world % 2 == 0))


def test_a_bag_that_one_owner_sums_has_the_same_bits() -> None:
    lookups = (
        Lookup("sum", "a", 3, True),
        Lookup("weighted", "a", 5, True, "sum", True),
        Lookup("b", "b", 4, True, "mean"),
    )
    tables = (Table("a", 40, 6), Table("b", 11, 6, "bf16"))
    outs = []
    for world, pooled in [(1, False), (3, True), (4, True)]:
        blocks = [
            *blocks_for(tables[0], "table_wise", world, world - 1, pooled=pooled),
            *blocks_for(tables[1], "column_wise", world, pooled=pooled),
        ]
        case = Case(Plan(tables, lookups, tuple(blocks), world), ((9,) * world,), 3)
        batch = case.padded(0, 0)
        outs += run_ranks(world, lambda c, p=case.plan, b=batch: ShardedEmbeddings(p, c, seed=8).features(*b))
    for got in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, outs[0], strict=True))


@pytest.mark.parametrize(
    ("lookup", "kind"),
    [
        (Lookup("f", "t", 2, True, "max"), "table_wise"),
        (Lookup("f", "t"), "row_wise"),
        (Lookup("f", "t", 2, True), "dp"),
    ],
)
def test_what_owners_cannot_sum_is_refused(lookup: Lookup, kind: str) -> None:
    table = Table("t", 5, 4)
    blocks = [Block("t", range(4), 0, 0, True)] if kind == "dp" else blocks_for(table, kind, 2, pooled=True)
    with pytest.raises(ValueError, match="table 't' cannot be summed by its owners"):
        Plan((table,), (lookup,), tuple(blocks), 2)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(OPTIMIZERS))
    tables, cuts = [], []
    for i in range(draw(st.integers(1, 4))):
        storage = draw(st.sampled_from(["fp32", "fp32", "fp32", "bf16", "fp16"]))
        t = Table(f"t{i}", draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 4, 5])), storage)
        tables.append(t)
        shards = draw(st.sampled_from(KINDS)), world, draw(st.integers(0, world - 1)), draw(st.integers(0, 3))
        cuts.append((shards, draw(st.booleans())))
    lookups = []
    # Every table is used, and some by two features.
    for i, table in enumerate([*range(len(tables)), *draw(st.lists(st.integers(0, len(tables) - 1), max_size=3))]):
        length = draw(st.sampled_from([None, 1, 3]))
        pooling = draw(st.sampled_from(["sum", "mean", "max", "none"]))
        weighted = pooling == "sum" and draw(st.booleans())
        lookups.append(Lookup(f"f{i}", f"t{table}", length or 1, length is not None, pooling, weighted))
    blocks = []
    for t, ((shard_kind, *where), wanted) in zip(tables, cuts, strict=True):
        pooled = wanted and shard_kind != "data_parallel" and can_pool(t.name, lookups)
        blocks += blocks_for(t, shard_kind, *where, pooled=pooled)
    sizes = st.tuples(*[st.sampled_from([0, 1, 2, 5]) for _ in range(world)])
    own = st.builds(
        TableOptimizer, learning_rate=st.sampled_from([None, 0.02]), weight_decay=st.sampled_from([None, 0.1])
    )
    optimizer = EmbeddingOptimizer(
        kind=kind,
        learning_rate=0.1,
        weight_decay=draw(st.sampled_from([0.0, 0.01])),
        clip_norm=draw(st.sampled_from([None, 0.3])),
        tables={t.name: draw(own) for t in tables if draw(st.booleans())},
    )
    plan = Plan(tuple(tables), tuple(lookups), tuple(blocks), world)
    steps = tuple(draw(sizes) for _ in range(3))
    return Case(plan, steps, draw(st.integers(0, 2**20)), optimizer, draw(st.booleans()))


def test_the_build_made_the_loops() -> None:
    assert native.library() is not None, "run make native"


@settings(max_examples=50, deadline=None)
@given(case=cases(), built=st.booleans())
def test_any_plan_equals_a_dense_model(case: Case, built: bool) -> None:
    with nullcontext() if built else patch.object(native, "library", lambda: None):
        check_any(case)


def check_any(case: Case) -> None:
    half = any(t.storage != "fp32" for t in case.plan.tables)
    ranks = run_ranks(case.plan.world_size, lambda c: train(case, c))
    embeddings = [r.embeddings for r in ranks]
    outs, last = reference(case, full_tables(case.plan, embeddings, [r.start for r in ranks]))
    # A sum in another order may round to the neighbour in 8 bits of mantissa.
    near = {"rtol": 3e-2, "atol": 5e-3} if half else {"rtol": 2e-4, "atol": 2e-5}
    for step in range(len(case.rows)):
        for i in range(len(case.plan.lookups)):
            torch.testing.assert_close(torch.cat([r.outs[step][i] for r in ranks]), outs[step][i], **near)
    for name, table in full_tables(case.plan, embeddings, [e.weights for e in embeddings]).items():
        torch.testing.assert_close(table, last[name], **near)


def everything(world: int, plan: Plan | None = None, steps: int = 3) -> Case:
    optimizer = EmbeddingOptimizer(kind="rowwise_adagrad", learning_rate=0.1)
    return Case(plan or planned(KINDS, world), ((3,) * world,) * steps, 8, optimizer)


def test_lookups_give_the_same_bits_by_any_plan_on_any_world() -> None:
    alone = everything(1, planned(["table_wise"] * 4, 1), steps=1)
    codes, weights = alone.padded(0, 0)
    expected = ShardedEmbeddings(alone.plan, LocalCollective(), seed=8).features(codes, weights)
    for world, kinds in [(2, KINDS), (3, KINDS[::-1]), (4, ["column_wise"] * 4), (4, ["row_wise"] * 4)]:
        plan = planned(kinds, world)
        for got in run_ranks(world, lambda c, p=plan: ShardedEmbeddings(p, c, seed=8).features(codes, weights)):
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def assert_same_bits(one: Sequence[Run], other: Sequence[Run]) -> None:
    for a, b in zip(one, other, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.embeddings.weights, b.embeddings.weights, strict=True))
        assert all(torch.equal(x, y) for p, q in zip(a.outs, b.outs, strict=True) for x, y in zip(p, q, strict=True))


@pytest.mark.parametrize("rows_ahead", [False, True])
def test_preparing_ahead_changes_no_bit(rows_ahead: bool) -> None:
    case = everything(3, steps=6)
    now = run_ranks(3, lambda c: train(case, c))
    assert_same_bits(now, run_ranks(3, lambda c: train(case, c, ahead=True, rows_ahead=rows_ahead)))


@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_rows_fetched_ahead_change_no_bit_of_any_plan(case: Case) -> None:
    world = case.plan.world_size
    now = run_ranks(world, lambda c: train(case, c))
    assert_same_bits(now, run_ranks(world, lambda c: train(case, c, ahead=True, rows_ahead=True)))


def test_rows_that_the_step_leaves_alone_travel_before_it() -> None:
    table = Table("t", 40, 4)
    plan = Plan((table,), (Lookup("f", "t"),), tuple(blocks_for(table, "row_wise", 2)), 2)

    def rank_main(c: Collective) -> tuple[list[int], Tensor, Tensor]:
        sent: list[int] = []
        inner = c.all_to_all
        # type: ignore[method-assign]
        c.all_to_all = lambda x, n: (sent.append(x.numel() * x.element_size()), inner(x, n))[1]
        embeddings = ShardedEmbeddings(plan, c, seed=1)
        embeddings.configure_optimizer(EmbeddingOptimizer(kind="sgd", learning_rate=1.0))
        first = embeddings(torch.arange(0, 20).view(-1, 1))
        following = embeddings.prepare(torch.arange(10, 40).view(-1, 1))
        following.prefetch()
        first.sum().backward()
        embeddings.step()
        sent.clear()
        got = embeddings(following).detach()
        between = list(sent)
        # A lookup and step that were not known of: nothing early may be used.
        late = embeddings.prepare(torch.arange(0, 4).view(-1, 1))
        late.prefetch()
        embeddings(torch.arange(0, 4).view(-1, 1)).sum().backward()
        embeddings.step()
        return between, got, embeddings(late) - embeddings(torch.arange(0, 4).view(-1, 1))

    for between, got, difference in run_ranks(2, rank_main):
        # Of 30 rows 10 are touched: 5 of each owner go to each of 2 ranks.
        assert between == [10 * 4 * 4]
        start = ShardedEmbeddings(
            Plan((table,), plan.lookups, tuple(blocks_for(table, "row_wise", 1)), 1), LocalCollective(), seed=1
        )
        expected = start(torch.arange(10, 40).view(-1, 1)).detach()
        expected[:10] -= 2.0  # both ranks' gradients
        torch.testing.assert_close(got, expected)
        assert not difference.any()


def test_a_rerun_gives_the_same_bits() -> None:
    case = everything(4, steps=5)
    first, second = (run_ranks(4, lambda c: train(case, c)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.embeddings.weights, b.embeddings.weights, strict=True))


def test_half_storage_halves_the_rows_and_the_message() -> None:
    sizes = {}
    for storage in ("fp32", "bf16"):
        tables = (Table("t", 50, 8, storage),)
        plan = Plan(tables, (Lookup("f", "t"),), tuple(blocks_for(tables[0], "row_wise", 2)), 2)

        def rank_main(c: Collective, plan: Plan = plan) -> tuple[int, int]:
            sent = []
            inner = c.all_to_all
            # type: ignore[method-assign]
            c.all_to_all = lambda x, n: (sent.append(x.numel() * x.element_size()), inner(x, n))[1]
            embeddings = ShardedEmbeddings(plan, c, seed=1)
            embeddings(torch.arange(50).view(50, 1))
            return embeddings.weight.element_size(), sent[-1]

        sizes[storage] = run_ranks(2, rank_main)
    assert sizes["fp32"] == [(4, 50 * 8 * 4)] * 2
    assert sizes["bf16"] == [(2, 50 * 8 * 2)] * 2


@pytest.mark.parametrize("pooled", [False, True])
def test_bfloat16_on_the_wire_rounds_each_number_once(pooled: bool) -> None:
    """Vectors are within 2^-8 of themselves (sums: of their terms), and so are one step's weights of plain SGD."""
    tables, lookups = (Table("t", 50, 8),), (Lookup("f", "t", 3, True),)
    blocks = tuple(blocks_for(tables[0], "row_wise", 2, pooled=pooled))
    found = {}
    for wire in ("fp32", "bf16"):
        plan = Plan(tables, lookups, blocks, 2, wire)
        case = Case(plan, ((40, 40),), 4, EmbeddingOptimizer(kind="sgd", learning_rate=1.0))
        found[wire] = run_ranks(2, lambda c, k=case: train(k, c))
    for exact, rounded in zip(found["fp32"], found["bf16"], strict=True):
        a, b = exact.outs[0][0], rounded.outs[0][0]
        assert not torch.equal(a, b)
        assert float((a - b).abs().max()) <= 3 * 0.05 * 2**-8
        moved = (exact.embeddings.weight - exact.start[0]).abs().max()
        difference = (exact.embeddings.weight - rounded.embeddings.weight).abs().max()
        assert 0 < float(difference) < 2**-7 * float(moved) + 1e-3


def test_wrong_batches_are_refused() -> None:
    plan = planned(KINDS, 1)
    embeddings = ShardedEmbeddings(plan, LocalCollective(), seed=1)
    codes = torch.zeros(2, plan.slots, dtype=torch.int64)
    with pytest.raises(ValueError, match="exactly where a lookup is weighted"):
        embeddings.features(codes)
    with pytest.raises(ValueError, match="weights must be float32"):
        embeddings.features(codes, torch.ones(2, 1))
    with pytest.raises(ValueError, match="call features"):
        embeddings(codes, torch.ones(2, plan.slots))
    lengths = torch.zeros(8, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="lengths sum to 0"):
        embeddings.features(KeyedJagged(torch.tensor([1]), lengths, torch.ones(1)))
    lengths[6, 0] = 3
    with pytest.raises(UserError, match="'sequence': a sequence of 3 codes, but its length is 2"):
        embeddings.features(KeyedJagged(torch.tensor([1, 1, 1]), lengths, torch.ones(3)))
    lengths[6, 0], lengths[7, 1] = 0, 1
    with pytest.raises(UserError, match="'wide': code 7 is outside its embedding table of 7 rows"):
        embeddings.features(KeyedJagged(torch.tensor([7]), lengths, torch.ones(1)))


def test_rowwise_adagrad_of_a_table_cut_both_ways_is_refused() -> None:
    blocks = (Block("t", range(2), 0, 2), Block("t", range(2, 4), 0, 2))
    plan = Plan((Table("t", 5, 4),), (Lookup("f", "t"),), blocks, 2)

    def rank_main(c: Collective) -> None:
        ShardedEmbeddings(plan, c, seed=1).configure_optimizer(EmbeddingOptimizer(kind="rowwise_adagrad"))

    with pytest.raises(ValueError, match="cut by columns and by rows"):
        run_ranks(2, rank_main)
    optimizer = EmbeddingOptimizer(kind="adagrad", learning_rate=0.1)
    check(Case(plan, ((4, 5),) * 3, 2, optimizer))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_save_opens_by_any_plan_on_any_world(kind: str, tmp_path: Path) -> None:
    # 2 -> 3 -> 1 ranks, each by other kinds; half storage by rows of its own, states of a row and of a weight.
    tables = (*TABLES[:2], Table("b", 11, 6, "bf16"), TABLES[3])
    optimizer = EmbeddingOptimizer(kind=kind, learning_rate=0.1)

    def case_of(kinds: Sequence[str], world: int) -> Case:
        return Case(planned(kinds, world, tables), ((4,) * world,) * 3, 8, optimizer)

    asked = case_of(KINDS, 1).padded(0, 0)

    def save(embeddings: ShardedEmbeddings, folder: Path) -> list[Tensor]:
        with shared_directory(local(folder), embeddings.collective) as partial:
            save_shards(embeddings, local(partial), with_optimizer=True)
            embeddings.collective.barrier()
            if embeddings.collective.world.is_chief:
                write_index(local(partial))
        with torch.no_grad():
            return embeddings.features(*asked)

    def load(case: Case, collective: Collective, folder: Path) -> ShardedEmbeddings:
        embeddings = ShardedEmbeddings(case.plan, collective, seed=99)
        embeddings.configure_optimizer(optimizer)
        load_shards(embeddings, local(folder), with_optimizer=True)
        return embeddings

    two, three, one = case_of(KINDS, 2), case_of([*KINDS[2:], *KINDS[:2]], 3), case_of(["column_wise"] * 4, 1)
    expected = run_ranks(2, lambda c: save(train(two, c).embeddings, tmp_path / "two"))[0]
    for got in run_ranks(3, lambda c: save(load(three, c, tmp_path / "two"), tmp_path / "three")):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    alone = load(one, LocalCollective(), tmp_path / "three")
    assert all(torch.equal(a, b) for a, b in zip(alone.features(*asked), expected, strict=True))
    # The states came along: one rank by the first plan and this one take the same next step.
    direct = load(case_of(KINDS, 1), LocalCollective(), tmp_path / "two")
    for embeddings in (alone, direct):
        sum(out.square().sum() for out in embeddings.features(*asked)).backward()
        embeddings.step()
    assert alone.steps == direct.steps == 4
    for a, b in zip(alone.features(*asked), direct.features(*asked), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    # Tables that have grown since: old rows as they were, new ones at their own start, on any world.
    saved = load(one, LocalCollective(), tmp_path / "three")
    was = full_tables(one.plan, [saved], [saved.weights])
    grown = tuple(Table(t.name, t.rows + 5, t.dim, t.storage) for t in tables)
    for world in (1, 2, 3, 4):
        case = Case(planned(KINDS[::-1] if world > 1 else KINDS, world, grown), ((4,) * world,) * 3, 8, optimizer)
        ranks = run_ranks(world, lambda c, case=case: load(case, c, tmp_path / "two"))
        fresh = run_ranks(world, lambda c, case=case: ShardedEmbeddings(case.plan, c, seed=99))
        now, start = (full_tables(case.plan, r, [e.weights for e in r]) for r in (ranks, fresh))
        for name, before in was.items():
            assert torch.equal(now[name][: len(before)], before)
            assert torch.equal(now[name][len(before) :], start[name][len(before) :])


@pytest.mark.parametrize("width", [1, 16, 37])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_loops_equal_torch(kind: str, width: int) -> None:
    # Thousands of bags and rows: more than one thread's share; popular rows, empty bags, rates by table.
    table, other = Table("t", 3_000, width), Table("u", 2_000, width)
    lookups = (Lookup("a", "t", 4, True), Lookup("b", "t", 3, True, "sum", True), Lookup("c", "u", 2, True, "mean"))
    plan = Plan((table, other), lookups, tuple(b for t in (table, other) for b in blocks_for(t, "row_wise", 1)), 1)
    # Adam's first steps are its rate in size however small a gradient is, so rounding shows in proportion to the rate.
    rate = 0.003 if kind == "adam" else 0.1
    optimizer = EmbeddingOptimizer(
        kind=kind, learning_rate=rate, weight_decay=0.01, tables={"u": TableOptimizer(learning_rate=3 * rate)}
    )
    case = Case(plan, ((2_500,),) * 2, 4, optimizer)
    with patch.object(native, "library", lambda: None):
        expected = train(case, LocalCollective())
    threads = torch.get_num_threads()
    weights = []
    for n in (1, 3):
        torch.set_num_threads(n)
        try:
            got = train(case, LocalCollective())
        finally:
            torch.set_num_threads(threads)
        weights.append(got.embeddings.weight)
        for a, b in zip(got.outs, expected.outs, strict=True):
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-5)
    assert torch.equal(*weights), "the bits depend on the number of threads"
    torch.testing.assert_close(weights[0], expected.embeddings.weight, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("kind", ["sgd", "rowwise_adagrad"])
def test_dumps_of_changes_bring_another_world_up_to_date(kind: str, tmp_path: Path) -> None:
    optimizer = EmbeddingOptimizer(kind=kind, learning_rate=0.1)
    case = Case(planned(KINDS, 2), ((2, 2),) * 6, 8, optimizer)
    asked = Case(planned(KINDS, 1), ((30,),), 5, optimizer).padded(0, 0)

    def leader(c: Collective) -> tuple[list[int], list[Tensor]]:
        embeddings = ShardedEmbeddings(case.plan, c, seed=8)
        embeddings.configure_optimizer(optimizer)
        with pytest.raises(RuntimeError, match="track_changes comes before"):
            save_changes(embeddings, local(tmp_path / "early"))
        embeddings.track_changes()
        counts = []
        for step in range(6):
            case.loss(embeddings.features(*case.batch(step, c.world.rank)), step, c.world.rank).backward()
            embeddings.step()
            if step % 2:
                counts.append(save_changes(embeddings, local(tmp_path / f"{step}")))
        counts.append(save_changes(embeddings, local(tmp_path / "none")))
        with torch.no_grad():
            return counts, embeddings.features(*asked)

    (counts, expected), (others, _) = run_ranks(2, leader)
    assert counts[-1] == others[-1] == 0
    rows = sum(t.rows for t in case.plan.tables)
    assert 0 < counts[0] + others[0] < rows + 9 * 2  # the wide table's columns are counted by block

    def follower(c: Collective) -> list[Tensor]:
        embeddings = ShardedEmbeddings(planned(KINDS[::-1], 3), c, seed=8)  # the same start: no base is needed
        before = embeddings.features(*asked)
        for name in ("1", "3", "5", "none"):
            apply_changes(embeddings, local(tmp_path / name))
        after = embeddings.features(*asked)
        assert not torch.equal(before[0], after[0])
        return after

    for got in run_ranks(3, follower):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    path = tmp_path / "3" / "changes-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    alone = ShardedEmbeddings(planned(KINDS, 1), LocalCollective(), seed=8)
    with pytest.raises(UserError, match=r"changes-00001\.safetensors is damaged"):
        apply_changes(alone, local(tmp_path / "3"))
    (tmp_path / "5" / "changes-00001.json").unlink()
    with pytest.raises(UserError, match=r"changes-00001\.json is missing"):
        apply_changes(alone, local(tmp_path / "5"))
