"""A dense torch model in one process, and plans that are held against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import embedding

from headrace.comm.base import Collective, run_ranks
from headrace.config import EmbeddingOptimizer, TableOptimizer
from headrace.embeddings.addressing import CodeBatch
from headrace.embeddings.jagged import JaggedTensor
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.sharding_plan import Lookup, Plan, Table, blocks_for, can_pool
from headrace.embeddings.storage import DTYPES

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

    def batch(self, step: int, rank: int) -> tuple[CodeBatch, Tensor | None]:
        """Return a rank's batch: padded, or by lookup, some of int32, and some that do not begin at 0."""
        codes, weights = self.padded(step, rank)
        weighted = any(x.weighted for x in self.plan.lookups)
        if not self.ragged:
            return codes, weights if weighted else None
        tensors = []
        for i, (x, bags) in enumerate(zip(self.plan.lookups, self.bags(step, rank), strict=True)):
            padding = i % 2
            values = torch.tensor([10**6] * padding + [c for bag in bags for c, _ in bag], dtype=torch.int64)
            offsets = torch.tensor([padding, *map(len, bags)]).cumsum(0)
            weight_tensor = torch.tensor([0.0] * padding + [w for bag in bags for _, w in bag]) if x.weighted else None
            tensors.append(JaggedTensor(values.int() if i % 3 else values, offsets, weight_tensor))
        return tensors, None

    def bags(self, step: int, rank: int) -> list[list[list[tuple[int, float]]]]:
        """(code, weight) of each feature and sample; padding left out."""
        codes, weights = self.padded(step, rank)
        rng = np.random.default_rng([self.seed, step, rank, 2])
        features, slot = [], 0
        for x in self.plan.lookups:
            of_feature = []
            for row in range(len(codes)):
                pairs = [(int(codes[row, slot + i]), float(weights[row, slot + i])) for i in range(x.length)]
                if self.ragged:  # code 0 is a row; any number of codes, also for scalars
                    pairs = (pairs * 3)[: int(rng.integers(0, x.length + 2))]
                elif x.is_list:
                    pairs = [p for p in pairs if p[0] != 0]
                of_feature.append(pairs)
            features.append(of_feature)
            slot += x.length
        return features

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
        if x.pooling == "none" and case.ragged:
            outs.append(rows)
        elif x.pooling == "none":
            places = []
            for sample in range(len(bags)):
                inside = [i for i in range(x.length) if not (x.is_list and codes[sample, slot + i] == 0)]
                places += [sample * x.length + i for i in inside]
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
        groups = [{"params": [p], "lr": self.setting(name, "learning_rate")} for name, p in tables.items()]
        kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}
        self.torch = kinds[conf.kind](groups, lr=1.0) if conf.kind in kinds else None
        self.sums = {name: torch.zeros(len(p), 1) for name, p in tables.items()}

    def setting(self, table: str, key: str) -> float:
        override = getattr(self.conf.tables.get(table, TableOptimizer()), key)
        return getattr(self.conf, key) if override is None else override

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
                values[name] += self.setting(name, "weight_decay") * p[rows[name]]
                if self.torch is None:
                    self.sums[name][rows[name]] += values[name].square().mean(1, keepdim=True)
                    step = values[name] / (self.sums[name][rows[name]].sqrt() + 1e-10)
                    p[rows[name]] -= self.setting(name, "learning_rate") * step
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
                expected_rows = [
                    r for r in every if block.ranks == 0 or (block.first_rank + r % block.ranks) % size == rank
                ]
                assert list(rows) == expected_rows
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
        vectors = embeddings.features(prepared) if prepared else embeddings.features(*case.batch(step, rank))
        if ahead:
            prepared = embeddings.prepare(*case.batch(step + 1, rank)) if step + 1 < len(case.rows) else None
        loss = case.loss(vectors, step, rank)
        if prepared and rows_ahead:
            prepared.prefetch()
        loss.backward() if loss.requires_grad else None
        embeddings.step()
        if prepared and rows_ahead and step % 2:
            prepared.start()
        outs.append([o.detach() for o in vectors])
    return Run(embeddings, start, outs)


#: What a dense model gives does not depend on the plan: found once for all plans of one seed, world and optimizer.
KNOWN: dict[tuple[object, ...], tuple[dict[str, Tensor], list[list[Tensor]], dict[str, Tensor]]] = {}


def check(case: Case, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    ranks = run_ranks(case.plan.world_size, lambda c: train(case, c))
    embeddings = [r.embeddings for r in ranks]
    start = full_tables(case.plan, embeddings, [r.start for r in ranks])
    key = (case.plan.tables, case.plan.lookups, case.rows, case.seed, repr(case.optimizer), case.ragged)
    known_start, outs, last = KNOWN.setdefault(key, (start, [], {}))
    assert all(torch.equal(start[name], t) for name, t in known_start.items()), "the start depends on the plan"
    if not outs:
        outputs, tables = reference(case, start)
        outs += outputs
        last.update(tables)
    for step in range(len(case.rows)):
        for i in range(len(case.plan.lookups)):
            actual = torch.cat([r.outs[step][i] for r in ranks])
            torch.testing.assert_close(actual, outs[step][i], rtol=rtol, atol=atol)
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
    for t, ((shard_kind, *placement), pools) in zip(tables, cuts, strict=True):
        pooled = pools and shard_kind != "data_parallel" and can_pool(t.name, lookups)
        blocks += blocks_for(t, shard_kind, *placement, pooled=pooled)
    sizes = st.tuples(*[st.sampled_from([0, 1, 2, 5]) for _ in range(world)])
    table_settings = st.builds(
        TableOptimizer, learning_rate=st.sampled_from([None, 0.02]), weight_decay=st.sampled_from([None, 0.1])
    )
    optimizer = EmbeddingOptimizer(
        kind=kind,
        learning_rate=0.1,
        weight_decay=draw(st.sampled_from([0.0, 0.01])),
        clip_norm=draw(st.sampled_from([None, 0.3])),
        tables={t.name: draw(table_settings) for t in tables if draw(st.booleans())},
    )
    plan = Plan(tuple(tables), tuple(lookups), tuple(blocks), world)
    steps = tuple(draw(sizes) for _ in range(3))
    return Case(plan, steps, draw(st.integers(0, 2**20)), optimizer, draw(st.booleans()))


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


def assert_same_bits(actual: Sequence[Run], expected: Sequence[Run]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.embeddings.weights, b.embeddings.weights, strict=True))
        assert all(torch.equal(x, y) for p, q in zip(a.outs, b.outs, strict=True) for x, y in zip(p, q, strict=True))
