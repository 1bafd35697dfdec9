"""Tables of raw ids against a plain dictionary of vectors."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import embedding

from headrace.comm.base import Collective, LocalCollective, ThreadCollective, run_ranks
from headrace.config import EmbeddingOptimizer, TableOptimizer
from headrace.embeddings.dynamic.rows import DynamicReport, bytes_for, rows_within
from headrace.embeddings.dynamic.rows_cpu import HostRows
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.embeddings.kernels.id_map import IdMap, mix
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.sharding_plan import Lookup, Plan, Table, blocks_for
from headrace.embeddings.storage import INIT_BOUND, initial_values
from headrace.errors import UserError
from tests.plans_support import OPTIMIZERS, DenseOptimizer

DIM = 3


ANY_ID = st.one_of(st.integers(-3, 12), st.sampled_from([-(2**63), 2**63 - 1, 2**40, 2**53 + 1, -1]))


@settings(max_examples=150, deadline=None)
@given(batches=st.lists(st.lists(ANY_ID, unique=True, max_size=40), max_size=6), lookups=st.lists(ANY_ID))
def test_the_map_is_a_dictionary(batches: list[list[int]], lookups: list[int]) -> None:
    by_loop, by_numpy = IdMap(), IdMap()
    assert by_loop._by_loops, "make native"
    by_numpy._by_loops = False
    for id_map in (by_loop, by_numpy):
        expected: dict[int, int] = {}
        for batch in batches:
            new = [i for i in batch if i not in expected]
            numbers = id_map.add(np.array(new, dtype=np.int64))
            for i in new:
                expected[i] = len(expected)
            assert numbers.tolist() == [expected[i] for i in new]
        assert len(id_map) == len(expected)
        assert id_map.load <= 0.5
        assert id_map.find(np.array(lookups, dtype=np.int64)).tolist() == [expected.get(i, -1) for i in lookups]
        retained_ids = list(expected)[::2]
        id_map.replace(np.array(retained_ids, dtype=np.int64))
        remaining = {i: n for n, i in enumerate(retained_ids)}
        assert id_map.find(np.array(lookups, dtype=np.int64)).tolist() == [remaining.get(i, -1) for i in lookups]


def test_the_map_takes_a_million_ids() -> None:
    ids = np.random.default_rng(1).permutation(np.arange(-500_000, 500_000)) * 2**20
    id_map = IdMap(ids)
    assert np.array_equal(id_map.find(ids), np.arange(len(ids)))
    assert (id_map.find(ids + 1) == -1).all()
    assert len(np.unique(mix(ids))) == len(ids)


class Dictionary:
    """Reference of a dynamic table, one id at a time, with SGD of rate `lr`."""

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
            evicted = max(len(self.rows) + len(admitted) - limit, int(self.spec.evict_share * limit))
            lru = self.spec.evict == "lru"
            by_worth = sorted(
                self.rows, key=lambda i: (-self.last[i], -self.seen[i], i) if lru else (-self.seen[i], -self.last[i], i)
            )
            for i in by_worth[len(by_worth) - min(evicted, len(by_worth)) :]:
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
    """Return the same tables without planned ones."""
    c = tables.collective
    return ShardedEmbeddings(Plan((), (), (), c.world.size), c, 7, dynamic=tables, device=tables.device)


def look_up(embeddings: ShardedEmbeddings, ids: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return vectors of each table, and a mask of those that are present."""
    prepared = embeddings.prepare(torch.zeros(0, embeddings.plan.slots, dtype=torch.int64), raw=ids)
    embeddings.features(prepared)
    return prepared.found


class SingleTable(DynamicEmbeddings):
    """A single table, its vectors alone."""

    def __init__(self, spec: DynamicSpec, c: Collective, **optimizer: Any) -> None:
        super().__init__([spec], c, seed=7)
        self.configure_optimizer(EmbeddingOptimizer(**(optimizer or {"kind": "sgd", "learning_rate": 0.5})))
        # Not a module of its own: it has this one.
        self.lookups = (alone(self),)

    @property
    def rows(self) -> HostRows:
        return self.tables[0]

    @property
    def dynamic_report(self) -> DynamicReport:
        return self.rows.report

    def __call__(self, ids: Tensor) -> Tensor:
        ((vectors, is_present),) = look_up(self.lookups[0], [ids])
        assert not vectors[~is_present].any()
        return vectors


def train(
    spec: DynamicSpec, c: Collective, batches: Sequence[Sequence[Sequence[int]]], parts: int = 1
) -> tuple[SingleTable, list[Tensor], DynamicReport]:
    """Step after so many batches. As in the training loop, a batch is looked up before the previous one's gradients."""
    table = SingleTable(spec, c)
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
    limit=st.integers(1, 12),
    admit_after=st.integers(1, 2),
    evict=st.sampled_from(["lfu", "lru"]),
    parts=st.integers(1, 3),
)
def test_the_least_seen_or_the_oldest_make_room(
    batches: list[list[int]], limit: int, admit_after: int, evict: Any, parts: int
) -> None:
    spec = DynamicSpec("t", DIM, admit_after=admit_after, max_rows=limit, evict_share=0.3, evict=evict)
    assert compare(spec, 1, [[b] for b in batches], parts).rows <= limit


@pytest.mark.parametrize("kind", ["sgd", "rowwise_adagrad", "adam"])
def test_the_limit_of_memory_is_kept(kind: str) -> None:
    table = SingleTable(DynamicSpec("t", 8, memory_mib=0.25), LocalCollective(), kind=kind)
    allowed = rows_within(2**18, 8, kind)
    assert bytes_for(allowed, 8, kind) <= 2**18 < bytes_for(allowed + 1, 8, kind)
    most = 0
    for step in range(12):
        table(torch.arange(step * 700, step * 700 + 900)).sum().backward()
        table.step()
        assert table.dynamic_report.nbytes <= 2**18
        most = max(most, table.dynamic_report.rows)
    assert allowed > 900
    assert most == allowed
    assert table.dynamic_report.evicted > 0
    with pytest.raises(UserError, match="memory_mib=1e-05 has no room"):
        SingleTable(DynamicSpec("t", 8, memory_mib=1e-5), LocalCollective())


def test_an_evicted_id_starts_again_as_it_started() -> None:
    table = SingleTable(DynamicSpec("t", DIM, max_rows=2), LocalCollective(), kind="adagrad", learning_rate=0.5)
    first = table(torch.tensor([5, 5])).detach()[0]
    for batch in ([5, 5], [6, 6, 6, 6, 6], [7] * 9, [8] * 9):
        table(torch.tensor(batch)).sum().backward()
        table.step()
    assert 5 not in table.rows.ids
    assert table.dynamic_report == DynamicReport(2, 0, 2 / 16, 4, 2, 27, 27, 0, 0, bytes_for(2, DIM, "adagrad"))
    assert torch.equal(table(torch.tensor([5] * 20)).detach()[0], first)
    assert float(table.rows.states["sum"][list(table.rows.ids).index(5)].abs().max()) == 0


def test_a_lookup_is_gone_once_it_was_learned_from() -> None:
    """Its vectors would be memory that waits for the garbage collector."""
    embeddings = SingleTable(DynamicSpec("t", DIM), LocalCollective()).lookups[0]
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
    initial = (table.dynamic_report, table.rows.weight.clone())
    table.eval()
    with torch.no_grad():
        out = table(torch.tensor([1, 2, 3, 2, 3]))
    assert torch.equal(out[0], initial[1][0])
    assert not out[1:].any()
    assert table.dynamic_report == replace(initial[0], asked=5, absent=4)
    assert table.dynamic_report.oov_share == 0.8
    assert table.eval().dynamic_report == initial[0]


def test_a_chance_of_admission_is_that_chance() -> None:
    spec = DynamicSpec("t", DIM, admit_chance=0.25)
    table, *_ = train(spec, LocalCollective(), [[list(range(20_000))]])
    assert len(table.rows.ids) == pytest.approx(5_000, rel=0.04)
    again, *_ = train(spec, LocalCollective(), [[list(range(20_000))]])
    assert np.array_equal(table.rows.ids, again.rows.ids)


def test_those_who_wait_longest_are_forgotten_first() -> None:
    spec = DynamicSpec("t", DIM, admit_after=2, max_waiting=10)
    table, *_ = train(spec, LocalCollective(), [[list(range(10))], [list(range(10, 16))]])
    assert table.dynamic_report.waiting == 9  # a tenth more goes, for the next ones
    table(torch.arange(20))
    assert sorted(table.rows.ids.tolist()) == [0, 1, 2, *range(10, 16)]


def test_growing_keeps_rows_and_states() -> None:
    spec = DynamicSpec("t", DIM)
    batches = [[list(range(n))] for n in (3, 60, 61, 500, 2_000)]
    compare(spec, 1, batches)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_steps_of_parts_clipped_over_all_tables_equal_a_dense_model(world: int, kind: str) -> None:
    plan = Plan(
        (Table("p", 9, 4), Table("q", 30, 3)),
        (Lookup("p", "p"), Lookup("q", "q")),
        (*blocks_for(Table("p", 9, 4), "data_parallel", world), *blocks_for(Table("q", 30, 3), "row_wise", world)),
        world,
    )
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

    by_rank = run_ranks(world, rank_main)
    start = by_rank[0][0]
    dense = {n: torch.nn.Parameter(t.clone()) for n, t in zip("pqt", (start[0][:9], start[1], start[2]), strict=True)}
    optimizer = DenseOptimizer(dense, conf)
    norms = []
    for step in range(6):
        for codes, numbers in (draw(step, part, rank) for part in range(2) for rank in range(world)):
            lookups = zip(dense.values(), (codes[:, 0], codes[:, 1], numbers), strict=True)
            loss_of([embedding(i, d, sparse=True) for d, i in lookups]).backward()
        grads = [d.grad.coalesce().values().square().sum() for d in dense.values() if d.grad is not None]
        norms.append(float(sum(grads)) ** 0.5)
        optimizer.step()
    assert min(norms) < limit < max(norms)  # some steps are clipped
    for _, got in by_rank:
        for table, expected in zip((got[0][:9], got[1], got[2]), dense.values(), strict=True):
            torch.testing.assert_close(table, expected.detach(), rtol=1e-4, atol=1e-5)
