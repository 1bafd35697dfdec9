"""The embedding step alone: lookup, pooling, gradient, row-wise Adagrad, beside its floor and its peers.

    make bench-embeddings

- step: one rank, four tables of 1 M x 64, 8,192 samples of 4 ids a table, uniform ids (every row a cache miss) and
  Zipf(1.05). Floor: torch.index_select of the same rows of one matrix into memory that is there already. Peers, in the
  same run, in turns: torch.nn.EmbeddingBag with sparse gradients and torch.optim.Adagrad, and FBGEMM's CPU operator
  with EXACT_ROWWISE_ADAGRAD, where `make bench-peers` has installed it (build/peers/fbgemm). By name (an
  EmbeddingCollection, jagged ids), its vectors side by side and each feature's apart; peer: the same without names.
- bytes: bench.embeddings_bytes. - memory: bench.embeddings_memory.

Ratios are of times where less is better. Every figure is the best of several turns, but for the names' share of the
time: the median ratio of 80 pairs of turns, with and without names, each pair in the other order than the last.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.embeddings_bytes import byte_figures
from bench.report import Figure, publish
from headrace.comm.base import LocalCollective
from headrace.config import EmbeddingOptimizer
from headrace.embeddings import EmbeddingCollection, EmbeddingFeature, JaggedTensor
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.sharding_plan import Lookup, Table, row_wise
from headrace.workspace import checkout

TABLES, ROWS, DIM, BATCH, IDS = 4, 1_000_000, 64, 8_192, 4
TURNS = 12
PAIRS = 80
OPTIMIZER = EmbeddingOptimizer(kind="rowwise_adagrad", learning_rate=0.01)
#: Page faults of fresh memory cost more than the work: the same settings for all (glibc).
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "8589934592", "MALLOC_TOP_PAD_": "268435456"}


def draw(ids: str, batch: int, seed: int) -> Tensor:
    """Draw codes int64 [batch, TABLES * IDS], none 0 (which pads)."""
    rng = np.random.default_rng(seed)
    if ids == "uniform":
        return torch.from_numpy(rng.integers(1, ROWS, (batch, TABLES * IDS)))
    edges = np.cumsum(np.arange(1, ROWS + 1) ** -1.05)
    codes = np.searchsorted(edges / edges[-1], rng.random((batch, TABLES * IDS)))
    return torch.from_numpy(codes.clip(1, ROWS - 1))


def spec() -> tuple[list[Table], list[Lookup]]:
    tables = [Table(f"t{i}", ROWS, DIM) for i in range(TABLES)]
    return tables, [Lookup(t.name, t.name, IDS, True) for t in tables]


def best(turns: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Measure seconds of each, the best of several turns; all take their turns one after the other."""
    fastest = {name: float("inf") for name in turns}
    for _ in range(TURNS):
        for name, work in turns.items():
            start = time.perf_counter()
            work()
            fastest[name] = min(fastest[name], time.perf_counter() - start)
    return fastest


def median_ratio(work: Callable[[], object], peer: Callable[[], object]) -> float:
    """Measure seconds of the one over those of the other, the median of pairs of turns whose order alternates."""
    ratios = []
    for pair in range(PAIRS):
        seconds = {}
        for name, call in sorted({"work": work, "peer": peer}.items(), reverse=pair % 2 == 0):
            start = time.perf_counter()
            call()
            seconds[name] = time.perf_counter() - start
        ratios.append(seconds["work"] / seconds["peer"])
    return statistics.median(ratios)


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
    """Return FBGEMM's table-batched operator; None where it is not installed."""
    peers = checkout() / "build" / "peers" / "fbgemm"
    if not (peers / "fbgemm_gpu").is_dir():
        return None
    sys.path.insert(0, str(peers))
    from fbgemm_gpu.split_embedding_configs import EmbOptimType  # type: ignore[import-not-found]
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode  # type: ignore[import-not-found]
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # type: ignore[import-not-found]
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)] * TABLES,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
        pooling_mode=PoolingMode.SUM,
    )
    module.init_embedding_weights_uniform(-0.05, 0.05)
    return module


def step_figures() -> list[Figure]:
    tables, lookups = spec()
    embeddings = ShardedEmbeddings(row_wise(tables, lookups, 1), LocalCollective(), seed=1)
    embeddings.configure_optimizer(OPTIMIZER)
    features = [EmbeddingFeature(t.name, DIM, ROWS, ids=IDS) for t in tables]
    named = EmbeddingCollection(features, optimizer=OPTIMIZER, reduction="sum", seed=1)
    plain, fbgemm_table = Torch(), fbgemm()
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
            embeddings(codes).backward(gradient)
            embeddings.step()

        def look_up(codes: Tensor = codes) -> None:
            with torch.no_grad():
                embeddings(codes)

        def look_up_plain(codes: Tensor = codes) -> None:
            with torch.no_grad():
                plain.forward(codes)

        of_each = torch.arange(0, BATCH * IDS + 1, IDS)
        inputs = {t.name: JaggedTensor(v, of_each) for t, v in zip(tables, values.view(TABLES, -1), strict=True)}

        def look_up_named(inputs: Any = inputs) -> None:
            with torch.no_grad():
                named(inputs)

        def train_named(inputs: Any = inputs, flat_gradient: Tensor = flat_gradient) -> None:
            named(inputs).side_by_side().backward(flat_gradient)
            named.step()

        def train_apart(inputs: Any = inputs) -> None:
            torch.autograd.backward(list(named(inputs).values()), list(gradient.unbind(1)))
            named.step()

        turns: dict[str, Callable[[], object]] = {
            "floor": lambda flat=flat, room=room: torch.index_select(embeddings.weight, 0, flat, out=room),
            "forward": look_up,
            "step": train_ours,
            "named forward": look_up_named,
            "named step": train_named,
            "apart step": train_apart,
            "torch forward": look_up_plain,
            "torch step": lambda codes=codes: plain.step(codes, gradient),
        }
        if fbgemm_table is not None:

            def look_up_other(values: Tensor = values, offsets: Tensor = offsets) -> None:
                with torch.no_grad():
                    fbgemm_table(values, offsets)

            turns["fbgemm forward"] = look_up_other
            turns["fbgemm step"] = lambda v=values, o=offsets, g=flat_gradient: fbgemm_table(v, o).backward(g)
            # The same start, the same answer.
            with torch.no_grad():
                for i, w in enumerate(fbgemm_table.split_embedding_weights()):
                    w.copy_(embeddings.weight[i * ROWS : (i + 1) * ROWS])
                torch.testing.assert_close(fbgemm_table(values, offsets).view(BATCH, TABLES, DIM), embeddings(codes))
        seconds = best(turns)
        for how, part in (("named", "forward"), ("named", "step"), ("apart", "step")):
            name = f"{part} by name{', vectors apart' if how == 'apart' else ''}, {ids} ids (peer: without names)"
            value, floor, peer = (seconds[key] * 1e3 for key in (f"{how} {part}", "floor", part))
            figures.append(Figure(name, value, "ms", floor, peer))
            if how == "named":
                ratio = median_ratio(turns[f"named {part}"], turns[part])
                figures.append(Figure(f"{part} by name over without names, {ids} ids", ratio, "ratio"))
        for part in ("forward", "step"):
            for peer in ("torch", "fbgemm"):
                if f"{peer} {part}" in seconds:
                    figures.append(
                        Figure(
                            f"{part}, {ids} ids (peer: {peer})",
                            seconds[part] * 1e3,
                            "ms",
                            seconds["floor"] * 1e3,
                            seconds[f"{peer} {part}"] * 1e3,
                        )
                    )
    return figures


def main() -> None:
    if os.environ.get("MALLOC_TOP_PAD_") != MALLOC["MALLOC_TOP_PAD_"]:  # glibc reads it at the start of a process
        sys.exit(
            subprocess.run([sys.executable, "-m", "bench.bench_embeddings"], env={**os.environ, **MALLOC}).returncode
        )
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    figures = step_figures() + byte_figures([ROWS] * TABLES, DIM, BATCH)
    # In a process with the plain allocator: it gives freed memory back, and a peak is a peak.
    plain = {k: v for k, v in os.environ.items() if k not in MALLOC}
    code = "import json; from bench.embeddings_memory import memory_figures; from dataclasses import asdict;"
    code += "print(json.dumps([asdict(f) for f in memory_figures()]))"
    answer = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True, check=True).stdout
    figures += [Figure(**f) for f in json.loads(answer.splitlines()[-1])]
    publish("embeddings", figures)


if __name__ == "__main__":
    main()
