"""Tables larger than the card: as if all rows were there, with the hits that a cache of sets counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headrace.embeddings.duplicates import find_duplicates
from headrace.embeddings.gpu import dispatch
from headrace.embeddings.gpu.cache import CachedTable
from tests.gpu.conftest import DEVICE

ROWS, DIM = 400, 4


def zipf(batches: int, size: int, seed: int, rows: int = ROWS) -> list[torch.Tensor]:
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
        lacking = len(self.seen) + len(new) - self.capacity
        if lacking > 0:
            old = [i for i in self.seen if self.last[i] < self.batch]
            worth = (lambda i: (self.seen[i], self.last[i], -i)) if self.rule == "lfu" else (
                lambda i: (self.last[i], self.seen[i], -i))  # fmt: skip
            for i in sorted(old, key=worth)[: max(lacking, int(self.share * self.capacity))]:
                del self.seen[i], self.last[i]
        for i, n in new.items():
            self.seen[i], self.last[i] = n, self.batch


@pytest.mark.parametrize("rule", ["lfu", "lru"])
def test_hits_are_those_of_a_cache_of_sets(rule: Any, kernels_everywhere: dict[str, int]) -> None:
    table = CachedTable(torch.zeros(ROWS, DIM), 60, DEVICE, evict=rule, evict_share=0.1)
    expected, given = Sets(60, rule, 0.1), zipf(25, 50, 3)
    for ids in given:
        table.look_up(ids.to(DEVICE))
        expected.take(ids.tolist())
    assert table.hit_rate == expected.hits / (25 * 50)
    assert 0.3 < expected.hits / (25 * 50) < 0.95
    held = table._row_at[table._row_at >= 0].tolist()
    assert sorted(held) == sorted(expected.seen)


def test_in_the_long_run_the_most_popular_rows_are_here(kernels_everywhere: dict[str, int]) -> None:
    """Under Zipf's law no cache of C rows hits more than the share of the C most popular; lfu comes near it."""
    capacity, p = 80, 1 / (1.0 + np.arange(ROWS))
    table = CachedTable(torch.zeros(ROWS, 1), capacity, DEVICE, evict_share=0.0)
    rng = np.random.default_rng(5)

    def take(count: int) -> None:
        for _ in range(count):
            ids = torch.from_numpy(rng.choice(ROWS, 16, p=p / p.sum())).to(DEVICE)
            found = find_duplicates(ids)
            table.bring(found.unique, torch.bincount(found.group))

    take(400)
    table.forget_hits()
    take(200)
    most = p[:capacity].sum() / p.sum()
    assert table.hit_rate is not None
    assert most - 0.1 < table.hit_rate < most + 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_is_as_if_all_rows_were_here(dtype: torch.dtype, kernels_everywhere: dict[str, int]) -> None:
    torch.manual_seed(0)
    start = torch.randn(ROWS, DIM).to(dtype)
    table = CachedTable(start.clone(), 45, DEVICE)
    whole, state = start.clone().to(DEVICE), torch.zeros(ROWS, 1, device=DEVICE)
    for ids in zipf(6, 40, 4):
        ids = ids.to(DEVICE)
        found, grad = find_duplicates(ids), torch.randn(10, DIM, device=DEVICE)
        starts, bag = torch.arange(0, 40, 4, device=DEVICE), torch.arange(40, device=DEVICE) // 4
        wanted = dispatch.pool_sum(whole, ids, 10, starts)
        assert torch.equal(table.look_up(ids, 10, starts), wanted)
        table.step(grad, 0.1, bag=bag)
        if dtype is torch.float32:
            dispatch.kernels().rowwise_adagrad(
                whole, state, found.unique, found.starts, found.order, grad, lr=0.1, bag=bag
            )
        else:  # rounding by chance draws by place, and rows are in other places here: what is on the host is the truth
            table.flush()
            whole, state = table.host[0].to(DEVICE, copy=True), table.host[1].to(DEVICE, copy=True)
    table.flush()
    assert torch.equal(table.host[0], whole.cpu())
    assert torch.equal(table.host[1], state.cpu())
    assert not torch.equal(table.host[0], start)
    assert table.hit_rate is not None
    assert 0 < table.hit_rate < 1


def test_a_batch_that_does_not_fit_is_refused(kernels_everywhere: dict[str, int]) -> None:
    table = CachedTable(torch.zeros(ROWS, DIM), 8, DEVICE)
    with pytest.raises(ValueError, match="9 distinct rows and a cache of 8"):
        table.look_up(torch.arange(9, device=DEVICE))
    table.look_up(torch.arange(8, device=DEVICE))
    with pytest.raises(ValueError, match="a cache of 0 rows"):
        CachedTable(torch.zeros(2, 2), 0, DEVICE)
    with pytest.raises(RuntimeError, match="look_up comes before step"):
        CachedTable(torch.zeros(2, 2), 1, DEVICE).step(torch.zeros(1, 2), 0.1)
