"""Four ranks on two hosts, those of a host through shared memory; beside Horovod alone.

    python -m bench.exchange_by_host

All-to-alls, and steps of embeddings whose messages go directly or by machines. Both hosts are this machine, and what
goes between them goes over loopback, so nothing is said of a network's speed: the figure is what messages cost the
machine. In turns, medians. Writes build/bench/exchange-by-host.json.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import horovod
import torch

from bench.report import Figure, publish
from headrace.comm.base import Collective
from headrace.config import EmbeddingOptimizer
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.sharding_plan import Lookup, Plan, Table, blocks_for

#: Rows of 16 float32 to each rank.
_MESSAGE_ROWS = (1_000, 20_000, 200_000)
#: Of the embeddings: tables, their rows and width; rows of a rank's batch.
_TABLES, _TABLE_ROWS, _WIDTH, _BATCH = 8, 50_000, 32, 2_048
_TURNS, _WARM_UP = 25, 5
_BY_HOST, _PLAIN = "by host", "Horovod alone"


def _step(c: Collective, ranks_per_node: int) -> Callable[[], None]:
    tables = tuple(Table(f"t{i}", _TABLE_ROWS, _WIDTH) for i in range(_TABLES))
    blocks = tuple(b for t in tables for b in blocks_for(t, "row_wise", c.world.size))
    lookups = tuple(Lookup(t.name, t.name) for t in tables)
    embeddings = ShardedEmbeddings(Plan(tables, lookups, blocks, c.world.size, "fp32", ranks_per_node), c, seed=1)
    embeddings.configure_optimizer(EmbeddingOptimizer(kind="rowwise_adagrad", learning_rate=0.1))
    generator = torch.Generator().manual_seed(c.world.rank)

    def run() -> None:
        # Popular ids, as clicks have them: many ranks need the same rows.
        codes = (torch.rand(_BATCH, _TABLES, generator=generator) ** 4 * _TABLE_ROWS).to(torch.int64)
        torch.stack([out.sum() for out in embeddings.features(codes)]).sum().backward()
        embeddings.step()

    return run


def _message(c: Collective, rows: int) -> Callable[[], None]:
    x, send = torch.zeros(rows * c.world.size, 16), [rows] * c.world.size
    return lambda: (c.all_to_all(x, send), None)[1]


def _rank() -> dict[str, dict[str, float]]:
    """Measure milliseconds by action and by way of exchange: medians of this rank."""
    import horovod.torch as hvd

    from headrace.comm.horovod_collective import HorovodCollective
    from headrace.comm.shared_memory import ByHostCollective, shared

    torch.set_num_threads(1)
    hvd.init()
    plain = HorovodCollective()
    by_host = shared(plain)
    assert isinstance(by_host, ByHostCollective)
    ways: dict[str, Collective] = {_BY_HOST: by_host, _PLAIN: plain}
    work = {
        f"all-to-all, {n * 64 / 1e6:g} MB to each rank": {w: _message(c, n) for w, c in ways.items()}
        for n in _MESSAGE_ROWS
    }
    for ranks_per_node, how in ((1, "directly"), (2, "by machines")):
        work[f"step of embeddings, messages {how}"] = {w: _step(c, ranks_per_node) for w, c in ways.items()}
    results = {}
    for action, each in work.items():
        ticks: dict[str, list[float]] = {way: [] for way in each}
        for _ in range(_TURNS):
            for way, run in each.items():
                plain.barrier()
                tick = time.perf_counter()
                run()
                ticks[way].append(1e3 * (time.perf_counter() - tick))
        results[action] = {way: median(t[_WARM_UP:]) for way, t in ticks.items()}
    plain.barrier()
    by_host.close()
    hvd.shutdown()
    return results


def main() -> None:
    """Start the ranks, and say what the slowest of them measured."""
    hosts = "localhost:2,127.0.0.1:2"
    ranks = horovod.run(_rank, num_proc=4, hosts=hosts, use_gloo=True, executable=sys.executable)
    slowest = {action: {way: max(r[action][way] for r in ranks) for way in ways} for action, ways in ranks[0].items()}
    publish("exchange-by-host", [Figure(action, ms[_BY_HOST], "ms", peer=ms[_PLAIN]) for action, ms in slowest.items()])


if __name__ == "__main__":
    from bench.exchange_by_host import main as importable

    importable()
