"""Tables of raw ids, and tables larger than the card: the hash table's speed, the cache's hits."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.gpu.clock import Clock, Row
from bench.gpu.data import DIM, EXPONENT, batches
from headrace.embeddings.kernels import gpu
from headrace.embeddings.kernels.duplicates import find_duplicates
from headrace.embeddings.kernels.gpu import DeviceMap
from headrace.embeddings.storage import RowCache

#: Share of the rows that the card holds.
HELD = 0.1


def map_rows(clock: Clock, ids: int) -> Iterator[Row]:
    """Measure a map that grows by half as many ids as it has, and lookups of all."""
    device = torch.device(clock.device)
    torch.manual_seed(0)
    unique_ids = torch.unique(torch.randint(-(2**62), 2**62, (ids,), device=device))
    half = len(unique_ids) // 2

    def grow(_: int) -> None:
        device_map = DeviceMap(device, unique_ids[:half])
        device_map.add(unique_ids[half:])

    seconds = clock.seconds(grow)
    yield {"what": f"map: insert {len(unique_ids)} ids", "value": len(unique_ids) / seconds / 1e6, "unit": "M ids/s"}
    device_map = DeviceMap(device, unique_ids)
    seconds = clock.seconds(lambda _: device_map.find(unique_ids))
    yield {"what": f"map: find {len(unique_ids)} ids", "value": len(unique_ids) / seconds / 1e6, "unit": "M ids/s"}


def cache_rows(clock: Clock, rows: int, batch: int) -> Iterator[Row]:
    """Measure lookups and steps under Zipf's law of a table in host memory, a tenth of it on the card."""
    host = torch.zeros(rows, DIM, pin_memory=clock.device == "cuda")
    sums = torch.zeros(rows, 1, pin_memory=clock.device == "cuda")
    table = RowCache([host, sums], max(64, int(HELD * rows)), clock.device)
    addresses = [b.addresses for b in batches("zipf", [rows], batch, 24, clock.device)]
    grad = torch.randn(batch, DIM, device=clock.device)

    def step(repeat: int) -> None:
        distinct = find_duplicates(addresses[repeat % len(addresses)])
        vectors = table.look_up(distinct, admit=True)
        gpu.pool_sum(vectors, distinct.inverse(), batch)
        cached = table.acquire(distinct.unique)
        weight, state = cached.matrices
        gpu.rowwise_adagrad(weight, state, cached.slots, distinct.starts, distinct.order, grad, lr=0.01)
        table.commit(cached)

    for repeat in range(12 if clock.device == "cuda" else 1):
        step(repeat)
    table.forget_hits()
    seconds = clock.seconds(lambda repeat: step(12 + repeat))
    ids = torch.arange(1, rows + 1, dtype=torch.float64)
    popular = ids.pow_(-EXPONENT)
    most = float(popular[: table.capacity].sum() / popular.sum())
    yield {
        "what": f"cached table, zipf, {batch}",
        "value": batch / seconds / 1e6,
        "unit": "M lookups/s",
        "hit rate": float(table.counts[0].sum() / table.counts[1].sum()),
        "at most": most,
    }
