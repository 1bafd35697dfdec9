"""Tables larger than the card: as if all rows were there, with the hits that a cache of sets counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.comm.base import Collective, LocalCollective, run_ranks
from headrace.config import EmbeddingOptimizer
from headrace.embeddings.checkpoint.changes import apply_changes, save_changes
from headrace.embeddings.checkpoint.files import write_index
from headrace.embeddings.checkpoint.shards import load_shards, save_shards
from headrace.embeddings.kernels.dispatch import find_duplicates
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.lookup.local_tables import cache_use
from headrace.embeddings.planner.cost import CACHE_INDEX_BYTES, CACHE_SLOT_BYTES
from headrace.embeddings.sharding_plan import Lookup, Table, row_wise
from headrace.embeddings.storage import RowCache
from headrace.storage import local
from tests.gpu.conftest import DEVICE

ROWS, DIM = 400, 4


def zipf(batches: int, size: int, seed: int, rows: int = ROWS) -> list[Tensor]:
    """Row k with a probability in proportion to 1 / (k + 1)."""
    rng = np.random.default_rng(seed)
    p = 1 / (1.0 + np.arange(rows))
    return [torch.from_numpy(rng.choice(rows, size, p=p / p.sum())) for _ in range(batches)]


class Sets:
    """The same cache, one row at a time."""

    def __init__(self, capacity: int, rule: str, share: float) -> None:
        self.capacity, self.rule, self.share = capacity, rule, share
        self.seen: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.batch = self.hits = 0

    def take(self, ids: list[int]) -> None:
        self.batch += 1
        new: dict[int, int] = {}
        for i in ids:
            if i in self.seen and i not in new:
                self.hits += 1
                self.seen[i] += 1
                self.last[i] = self.batch
            else:
                new[i] = new.get(i, 0) + 1
        shortage = len(self.seen) + len(new) - self.capacity
        if shortage > 0:
            old = [i for i in self.seen if self.last[i] < self.batch]
            worth = (
                (lambda i: (self.seen[i], self.last[i], -i))
                if self.rule == "lfu"
                else (lambda i: (self.last[i], self.seen[i], -i))
            )
            for i in sorted(old, key=worth)[: max(shortage, int(self.share * self.capacity))]:
                del self.seen[i], self.last[i]
        for i, n in new.items():
            self.seen[i], self.last[i] = n, self.batch


@pytest.mark.parametrize("rule", ["lfu", "lru"])
def test_hits_are_those_of_a_cache_of_sets(rule: Any) -> None:
    first = 30  # rows of two tables
    rows = RowCache([torch.zeros(ROWS, DIM)], 60, DEVICE, ends=[first, ROWS], evict=rule, evict_share=0.1)
    expected, batches, lookups, hits = Sets(60, rule, 0.1), zipf(25, 50, 3), 0, 0
    for ids in batches:
        lookups += int((ids < first).sum())
        hits += sum(i < first and i in expected.seen for i in ids.tolist())
        rows.look_up(find_duplicates(ids.to(DEVICE)), admit=True)
        expected.take(ids.tolist())
    assert rows.counts.tolist() == [[hits, expected.hits - hits], [lookups, 25 * 50 - lookups]]
    assert 0.3 < expected.hits / (25 * 50) < 0.95
    cached_rows = rows._row_in_slot[rows._row_in_slot >= 0].tolist()
    assert sorted(cached_rows) == sorted(expected.seen)


def test_in_the_long_run_the_most_popular_rows_are_here() -> None:
    """Under Zipf's law no cache of C rows hits more than the share of the C most popular; lfu comes near it."""
    capacity, p = 80, 1 / (1.0 + np.arange(ROWS))
    rows = RowCache([torch.zeros(ROWS, 1)], capacity, DEVICE, evict_share=0.0)
    rng = np.random.default_rng(5)

    def take(count: int) -> None:
        for _ in range(count):
            ids = torch.from_numpy(rng.choice(ROWS, 16, p=p / p.sum())).to(DEVICE)
            rows.look_up(find_duplicates(ids), admit=True)

    take(400)
    rows.forget_hits()
    take(200)
    (hits,), (lookups,) = rows.counts.tolist()
    most = p[:capacity].sum() / p.sum()
    assert most - 0.1 < hits / lookups < most + 0.03


def test_it_takes_what_is_planned_for_it() -> None:
    rows = RowCache([torch.zeros(ROWS, 8), torch.zeros(ROWS, 1)], 100, DEVICE)
    tensors = [rows._slot_of, rows._row_in_slot, rows._seen, rows._last, rows._dirty, *rows.on_device]
    assert sum(t.nbytes for t in tensors) == 100 * (8 * 4 + 4 + CACHE_SLOT_BYTES) + ROWS * CACHE_INDEX_BYTES
    with pytest.raises(ValueError, match="a cache of 0 rows"):
        RowCache([torch.zeros(2, 2)], 0, DEVICE)


# --- behind ShardedEmbeddings -----------------------------------------------------------------------------------------

TABLES = (Table("a", 60, DIM), Table("b", 24, DIM))
LOOKUPS = (Lookup("x", "a"), Lookup("y", "b", 3, True, "mean"), Lookup("z", "a", 2, True, "max"))


def make_embeddings(collective: Collective, share: float, storage: Any = "fp32", kind: Any = "rowwise_adagrad") -> Any:
    tables = tuple(replace(t, storage=storage, cached=share) for t in TABLES)
    embeddings = ShardedEmbeddings(row_wise(tables, LOOKUPS, collective.world.size), collective, 3, device=DEVICE)
    embeddings.configure_optimizer(EmbeddingOptimizer(kind=kind, learning_rate=0.1))
    return embeddings


def batch(rng: np.random.Generator) -> Any:
    return (rng.random((4, 6)) ** 3 * ([60] + [24] * 3 + [60] * 2)).astype(np.int64)


def trained(embeddings: Any, steps: int = 3, first: int = 0) -> list[Tensor]:
    """Two lookups a step, as with parts of a batch; then one without gradients, as in evaluation. Vectors."""
    rank, outs = embeddings.collective.world.rank, []
    for step in range(first, first + steps):
        rng = np.random.default_rng([step, rank])
        for _ in range(2):
            vectors = embeddings.features(torch.from_numpy(batch(rng)))
            sum(x.sin().sum() for x in vectors).backward()
            outs += [x.detach().cpu() for x in vectors]
        embeddings.step()
    embeddings.eval()
    with torch.no_grad():
        outs += [x.cpu() for x in embeddings.features(torch.arange(6).repeat(5, 1))]
    embeddings.train()
    return outs


#: With 2 % of the rows, a batch has more than there is room for.
@pytest.mark.parametrize(
    ("storage", "kind", "world", "share"),
    [("bf16", "rowwise_adagrad", 1, 0.2), ("int8", "adam", 1, 0.3), ("fp32", "rowwise_adagrad", 2, 0.02)],
)
def test_training_is_as_if_all_rows_were_here(
    storage: Any, kind: Any, world: int, share: float, kernels_everywhere: dict[str, int]
) -> None:
    """Bit for bit: vectors, rows, states; rows rounded by chance too."""

    def both(collective: Collective) -> None:
        cached, uncached = (make_embeddings(collective, s, storage, kind) for s in (share, 1.0))
        assert all(torch.equal(x, y) for x, y in zip(trained(cached), trained(uncached), strict=True))
        for e in (cached, uncached):
            e.age_state(0.5)
        cached.flush()
        assert cached.caches[0].capacity < len(cached.weight) / 2
        assert torch.equal(cached.weight, uncached.weight.cpu())
        assert cached.state.keys() == uncached.state.keys() != set()
        assert all(torch.equal(cached.state[n], uncached.state[n].cpu()) for n in uncached.state)
        use = cache_use(cached)
        assert use["a"].share == share
        assert 0 < use["a"].hits < use["a"].lookups or share < 0.1
        if world == 1:
            assert use["a"].lookups + use["b"].lookups == looked_up()
        assert cache_use(uncached) == {}

    run_ranks(world, both)


def looked_up() -> int:
    """Codes of `trained` but for zeros in lists, which are padding."""
    codes = np.concatenate([batch(rng) for step in range(3) for rng in [np.random.default_rng([step, 0])] * 2])
    return codes.size - int((codes[:, 1:] == 0).sum())


def test_saves_and_dumps_are_those_of_any_table(tmp_path: Path, kernels_everywhere: dict[str, int]) -> None:
    cached = make_embeddings(LocalCollective(), 0.3)
    trained(cached, 2)
    save_shards(cached.snapshot(), local(tmp_path / "save"), with_optimizer=True)
    write_index(local(tmp_path / "save"))
    twins = [make_embeddings(LocalCollective(), share) for share in (1.0, 0.5)]
    trained(twins[1], 1)  # what is on the device must not outlive the load
    for twin in twins:
        load_shards(twin, local(tmp_path / "save"), with_optimizer=True)
    cached.track_changes()
    outs = [trained(e, 2, first=2) for e in (cached, *twins)]
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(*outs, strict=True))
    save_changes(cached, local(tmp_path / "changes"))
    follower = make_embeddings(LocalCollective(), 0.5)
    load_shards(follower, local(tmp_path / "save"), with_optimizer=False)
    apply_changes(follower, local(tmp_path / "changes"))
    assert torch.equal(follower.weight, twins[0].weight.cpu())
