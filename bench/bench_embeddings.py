"""The embedding step alone: lookup, pooling, gradient, row-wise Adagrad, beside its floor and its peers.

    make bench-embeddings

- step: one rank, four tables of 1 M x 64, 8,192 samples of 4 ids a table, uniform ids (every row a cache miss) and
  Zipf(1.05). Floor: torch.index_select of the same rows of one matrix into memory that is there already. Peers, in the
  same run, in turns: torch.nn.EmbeddingBag with sparse gradients and torch.optim.Adagrad, and FBGEMM's CPU operator
  with EXACT_ROWWISE_ADAGRAD, where `make bench-peers` has installed it (build/peers/fbgemm).
- bytes: one to four ranks (threads, which count what they say to others) beside the planner's figure, and what TorchRec
  sends for the same step (computed from its scheme, see `torchrec_bytes`; it is not run).
- memory: two processes, each with half of a table; peak growth of each beside the planner's figure.

Ratios are of times where less is better. Every figure is the best of several turns.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.report import Figure, publish
from headrace.config import EmbeddingOptimizer, Sharding
from headrace.embeddings.collective import LocalCollective
from headrace.embeddings.collective_threads import ThreadCollective, run_ranks
from headrace.embeddings.cost import Workload, plan_load
from headrace.embeddings.plan import Lookup, Plan, Table, row_wise
from headrace.embeddings.sharded import ShardedEmbeddings
from headrace.workspace import checkout

TABLES, ROWS, DIM, BATCH, IDS = 4, 1_000_000, 64, 8_192, 4
TURNS = 12
OPTIMIZER = EmbeddingOptimizer(kind="rowwise_adagrad", learning_rate=0.01)
#: Page faults of fresh memory cost more than the work: the same settings for all (glibc).
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "8589934592", "MALLOC_TOP_PAD_": "268435456"}


def draw(ids: str, batch: int, seed: int) -> Tensor:
    """Codes int64 [batch, TABLES * IDS], none 0 (which pads)."""
    rng = np.random.default_rng(seed)
    if ids == "uniform":
        return torch.from_numpy(rng.integers(1, ROWS, (batch, TABLES * IDS)))
    edges = np.cumsum(np.arange(1, ROWS + 1) ** -1.05)
    found = np.searchsorted(edges / edges[-1], rng.random((batch, TABLES * IDS)))
    return torch.from_numpy(found.clip(1, ROWS - 1))


def spec() -> tuple[list[Table], list[Lookup]]:
    tables = [Table(f"t{i}", ROWS, DIM) for i in range(TABLES)]
    return tables, [Lookup(t.name, t.name, IDS, True) for t in tables]


def best(turns: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each, the best of several turns; all take their turns one after the other."""
    found = {name: float("inf") for name in turns}
    for _ in range(TURNS):
        for name, work in turns.items():
            began = time.perf_counter()
            work()
            found[name] = min(found[name], time.perf_counter() - began)
    return found


class Torch:
    """nn.EmbeddingBag a table, sparse gradients."""

    def __init__(self) -> None:
        self.bags = [torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True) for _ in range(TABLES)]
        self.optimizer = torch.optim.Adagrad([b.weight for b in self.bags], lr=0.01)

    def forward(self, codes: Tensor) -> Tensor:
        return torch.stack([b(codes[:, i * IDS : (i + 1) * IDS]) for i, b in enumerate(self.bags)], dim=1)

    def step(self, codes: Tensor, gradient: Tensor) -> None:
        self.optimizer.zero_grad()
        self.forward(codes).backward(gradient)
        self.optimizer.step()


def fbgemm() -> Any:
    """FBGEMM's table-batched operator; None where it is not installed."""
    peers = checkout() / "build" / "peers" / "fbgemm"
    if not (peers / "fbgemm_gpu").is_dir():
        return None
    sys.path.insert(0, str(peers))
    from fbgemm_gpu.split_embedding_configs import EmbOptimType  # type: ignore[import-not-found]
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (  # type: ignore[import-not-found]
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # type: ignore[import-not-found]
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)] * TABLES, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01, pooling_mode=PoolingMode.SUM,
    )  # fmt: skip
    module.init_embedding_weights_uniform(-0.05, 0.05)
    return module


def step_figures() -> list[Figure]:
    tables, lookups = spec()
    ours = ShardedEmbeddings(row_wise(tables, lookups, 1), LocalCollective(), seed=1)
    ours.configure_optimizer(OPTIMIZER)
    plain, other = Torch(), fbgemm()
    gradient = torch.randn(BATCH, TABLES, DIM)
    figures = []
    for ids in ("uniform", "zipf"):
        codes = draw(ids, BATCH, 0)
        offset = torch.arange(TABLES).repeat_interleave(IDS) * ROWS
        flat = (codes + offset).reshape(-1)
        room = torch.empty(flat.numel(), DIM)
        # FBGEMM: feature by feature, and offsets.
        values = codes.view(BATCH, TABLES, IDS).transpose(0, 1).reshape(-1).contiguous()
        offsets = torch.arange(0, values.numel() + 1, IDS)
        flat_gradient = gradient.view(BATCH, TABLES * DIM)

        def train_ours(codes: Tensor = codes) -> None:
            ours(codes).backward(gradient)
            ours.step()

        def look_up(codes: Tensor = codes) -> None:
            with torch.no_grad():
                ours(codes)

        def look_up_plain(codes: Tensor = codes) -> None:
            with torch.no_grad():
                plain.forward(codes)

        turns: dict[str, Callable[[], object]] = {
            "floor": lambda flat=flat, room=room: torch.index_select(ours.weight, 0, flat, out=room),
            "forward": look_up, "step": train_ours, "torch forward": look_up_plain,
            "torch step": lambda codes=codes: plain.step(codes, gradient),
        }  # fmt: skip
        if other is not None:

            def look_up_other(values: Tensor = values, offsets: Tensor = offsets) -> None:
                with torch.no_grad():
                    other(values, offsets)

            turns["fbgemm forward"] = look_up_other
            turns["fbgemm step"] = lambda v=values, o=offsets, g=flat_gradient: other(v, o).backward(g)
            # The same start, the same answer.
            with torch.no_grad():
                for i, w in enumerate(other.split_embedding_weights()):
                    w.copy_(ours.weight[i * ROWS : (i + 1) * ROWS])
                torch.testing.assert_close(other(values, offsets).view(BATCH, TABLES, DIM), ours(codes))
        seconds = best(turns)
        for what in ("forward", "step"):
            for peer in ("torch", "fbgemm"):
                if f"{peer} {what}" in seconds:
                    figures.append(
                        Figure(f"{what}, {ids} ids (peer: {peer})", seconds[what] * 1e3, "ms", seconds["floor"] * 1e3,
                               seconds[f"{peer} {what}"] * 1e3)
                    )  # fmt: skip
    return figures


class Counting(ThreadCollective):
    """A thread that counts the bytes it sends to others."""

    def __init__(self, inner: ThreadCollective) -> None:
        super().__init__(inner._meeting, inner.world.rank)
        self.sent = 0

    def all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        row = x.element_size() * int(np.prod(x.shape[1:]))
        self.sent += (sum(send_rows) - send_rows[self.world.rank]) * row
        return super().all_to_all(x, send_rows)


def torchrec_bytes(world: int, ids: int) -> dict[str, float]:
    """What TorchRec sends from a rank in one step, by its published scheme, without a cast of what it sends.

    Ids of 8 bytes and lengths of 4 go to the owners. Whole tables: pooled vectors come back, their gradients go. By
    rows: every owner has a partial sum of every sample, reduced and scattered; gradients are gathered by all.
    """
    away = (world - 1) / world
    pooled = BATCH * TABLES * DIM * 4
    sent_ids = BATCH * TABLES * ids * 8 * away
    return {
        "whole tables": sent_ids + BATCH * TABLES * 4 * away + 2 * pooled * away,
        "by rows": sent_ids + BATCH * TABLES * 4 * (world - 1) + 2 * pooled * (world - 1),
    }


def byte_figures() -> list[Figure]:
    """Weak scaling: BATCH samples a rank."""
    figures = []
    for ids in (1, IDS):
        tables = [Table(f"t{i}", ROWS, DIM) for i in range(TABLES)]
        lookups = [Lookup(t.name, t.name, ids, ids > 1) for t in tables]
        for world in (1, 2, 3, 4):
            plan = row_wise(tables, lookups, world)
            settings = Sharding(zipf=1.05)
            work = Workload(tuple(tables), tuple(lookups), world, BATCH * world, OPTIMIZER.kind, settings)
            planned = float(plan_load(work, plan).sent.mean())

            def rank_main(c: ThreadCollective, plan: Plan = plan, ids: int = ids) -> int:
                counting = Counting(c)
                ours = ShardedEmbeddings(plan, counting, seed=1)
                ours.configure_optimizer(EmbeddingOptimizer(kind="sgd", learning_rate=0.01))
                ours(draw("zipf", BATCH, 10 + c.world.rank)[:, : TABLES * ids]).sum().backward()
                ours.step()
                return counting.sent

            measured = float(np.mean(run_ranks(world, rank_main)))
            for scheme, theirs in torchrec_bytes(world, ids).items():
                name = f"sent by a rank of {world}, {ids} id(s), Zipf (floor: planned; peer: TorchRec, {scheme})"
                figures.append(Figure(name, measured / 1e6, "MB", planned / 1e6 or None, theirs / 1e6 or None))
    return figures


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith(key))


def _memory_rank(rank: int, size: int, meeting: Path, rows: int, answers: Any) -> None:
    import torch.distributed as dist

    from headrace.embeddings.collective_torch import TorchCollective

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    collective = TorchCollective()
    tables, lookups = [Table("t", rows, DIM)], [Lookup("t", "t", IDS, True)]
    before = _resident("VmRSS")
    ours = ShardedEmbeddings(row_wise(tables, lookups, size), collective, seed=1)
    ours.configure_optimizer(OPTIMIZER)
    for step in range(3):
        rng = np.random.default_rng([rank, step])
        ours(torch.from_numpy(rng.integers(1, rows, (BATCH, IDS)))).sum().backward()
        ours.step()
    answers.put((rank, _resident("VmHWM") - before))
    dist.barrier()
    dist.destroy_process_group()


def memory_figures(size: int = 2, rows: int = 10_000_000) -> list[Figure]:
    """Peak growth of each rank's memory, every rank a process of its own."""
    settings = Sharding(zipf=0.0)
    tables, lookups = (Table("t", rows, DIM),), (Lookup("t", "t", IDS, True),)
    work = Workload(tables, lookups, size, BATCH * size, OPTIMIZER.kind, settings)
    load = plan_load(work, row_wise(tables, lookups, size))
    meeting = checkout() / "build" / "bench" / f"meeting-{os.getpid()}"
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [
        context.Process(target=_memory_rank, args=(r, size, meeting, rows, answers)) for r in range(size)
    ]  # fmt: skip
    for r in ranks:
        r.start()
    peaks = dict(answers.get(timeout=300) for _ in ranks)
    for r in ranks:
        r.join()
    meeting.unlink(missing_ok=True)
    whole = rows * (DIM * 4 + 4)
    return [
        Figure(f"peak memory of rank {r} of {size} (floor: planned, peer: replicated)", peaks[r] / 2**20, "MiB",
               float(load.memory[r] + load.buffers[r]) / 2**20, whole / 2**20)
        for r in range(size)
    ]  # fmt: skip


def main() -> None:
    if os.environ.get("MALLOC_TOP_PAD_") != MALLOC["MALLOC_TOP_PAD_"]:  # glibc reads it at the start of a process
        sys.exit(
            subprocess.run([sys.executable, "-m", "bench.bench_embeddings"], env={**os.environ, **MALLOC}).returncode
        )
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    figures = step_figures() + byte_figures()
    # In a process with the plain allocator: it gives freed memory back, and a peak is a peak.
    plain = {k: v for k, v in os.environ.items() if k not in MALLOC}
    code = "import json; from bench.bench_embeddings import memory_figures; from dataclasses import asdict;"
    code += "print(json.dumps([asdict(f) for f in memory_figures()]))"
    answer = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True, check=True).stdout
    figures += [Figure(**f) for f in json.loads(answer.splitlines()[-1])]
    publish("embeddings", figures)


if __name__ == "__main__":
    main()
