"""Tables of raw ids against a plain dictionary of vectors."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import embedding

from headrace.config import EmbeddingOptimizer, TableOptimizer
from headrace.embeddings.collective import Collective, LocalCollective
from headrace.embeddings.collective_threads import ThreadCollective, run_ranks
from headrace.embeddings.delta import apply_changes, save_changes
from headrace.embeddings.dynamic import DynamicEmbeddings
from headrace.embeddings.dynamic_learning import DynamicReport
from headrace.embeddings.dynamic_memory import bytes_for, rows_within
from headrace.embeddings.dynamic_rows import DynamicRows
from headrace.embeddings.dynamic_spec import DynamicSpec
from headrace.embeddings.id_map import IdMap, mix
from headrace.embeddings.initial import INIT_BOUND, initial_values
from headrace.embeddings.plan import Lookup, Plan, Table, blocks_for
from headrace.embeddings.prepared import Prepared
from headrace.embeddings.raw_ids import WantedIds, owners, pack, unpack
from headrace.embeddings.sharded import ShardedEmbeddings
from headrace.errors import UserError
from tests.unit.test_embeddings_plans import OPTIMIZERS, DenseOptimizer

DIM = 3
ANY_ID = st.one_of(st.integers(-3, 12), st.sampled_from([-(2**63), 2**63 - 1, 2**40, 2**53 + 1, -1]))


@settings(max_examples=150, deadline=None)
@given(batches=st.lists(st.lists(ANY_ID, unique=True, max_size=40), max_size=6), asked=st.lists(ANY_ID))
def test_the_map_is_a_dictionary(batches: list[list[int]], asked: list[int]) -> None:
    by_loop, by_numpy = IdMap(), IdMap()
    assert by_loop._by_loops, "make native"
    by_numpy._by_loops = False
    for found in (by_loop, by_numpy):
        expected: dict[int, int] = {}
        for batch in batches:
            new = [i for i in batch if i not in expected]
            numbers = found.add(np.array(new, dtype=np.int64))
            for i in new:
                expected[i] = len(expected)
            assert numbers.tolist() == [expected[i] for i in new]
        assert len(found) == len(expected)
        assert found.load <= 0.5
        assert found.find(np.array(asked, dtype=np.int64)).tolist() == [expected.get(i, -1) for i in asked]
        left = list(expected)[::2]
        found.replace(np.array(left, dtype=np.int64))
        kept = {i: n for n, i in enumerate(left)}
        assert found.find(np.array(asked, dtype=np.int64)).tolist() == [kept.get(i, -1) for i in asked]


def test_the_map_takes_a_million_ids() -> None:
    ids = np.random.default_rng(1).permutation(np.arange(-500_000, 500_000)) * 2**20
    found = IdMap(ids)
    assert np.array_equal(found.find(ids), np.arange(len(ids)))
    assert (found.find(ids + 1) == -1).all()
    assert len(np.unique(mix(ids))) == len(ids)


class Dictionary:
    """What the table should do, one id at a time. SGD with rate `lr`."""

    def __init__(self, spec: DynamicSpec, lr: float) -> None:
        self.spec, self.lr = spec, lr
        self.rows: dict[int, np.ndarray] = {}
        self.seen: Counter[int] = Counter()
        self.last: dict[int, int] = {}
        self.batch = self.evicted = 0

    def start(self, i: int) -> np.ndarray:
        place = np.array([i], dtype=np.int64).view(np.uint64)
        return initial_values(self.spec.name, place, range(DIM), 7, INIT_BOUND)[0].copy()

    def forward(self, ids: Sequence[int]) -> np.ndarray:
        self.batch += 1
        times = Counter(ids)
        for i, n in times.items():
            self.seen[i] += n
            if i in self.rows:
                self.last[i] = self.batch
        admitted = [i for i in times if i not in self.rows and self.seen[i] >= self.spec.admit_after]
        limit = self.spec.max_rows
        if limit is not None and len(self.rows) + len(admitted) > limit and admitted:
            admitted = sorted(admitted, key=lambda i: (-self.seen[i], i))
            for i in admitted[limit:]:
                del self.seen[i]
            admitted = admitted[:limit]
            goes = max(len(self.rows) + len(admitted) - limit, int(self.spec.evict_share * limit))
            lru = self.spec.evict == "lru"
            by_worth = sorted(
                self.rows,
                key=lambda i: (-self.last[i], -self.seen[i], i) if lru else (-self.seen[i], -self.last[i], i),
            )
            for i in by_worth[len(by_worth) - min(goes, len(by_worth)) :]:
                del self.rows[i], self.seen[i], self.last[i]
                self.evicted += 1
        for i in admitted:
            self.rows[i], self.last[i] = self.start(i), self.batch
        return np.array([self.rows.get(i, np.zeros(DIM)) for i in ids], dtype=np.float32).reshape(-1, DIM)

    def step(self, ids: Sequence[int], grads: np.ndarray) -> None:
        for i, g in zip(ids, grads, strict=True):
            if i in self.rows:
                self.rows[i] -= np.float32(self.lr) * g


def alone(tables: DynamicEmbeddings) -> ShardedEmbeddings:
    """The same tables with no planned ones."""
    c = tables.collective
    return ShardedEmbeddings(Plan((), (), (), c.world.size), c, 7, dynamic=tables, device=tables.device)


def look_up(embeddings: ShardedEmbeddings, ids: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Vectors and which are found, of each table."""
    prepared = embeddings.prepare(torch.zeros(0, embeddings.plan.slots, dtype=torch.int64), raw=ids)
    embeddings.features(prepared)
    return prepared.found


class One(DynamicEmbeddings):
    """A single table, its vectors alone."""

    def __init__(self, spec: DynamicSpec, c: Collective, **optimizer: Any) -> None:
        super().__init__([spec], c, seed=7)
        self.configure_optimizer(EmbeddingOptimizer(**(optimizer or {"kind": "sgd", "learning_rate": 0.5})))
        # Not a module of its own: it has this one.
        self.lookups = (alone(self),)

    @property
    def rows(self) -> DynamicRows:
        return self.tables[0]

    @property
    def told(self) -> DynamicReport:
        return self.rows.report

    def __call__(self, ids: Tensor) -> Tensor:
        ((vectors, found),) = look_up(self.lookups[0], [ids])
        assert not vectors[~found].any()
        return vectors


def train(
    spec: DynamicSpec, c: Collective, batches: Sequence[Sequence[Sequence[int]]], parts: int = 1
) -> tuple[One, list[Tensor], DynamicReport]:
    """A step each so many batches. As the training loop does, one is looked up before the one before goes back."""
    table = One(spec, c)
    outs: list[Tensor] = []
    for first in range(0, len(batches), parts):
        losses: list[Tensor] = []
        for batch in batches[first : first + parts]:
            out = table(torch.tensor(batch[c.world.rank], dtype=torch.int64))
            if losses:
                losses[-1].backward()
            losses.append(((out - 1) ** 2).sum())
            outs.append(out.detach())
        losses[-1].backward()
        table.step()
    return table, outs, table.report()[spec.name]


def compare(spec: DynamicSpec, world: int, batches: Sequence[Sequence[Sequence[int]]], parts: int = 1) -> DynamicReport:
    expected = Dictionary(spec, 0.5)
    ranks = run_ranks(world, lambda c: train(spec, c, batches, parts))
    learned = []
    for number, batch in enumerate(batches):
        ids = [i for of_rank in batch for i in of_rank]
        vectors = expected.forward(ids)
        got = torch.cat([outs[number] for _, outs, _ in ranks])
        np.testing.assert_allclose(got.numpy(), vectors, rtol=1e-4, atol=1e-5)
        # Who had a row then learns, if there still is one at the step.
        learned += [(i, 2 * (v - 1)) for i, v in zip(ids, vectors, strict=True) if i in expected.rows]
        if (number + 1) % parts == 0 or number + 1 == len(batches):
            expected.step(*zip(*learned, strict=True)) if learned else None
            learned = []
    held = {int(i): w.cpu() for t, *_ in ranks for i, w in zip(t.rows.ids, t.rows.weight, strict=True)}
    assert held.keys() == expected.rows.keys()
    for i, w in held.items():
        np.testing.assert_allclose(w.numpy(), expected.rows[i], rtol=1e-3, atol=1e-4)
    report = ranks[0][2]
    assert all(r == report for *_, r in ranks)
    assert report.rows == len(expected.rows)
    assert report.waiting == sum(1 for i in expected.seen if i not in expected.rows)
    assert report.evicted == expected.evicted
    assert report.lookups == sum(len(r) for b in batches for r in b)
    return report


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, list[list[list[int]]]]:
    world = draw(st.integers(1, 4))
    ids = st.lists(ANY_ID, max_size=8)
    batches = draw(st.lists(st.lists(ids, min_size=world, max_size=world), min_size=1, max_size=6))
    return world, draw(st.integers(1, 3)), batches


@settings(max_examples=60, deadline=None)
@given(run=runs())
def test_rows_come_with_their_ids_on_any_world(run: tuple[int, int, list[list[list[int]]]]) -> None:
    world, admit_after, batches = run
    compare(DynamicSpec("t", DIM, admit_after=admit_after), world, batches)


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(st.lists(st.integers(0, 25), max_size=20), min_size=1, max_size=8),
    limit=st.integers(1, 12), admit_after=st.integers(1, 2), evict=st.sampled_from(["lfu", "lru"]),
    parts=st.integers(1, 3),
)  # fmt: skip
def test_the_least_seen_or_the_oldest_make_room(
    batches: list[list[int]], limit: int, admit_after: int, evict: Any, parts: int
) -> None:
    spec = DynamicSpec("t", DIM, admit_after=admit_after, max_rows=limit, evict_share=0.3, evict=evict)
    assert compare(spec, 1, [[b] for b in batches], parts).rows <= limit


@pytest.mark.parametrize("kind", ["sgd", "rowwise_adagrad", "adam"])
def test_the_limit_of_memory_is_kept(kind: str) -> None:
    table = One(DynamicSpec("t", 8, memory_mib=0.25), LocalCollective(), kind=kind)
    allowed = rows_within(2**18, 8, kind)
    assert bytes_for(allowed, 8, kind) <= 2**18 < bytes_for(allowed + 1, 8, kind)
    most = 0
    for step in range(12):
        table(torch.arange(step * 700, step * 700 + 900)).sum().backward()
        table.step()
        assert table.told.nbytes <= 2**18
        most = max(most, table.told.rows)
    assert allowed > 900
    assert most == allowed
    assert table.told.evicted > 0
    with pytest.raises(UserError, match="memory_mib=1e-05 has no room"):
        One(DynamicSpec("t", 8, memory_mib=1e-5), LocalCollective())


def test_tables_travel_together_and_stay_apart() -> None:
    """Two tables of two widths, on three ranks, against each alone on one."""
    specs = [DynamicSpec("a", 2), DynamicSpec("b", 5, admit_after=2)]
    generator = np.random.default_rng(3)
    batches = [[generator.integers(0, 9, 30), generator.integers(0, 9, 12)] for _ in range(4)]

    def run(c: Collective, chosen: Sequence[int]) -> list[list[Tensor]]:
        tables = DynamicEmbeddings([specs[i] for i in chosen], c, seed=7)
        tables.configure_optimizer(EmbeddingOptimizer(kind="sgd", learning_rate=0.5))
        embeddings = alone(tables)
        outs = []
        for batch in batches:
            mine = [np.array_split(batch[i], c.world.size)[c.world.rank] for i in chosen]
            vectors = [v for v, _ in look_up(embeddings, [torch.from_numpy(m) for m in mine])]
            sum(((v - 1) ** 2).sum() for v in vectors).backward()  # type: ignore[union-attr]
            tables.step()
            outs.append([v.detach() for v in vectors])
        return outs

    together = run_ranks(3, lambda c: run(c, [0, 1]))
    for table in (0, 1):
        by_itself = run(LocalCollective(), [table])
        for step in range(4):
            got = torch.cat([rank[step][table] for rank in together])
            torch.testing.assert_close(got, by_itself[step][0], rtol=1e-4, atol=1e-5)


class Counting(ThreadCollective):
    """Counts messages."""

    def __init__(self, inner: ThreadCollective) -> None:
        super().__init__(inner._meeting, inner.world.rank)
        self.messages = 0

    def all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        self.messages += 1
        return super().all_to_all(x, send_rows)


def plan_beside(world: int, kind: str, hop: int = 1) -> Plan:
    """Planned tables, two widths and storages, that share a step with raw ids."""
    tables = (Table("p", 9, 4), Table("q", 30, 3, "bf16"))
    lookups = (Lookup("p", "p"), Lookup("q", "q", 2, True))
    pooled = kind == "pooled"
    blocks = [b for t in tables for b in blocks_for(
        t, "row_wise" if pooled else kind, world, pooled=pooled and t.name == "q")]  # type: ignore[arg-type]  # fmt: skip
    return Plan(tables, lookups, tuple(blocks), world, "fp32", hop)


def step_beside(
    c: Collective, plan: Plan, specs: Sequence[DynamicSpec], together: bool
) -> tuple[list[Tensor], list[DynamicReport]]:
    """Six steps of planned tables and raw ids, ids prepared ahead; in one lookup, or each kind in its own.

    Gradients are small integers times powers of two: no sum of them is rounded, in whatever order.
    """
    tables = DynamicEmbeddings(specs, c, seed=7)
    planned = ShardedEmbeddings(plan, c, 7, dynamic=tables if together else None)
    lone = planned if together else alone(tables)
    for x in (planned, tables):
        x.configure_optimizer(EmbeddingOptimizer(kind="sgd", learning_rate=0.25))
    outs: list[Tensor] = []

    def prepare(step: int) -> tuple[Prepared, Prepared]:
        rng = np.random.default_rng([step, c.world.rank])
        rows = (3 * step + c.world.rank) % 4  # none, on some ranks
        codes = torch.from_numpy((rng.random((rows, 3)) * np.array([9, 30, 30])).astype(np.int64))
        raw = [torch.from_numpy(rng.integers(-6, 6, n) * 2**60) for n in (4 * rows, (step * 2) % 5)]
        if together:
            return (both := planned.prepare(codes, raw=raw)), both
        return planned.prepare(codes), lone.prepare(codes[:, :0], raw=raw)

    following = prepare(0)
    for step in range(6):
        (codes, raw), following = following, prepare(step + 1)
        found = planned.features(codes)
        if not together:
            lone(raw)
        found += [v for v, _ in raw.found]
        outs += [f.detach().clone() for f in found]
        following[0].fetch_ahead()
        rng = np.random.default_rng([step, c.world.rank, 1])
        sum((f * torch.from_numpy(rng.integers(-3, 4, f.shape))).sum() for f in found).backward()
        planned.step()
        tables.step()
    for p in dict.fromkeys(following):
        p.drop()
    return outs, list(tables.report().values())


SPECS = (DynamicSpec("a", 2, admit_after=2, max_rows=3), DynamicSpec("b", 5))


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "data_parallel", "pooled"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_raw_ids_travel_with_planned_tables_to_the_same_bits(world: int, kind: str) -> None:
    plan = plan_beside(world, kind)
    apart, joined = (run_ranks(world, lambda c, t=t: step_beside(c, plan, SPECS, t)) for t in (False, True))
    for (outs, told), (got, got_told) in zip(apart, joined, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, outs, strict=True))
        assert got_told == told
        assert told[0].evicted
        assert any(o.any() for o in outs)


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "column_wise"])
def test_raw_ids_go_by_machines_to_the_same_rows(kind: str) -> None:
    direct, by_node = (
        run_ranks(4, lambda c, hop=hop: step_beside(c, plan_beside(4, kind, hop), SPECS, True)) for hop in (1, 2)
    )
    for (outs, told), (got, got_told) in zip(direct, by_node, strict=True):
        assert got_told == told
        assert told[0].evicted
        for a, b in zip(got, outs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("hop", "messages"), [(1, 3), (2, 6)])
def test_all_tables_of_a_step_share_one_exchange_each_way(hop: int, messages: int) -> None:
    def rank_main(c: ThreadCollective) -> int:
        counting = Counting(c)
        tables = DynamicEmbeddings(SPECS, counting, seed=7)
        embeddings = ShardedEmbeddings(plan_beside(4, "row_wise", hop), counting, 7, dynamic=tables)
        for x in (embeddings, tables):
            x.configure_optimizer(EmbeddingOptimizer())
        prepared = embeddings.prepare(torch.ones(2, 3, dtype=torch.int64), raw=[torch.arange(5), torch.arange(3)])
        out = embeddings.features(prepared)
        sum(x.sum() for x in (*out, *(v for v, _ in prepared.found))).backward()
        embeddings.step()
        tables.step()
        return counting.messages

    assert run_ranks(4, rank_main) == [messages] * 4


def test_bfloat16_on_the_wire_rounds_raw_ids_too() -> None:
    """A message of half the bytes; whether there is a row is exact."""

    def rank_main(c: Collective, wire: str) -> list[tuple[Tensor, Tensor]]:
        tables = DynamicEmbeddings([DynamicSpec("t", 8, admit_after=2)], c, seed=7)
        plan = Plan((), (), (), 2, wire)  # type: ignore[arg-type]
        embeddings = ShardedEmbeddings(plan, c, 7, dynamic=tables)
        return look_up(embeddings, [torch.tensor([1, 1, 2, 3, 3])])

    for exact, rounded in zip(*(run_ranks(2, lambda c, w=w: rank_main(c, w)) for w in ("fp32", "bf16")), strict=True):
        assert torch.equal(rounded[0][0], exact[0][0].bfloat16().float())
        assert rounded[0][1].tolist() == exact[0][1].tolist() == [True] * 5


@settings(max_examples=150, deadline=None)
@given(
    ranks=st.integers(1, 5), long=st.booleans(),
    tables=st.lists(st.lists(st.one_of(ANY_ID, st.integers(-(2**63), 2**63 - 1)), max_size=12), min_size=1, max_size=3),
)  # fmt: skip
def test_what_is_asked_arrives(ranks: int, long: bool, tables: list[list[int]]) -> None:
    """Each id at its owner, with its count; what follows in a message stays as it is."""
    wanted = [WantedIds.of(torch.tensor(ids, dtype=torch.int64), ranks) for ids in tables]
    for ids, w in zip(tables, wanted, strict=True):
        assert dict(zip(w.ids.tolist(), w.counts.tolist(), strict=True)) == Counter(ids)
        assert w.ids[w.duplicates.inverse()].tolist() == ids
        assert owners(w.ids.numpy(), ranks).tolist() == [r for r, n in enumerate(w.of_rank) for _ in range(n)]
    dtype = torch.int64 if long else torch.int32
    message, lengths = pack(wanted, dtype)
    behind = [torch.arange(r, dtype=dtype) for r in range(ranks)]
    parts = [torch.cat(pair) for pair in zip(torch.split(message, lengths), behind, strict=True)]
    asked, rest, sizes = unpack(torch.cat(parts), [p.numel() for p in parts], len(tables))
    assert (rest.tolist(), sizes) == (torch.cat(behind).tolist(), list(range(ranks)))
    for w, a in zip(wanted, asked, strict=True):
        assert (a.ids.tolist(), a.counts.tolist(), a.of_rank) == (w.ids.tolist(), w.counts.tolist(), w.of_rank)
        # Asked by two, an id is wanted once, as often as both together.
        again = WantedIds.of(torch.cat([a.ids, a.ids]), ranks, torch.cat([a.counts, a.counts + 1]))
        assert (again.ids.tolist(), again.counts.tolist()) == (w.ids.tolist(), (2 * w.counts + 1).tolist())


def test_an_evicted_id_starts_again_as_it_started() -> None:
    table = One(DynamicSpec("t", DIM, max_rows=2), LocalCollective(), kind="adagrad", learning_rate=0.5)
    first = table(torch.tensor([5, 5])).detach()[0]
    for batch in ([5, 5], [6, 6, 6, 6, 6], [7] * 9, [8] * 9):
        table(torch.tensor(batch)).sum().backward()
        table.step()
    assert 5 not in table.rows.ids
    assert table.told == DynamicReport(2, 0, 2 / 16, 4, 2, 27, 27, 0, 0, bytes_for(2, DIM, "adagrad"))
    assert torch.equal(table(torch.tensor([5] * 20)).detach()[0], first)
    assert float(table.rows.states["sum"][list(table.rows.ids).index(5)].abs().max()) == 0


def test_a_lookup_is_gone_once_it_was_learned_from() -> None:
    """Its vectors would be memory that waits for the garbage collector."""
    embeddings = One(DynamicSpec("t", DIM), LocalCollective()).lookups[0]
    prepared = embeddings.prepare(torch.zeros(0, 0, dtype=torch.int64), raw=[torch.arange(4)])
    embeddings(prepared)
    prepared.found[0][0].sum().backward()
    alive = weakref.ref(prepared)
    gc.disable()
    try:
        del prepared
        assert alive() is None
    finally:
        gc.enable()


def test_scoring_changes_nothing() -> None:
    table, *_ = train(DynamicSpec("t", DIM, admit_after=2), LocalCollective(), [[[1, 1, 2]]])
    before = (table.told, table.rows.weight.clone())
    table.eval()
    with torch.no_grad():
        out = table(torch.tensor([1, 2, 3, 2, 3]))
    assert torch.equal(out[0], before[1][0])
    assert not out[1:].any()
    assert table.told == replace(before[0], asked=5, absent=4)
    assert table.told.oov_share == 0.8
    assert table.eval().told == before[0]


def test_a_chance_of_admission_is_that_chance() -> None:
    spec = DynamicSpec("t", DIM, admit_chance=0.25)
    table, *_ = train(spec, LocalCollective(), [[list(range(20_000))]])
    assert len(table.rows.ids) == pytest.approx(5_000, rel=0.04)
    again, *_ = train(spec, LocalCollective(), [[list(range(20_000))]])
    assert np.array_equal(table.rows.ids, again.rows.ids)


def test_those_who_wait_longest_are_forgotten_first() -> None:
    spec = DynamicSpec("t", DIM, admit_after=2, max_waiting=10)
    table, *_ = train(spec, LocalCollective(), [[list(range(10))], [list(range(10, 16))]])
    assert table.told.waiting == 9  # a tenth more goes, for the next ones
    table(torch.arange(20))
    assert sorted(table.rows.ids.tolist()) == [0, 1, 2, *range(10, 16)]


def test_growing_keeps_rows_and_states() -> None:
    spec = DynamicSpec("t", DIM)
    batches = [[list(range(n))] for n in (3, 60, 61, 500, 2_000)]
    compare(spec, 1, batches)


@pytest.mark.parametrize("kind", ["sgd", "rowwise_adagrad", "adam"])
def test_saved_on_two_loaded_on_three_and_on_one(kind: str, tmp_path: Path) -> None:
    spec = DynamicSpec("t", DIM, admit_after=2)
    asked = torch.arange(-20, 60)

    def new(c: Collective) -> One:
        return One(spec, c, kind=kind, learning_rate=0.1)

    def step(table: One, number: int) -> None:
        ids = np.random.default_rng(number).integers(-20, 60, 48)
        mine = np.array_split(ids, table.collective.world.size)[table.collective.world.rank]
        (table(torch.from_numpy(mine)) - 1).square().sum().backward()
        table.step()

    def look(table: One) -> Tensor:
        table.eval()
        with torch.no_grad():
            out = table(asked)
        table.train()
        return out

    def first(c: ThreadCollective) -> Tensor:
        table = new(c)
        for n in range(4):
            step(table, n)
        table.save(tmp_path / "two")
        return look(table)

    def second(c: ThreadCollective) -> Tensor:
        table = new(c)
        table.load(tmp_path / "two", True)
        table.save(tmp_path / "three")
        return look(table)

    expected = run_ranks(2, first)[0]
    assert 20 < int(expected.any(dim=1).sum()) < 80
    for got in run_ranks(3, second):
        assert torch.equal(got, expected)
    single = new(LocalCollective())
    single.load(tmp_path / "three", True)
    assert torch.equal(look(single), expected)
    # Counts, states and those who wait came along.
    undisturbed = new(LocalCollective())
    for n in range(4):
        step(undisturbed, n)
    for n in range(4, 7):
        step(undisturbed, n)
        step(single, n)
    torch.testing.assert_close(look(single), look(undisturbed), rtol=1e-4, atol=1e-6)
    assert replace(single.told, asked=0, absent=0, load=0, nbytes=0) == replace(
        undisturbed.told, asked=0, absent=0, load=0, nbytes=0
    )
    # Scoring reads ids and vectors alone.
    scoring = DynamicEmbeddings([spec], LocalCollective(), seed=7).eval()
    for path in (tmp_path / "three").glob("*-training.safetensors"):
        path.unlink()
    scoring.load(tmp_path / "three", False)
    ((vectors, found),) = look_up(alone(scoring), [asked])
    assert torch.equal(vectors, expected)
    assert torch.equal(found, expected.any(dim=1))


def test_dumps_of_changes_bring_another_world_up_to_date(tmp_path: Path) -> None:
    """Rows that changed, came, went, and came again; on two ranks, followed on three and on one."""
    specs = (DynamicSpec("a", 2, admit_after=2, max_rows=16), DynamicSpec("b", 5))
    asked = [torch.arange(-20, 20) * 2**50] * 2

    def leader(c: Collective) -> tuple[list[int], list[tuple[Tensor, Tensor]], list[DynamicReport]]:
        tables = DynamicEmbeddings(specs, c, seed=7)
        embeddings = ShardedEmbeddings(plan_beside(2, "row_wise"), c, 7, dynamic=tables)
        for x in (embeddings, tables):
            x.configure_optimizer(EmbeddingOptimizer(kind="sgd", learning_rate=0.5))
        embeddings.track_changes()
        counts = []
        for step in range(9):
            rng = np.random.default_rng([step, c.world.rank])
            raw = [torch.from_numpy(rng.integers(-20, 20, n) * 2**50) for n in (12, 2)]
            prepared = embeddings.prepare(torch.from_numpy(rng.integers(0, 9, (2, 3))), raw=raw)
            outs = [*embeddings.features(prepared), *(v for v, _ in prepared.found)]
            sum((out - 1).square().sum() for out in outs).backward()
            with pytest.raises(RuntimeError, match="gradients wait"):
                save_changes(embeddings, tmp_path / "early")
            embeddings.step()
            tables.step()
            if step % 3 == 2:
                counts.append(save_changes(embeddings, tmp_path / f"{step}"))
        counts.append(save_changes(embeddings, tmp_path / "none"))
        tables.eval()
        with torch.no_grad():
            return counts, look_up(embeddings_of(tables, 2), asked), list(tables.report().values())

    def embeddings_of(tables: DynamicEmbeddings, world: int) -> ShardedEmbeddings:
        return ShardedEmbeddings(plan_beside(world, "row_wise"), tables.collective, 7, dynamic=tables)

    (counts, expected, told), _ = run_ranks(2, leader)
    assert counts[-1] == 0 < min(counts[:-1])
    assert told[0].evicted > 16
    assert counts[1] < told[0].rows + told[1].rows + 39  # not all there is

    def follower(c: Collective) -> list[tuple[Tensor, Tensor]]:
        tables = DynamicEmbeddings([replace(s, max_rows=None) for s in specs], c, seed=8).eval()
        embeddings = embeddings_of(tables, c.world.size)
        for name in ("2", "5", "8", "none"):
            apply_changes(embeddings, tmp_path / name)
        return look_up(embeddings, asked)

    for got in [*run_ranks(3, follower), follower(LocalCollective())]:
        for (vectors, found), (same, there) in zip(got, expected, strict=True):
            assert torch.equal(vectors, same)
            assert torch.equal(found, there)
            assert there.any()
    assert not expected[0][1].all()
    others = embeddings_of(DynamicEmbeddings(specs[:1], LocalCollective(), seed=8), 1)
    with pytest.raises(UserError, match=r"were dumped with dims \{'a': 2, 'b': 5\}"):
        apply_changes(others, tmp_path / "2")


def test_damage_is_refused_by_name(tmp_path: Path) -> None:
    table, *_ = train(DynamicSpec("t", DIM), LocalCollective(), [[[1, 2, 3]]])
    table.save(tmp_path)
    path = tmp_path / "t-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"t-00000\.safetensors is damaged"):
        table.load(tmp_path, True)
    meta = tmp_path / "t-00000.json"
    meta.write_text(meta.read_text().replace('"steps":1', '"steps":2'))
    with pytest.raises(UserError, match=r"t-00000\.json is damaged"):
        table.load(tmp_path, True)
    other = One(DynamicSpec("u", DIM), LocalCollective())
    with pytest.raises(UserError, match=r"the save of .* did not finish"):
        other.load(tmp_path, True)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_steps_of_parts_clipped_over_all_tables_equal_a_dense_model(world: int, kind: str) -> None:
    plan = Plan(
        (Table("p", 9, 4), Table("q", 30, 3)), (Lookup("p", "p"), Lookup("q", "q")),
        (*blocks_for(Table("p", 9, 4), "data_parallel", world), *blocks_for(Table("q", 30, 3), "row_wise", world)),
        world,
    )  # fmt: skip
    ids, limit = np.arange(-5, 7) * 2**59, 8.0 + 5 * world
    conf = EmbeddingOptimizer(
        kind=kind,
        learning_rate=0.1,
        weight_decay=0.02,
        clip_norm=limit,
        tables={"t": TableOptimizer(learning_rate=0.2)},
    )  # type: ignore[arg-type]
    everything = torch.stack([torch.arange(30) % 9, torch.arange(30)], dim=1), torch.from_numpy(ids)

    def draw(step: int, part: int, rank: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng([step, part, rank])
        codes = torch.from_numpy(rng.integers(0, [9, 30], ((2 * part + rank + step) % 4, 2)))
        return codes, torch.from_numpy(rng.integers(0, len(ids), (step + 3 * rank) % 7))

    def loss_of(vectors: Sequence[Tensor]) -> Tensor:
        return sum(((v.sin() - 1) ** 2).sum() for v in vectors)  # type: ignore[return-value]

    def rank_main(c: ThreadCollective) -> tuple[list[Tensor], list[Tensor]]:
        tables = DynamicEmbeddings([DynamicSpec("t", 5)], c, seed=7)
        embeddings = ShardedEmbeddings(plan, c, 7, dynamic=tables)
        tables.configure_optimizer(conf)
        embeddings.configure_optimizer(conf.model_copy(update={"tables": {}}))

        def look(codes: Tensor, raw: Tensor) -> list[Tensor]:
            prepared = embeddings.prepare(codes, raw=[raw])
            return [*embeddings.features(prepared), prepared.found[0][0]]

        start = [x.detach() for x in look(*everything)]
        embeddings.drop_gradients()
        for step in range(6):
            for part in range(2):
                codes, numbers = draw(step, part, c.world.rank)
                loss_of(look(codes, torch.from_numpy(ids)[numbers])).backward()
            if not step:
                with pytest.raises(RuntimeError, match=r"ShardedEmbeddings\.step comes before"):
                    tables.step()
            embeddings.step()
            tables.step()
        return start, [x.detach() for x in look(*everything)]

    found = run_ranks(world, rank_main)
    start = found[0][0]
    dense = {n: torch.nn.Parameter(t.clone()) for n, t in zip("pqt", (start[0][:9], start[1], start[2]), strict=True)}
    optimizer = DenseOptimizer(dense, conf)
    norms = []
    for step in range(6):
        for codes, numbers in (draw(step, part, rank) for part in range(2) for rank in range(world)):
            asked = zip(dense.values(), (codes[:, 0], codes[:, 1], numbers), strict=True)
            loss_of([embedding(i, d, sparse=True) for d, i in asked]).backward()
        grads = [d.grad.coalesce().values().square().sum() for d in dense.values() if d.grad is not None]
        norms.append(float(sum(grads)) ** 0.5)
        optimizer.step()
    assert min(norms) < limit < max(norms)  # some steps are clipped
    for _, got in found:
        for table, expected in zip((got[0][:9], got[1], got[2]), dense.values(), strict=True):
            torch.testing.assert_close(table, expected.detach(), rtol=1e-4, atol=1e-5)
