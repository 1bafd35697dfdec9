"""Exchanges between ranks: bytes of a step of embeddings, and what messages cost by host and directly.

    python -m bench.embeddings_exchange     # four ranks on two hosts: build/bench/exchange-by-host.json

Bytes that ranks send each other in a step of the embeddings (a part of `make bench-embeddings`), beside the planner's
figure and TorchRec:

- any world: threads that count what they say to others.
- two gloo processes: bytes and time of a step, counted at torch.distributed's functions on both sides, with the same
  ids; TorchRec by tables and by rows, where `make bench-peers` has installed it.

By host: four ranks on two hosts, those of a host through shared memory; beside Horovod alone. All-to-alls, and steps of
embeddings whose messages go directly or by machines. Both hosts are this machine, and what goes between them goes over
loopback, so nothing is said of a network's speed: the figure is what messages cost the machine. In turns, medians.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.peers.torchrec_step import Meter, TrainingStep, draw_ids, is_installed, run_torchrec
from bench.report import Figure, publish
from headrace.comm.base import Collective, ThreadCollective, run_ranks
from headrace.config import EmbeddingOptimizer, Sharding
from headrace.config.installation import checkout
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.planner.cost import plan_load
from headrace.embeddings.planner.search import Planned, plan_tables
from headrace.embeddings.sharding_plan import Lookup, Plan, Table, blocks_for

OPTIMIZER = EmbeddingOptimizer(kind="rowwise_adagrad", learning_rate=0.01)
#: A machine of CPUs: the planner's choice between rows and sums follows from it.
CPUS = {"memory_gbps": 10.0, "node_gbps": 1.0, "network_gbps": 1.0, "latency_us": 100.0}


def planned_for(step: TrainingStep, kind: str = "auto", wire: str = "fp32") -> Planned:
    """Return the plan of a step: by the cost model, or all by rows."""
    tables = [Table(f"t{i}", rows, step.dim) for i, rows in enumerate(step.rows)]
    lookups = [Lookup(t.name, t.name, step.ids, True) for t in tables]
    settings = Sharding.model_validate({"kind": kind, "wire": wire, "zipf": step.zipf, **CPUS})
    return plan_tables(
        tables, lookups, step.world, batch_size=step.batch * step.world, optimizer=OPTIMIZER.kind, settings=settings
    )


class Counting(ThreadCollective):
    """A thread that counts the bytes it sends to others."""

    def __init__(self, inner: ThreadCollective) -> None:
        super().__init__(inner._rendezvous, inner.world.rank)
        self.sent = 0

    def all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        row = x.element_size() * int(np.prod(x.shape[1:]))
        self.sent += (sum(send_rows) - send_rows[self.world.rank]) * row
        return super().all_to_all(x, send_rows)


def thread_figures(step: TrainingStep) -> list[Figure]:
    """Measure weak scaling: as many samples on each rank of 1 to 4."""
    figures = []
    for world in (1, 2, 3, 4):
        plans = {k: planned_for(TrainingStep(**{**vars(step), "world": world}), k) for k in ("row_wise", "auto")}
        if plans["auto"].plan == plans["row_wise"].plan:
            del plans["auto"]
        for planned in plans.values():

            def rank_main(c: ThreadCollective, plan: Plan = planned.plan) -> int:
                counting = Counting(c)
                embeddings = ShardedEmbeddings(plan, counting, seed=1)
                embeddings.configure_optimizer(EmbeddingOptimizer(kind="sgd", learning_rate=0.01))
                embeddings(torch.from_numpy(draw_ids(step, c.world.rank, 0)).flatten(1)).sum().backward()
                embeddings.step()
                return counting.sent

            measured = float(np.mean(run_ranks(world, rank_main)))
            expected = float(plan_load(planned.work, planned.plan).sent.mean())
            name = f"sent by a rank of {world}, {step.ids} id(s), Zipf, {how(planned.plan)} (floor: planned)"
            figures.append(Figure(name, measured / 1e6, "MB", expected / 1e6 or None))
    return figures


def how(plan: Plan) -> str:
    """Return the kinds of a plan in words."""
    kinds = {
        plan.kind_of(t.name).replace("_", "-") + (", sums" if plan.blocks_of(t.name)[0].pooled else "")
        for t in plan.tables
    }
    return " and ".join(sorted(kinds))


def _rank(rank: int, step: TrainingStep, plan: Plan, meeting: Path, answers: Any) -> None:
    import torch.distributed as dist

    from headrace.comm.torch_dist import TorchCollective

    torch.set_num_threads(step.threads)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=step.world)
    meter = Meter(dist, step.world, rank)
    embeddings = ShardedEmbeddings(plan, TorchCollective(), seed=1)
    embeddings.configure_optimizer(OPTIMIZER)
    batches = [torch.from_numpy(draw_ids(step, rank, n)).flatten(1) for n in range(step.batches)]
    gradient = torch.randn(step.batch, len(step.rows), step.dim, generator=torch.Generator().manual_seed(rank))

    def once(number: int) -> None:
        embeddings(batches[number % step.batches]).backward(gradient)
        embeddings.step()

    once(0)
    meter.sent, seconds = 0.0, []
    for number in range(step.steps):
        dist.barrier()
        start = time.perf_counter()
        once(number)
        seconds.append(time.perf_counter() - start)
    answers.put((rank, seconds, meter.sent / step.steps))
    dist.barrier()
    dist.destroy_process_group()


def run_headrace(step: TrainingStep, plan: Plan) -> tuple[list[float], float]:
    """Measure (seconds of each step of the slower rank, bytes that a rank sends in a step) on gloo processes."""
    meeting = checkout() / "build" / "bench" / "meeting-bytes"
    meeting.parent.mkdir(parents=True, exist_ok=True)
    meeting.unlink(missing_ok=True)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, step, plan, meeting, answers)) for r in range(step.world)]
    for r in ranks:
        r.start()
    reports = [answers.get(timeout=300) for _ in ranks]
    for r in ranks:
        r.join()
    meeting.unlink(missing_ok=True)
    seconds = [max(times) for times in zip(*(f[1] for f in reports), strict=True)]
    return seconds[len(seconds) // 4 :], sum(f[2] for f in reports) / len(reports)


def gloo_figures(step: TrainingStep) -> list[Figure]:
    """Measure bytes and the best time of a step on two processes, beside TorchRec's."""
    peers: dict[str, Any] = {}
    if is_installed():
        for sharding in ("table_wise", "row_wise"):
            peers[sharding] = run_torchrec(TrainingStep(**{**vars(step), "sharding": sharding}))
    figures = []
    done = []
    for kind, wire in (("auto", "fp32"), ("auto", "bf16"), ("row_wise", "fp32")):
        planned = planned_for(step, kind, wire)
        if planned.plan in done:
            continue
        done.append(planned.plan)
        seconds, sent = run_headrace(step, planned.plan)
        label = f"{step.world} gloo ranks, {step.ids} id(s), Zipf, {how(planned.plan)}" + f", {wire}" * (wire != "fp32")
        expected = float(planned.load.sent.mean())
        for sharding in peers or {"": None}:
            peer = peers.get(sharding)
            peer_note = f"; peer: TorchRec, {sharding}" if peer else ""
            figures.append(
                Figure(
                    f"sent, {label} (floor: planned{peer_note})",
                    sent / 1e6,
                    "MB",
                    expected / 1e6,
                    peer.sent_embeddings / 1e6 if peer else None,
                )
            )
            if peer:
                figures.append(
                    Figure(
                        f"step, {label} (peer: TorchRec, {sharding})",
                        min(seconds) * 1e3,
                        "ms",
                        None,
                        min(peer.seconds) * 1e3,
                    )
                )
    return figures


def byte_figures(rows: Sequence[int], dim: int, batch: int) -> list[Figure]:
    """Measure all of them, with one id and with four in each feature."""
    figures = []
    for ids in (1, 4):
        step = TrainingStep(rows=tuple(rows), ids=ids, dim=dim, batch=batch)
        figures += thread_figures(step) + gloo_figures(step)
    return figures


#: Rows of 16 float32 to each rank.
_MESSAGE_ROWS = (1_000, 20_000, 200_000)
#: Of the embeddings: tables, their rows and width; rows of a rank's batch.
_TABLES, _TABLE_ROWS, _WIDTH, _BATCH = 8, 50_000, 32, 2_048
_TURNS, _WARM_UP = 25, 5
_BY_HOST, _PLAIN = "by host", "Horovod alone"


def _embedding_step(c: Collective, ranks_per_node: int) -> Callable[[], None]:
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


def _host_rank() -> dict[str, dict[str, float]]:
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
        work[f"step of embeddings, messages {how}"] = {w: _embedding_step(c, ranks_per_node) for w, c in ways.items()}
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
    import horovod

    hosts = "localhost:2,127.0.0.1:2"
    ranks = horovod.run(_host_rank, num_proc=4, hosts=hosts, use_gloo=True, executable=sys.executable)
    slowest = {action: {way: max(r[action][way] for r in ranks) for way in ways} for action, ways in ranks[0].items()}
    publish("exchange-by-host", [Figure(action, ms[_BY_HOST], "ms", peer=ms[_PLAIN]) for action, ms in slowest.items()])


if __name__ == "__main__":
    from bench.embeddings_exchange import main as importable

    importable()
