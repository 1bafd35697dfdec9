"""The embedding step alone: lookup, pooling, gradient, row-wise Adagrad, beside its floor and its peers.

    make bench-embeddings

- step: one rank, four tables of 1 M x 64, 8,192 samples of 4 ids a table, uniform ids (every row a cache miss) and
  Zipf(1.05). Floor: torch.index_select of the same rows of one matrix into memory that is there already. Peers, in the
  same run, in turns: torch.nn.EmbeddingBag with sparse gradients and torch.optim.Adagrad, and FBGEMM's CPU operator
  with EXACT_ROWWISE_ADAGRAD, where `make bench-peers` has installed it (build/peers/fbgemm). By name (an
  EmbeddingCollection, jagged ids), its vectors side by side and each feature's apart; peer: the same without names.
- bytes: bench.embeddings_exchange. - memory: see below.

Ratios are of times where less is better. Every figure is the best of several turns, but for the names' share of the
time: the median ratio of 80 pairs of turns, with and without names, each pair in the other order than the last.

Memory is the peak of ranks that hold a table together which a limit on each process would not let one hold alone. Every
rank is a process. It is told to take at most 1.1 of the planner's figure more than it has (RLIMIT_DATA: all that it can
write to and shares with nobody), so that a step which needs more fails. The same limit with the table on every rank
must fail. Messages go through memory that the ranks share, and each rank counts those that it sends. And of a table of
raw ids that is filled to its limit, and goes on with ids that are new.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.embeddings_exchange import byte_figures
from bench.report import Figure, publish
from headrace.comm.base import Collective, LocalCollective
from headrace.comm.shared_memory import SharedCollective, shared
from headrace.config import EmbeddingOptimizer, Sharding
from headrace.config.installation import checkout
from headrace.embeddings import EmbeddingCollection, EmbeddingFeature, JaggedTensor
from headrace.embeddings.dynamic.rows import DynamicReport, dynamic_table_bytes
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.embeddings.kernels.id_map import mix
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.planner.cost import OtherMemory, Workload, plan_load
from headrace.embeddings.sharding_plan import Lookup, Plan, Table, blocks_for, row_wise

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
    code = "import json; from bench.bench_embeddings import memory_figures; from dataclasses import asdict;"
    code += "print(json.dumps([asdict(f) for f in memory_figures()]))"
    answer = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True, check=True).stdout
    figures += [Figure(**f) for f in json.loads(answer.splitlines()[-1])]
    publish("embeddings", figures)


#: What a rank may take, of the planner's figure.
ROOM = 1.1


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith(key))


def _rank(rank: int, plan: Plan, room: int, meeting: Path, answers: Any) -> None:
    import torch.distributed as dist

    from headrace.comm.torch_dist import TorchCollective

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=plan.world_size)
    collective = shared(TorchCollective())
    assert isinstance(collective, SharedCollective)
    rows = plan.tables[0].rows
    # What starts with the first messages and steps of any size is not the tables'.
    small = (Table("t", 1_000, DIM),)
    blocks = tuple(blocks_for(small[0], "row_wise", plan.world_size))
    _train(Plan(small, plan.lookups, blocks, plan.world_size), collective, 1_000)
    start_size = _status("VmRSS") - _status("RssShmem")
    resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + room, resource.RLIM_INFINITY))
    try:
        _train(plan, collective, rows)
    except (MemoryError, RuntimeError) as e:
        if "memory" not in str(e).lower():
            raise
        answers.put((rank, None))
        return
    # What the other ranks sent is theirs; messages are there to the end.
    sent = collective.nbytes
    answers.put((rank, (_status("VmHWM") - _status("RssShmem") - start_size + sent, sent)))
    dist.barrier()
    collective.close()
    dist.destroy_process_group()


def _train(plan: Plan, collective: Any, rows: int) -> None:
    embeddings = ShardedEmbeddings(plan, collective, seed=1)
    embeddings.configure_optimizer(OPTIMIZER)
    for step in range(3):
        rng = np.random.default_rng([collective.world.rank, step])
        embeddings(torch.from_numpy(rng.integers(1, rows, (BATCH, IDS)))).sum().backward()
        embeddings.step()


def peaks(kind: str, room: int, size: int, rows: int) -> list[tuple[int, int] | None]:
    """Return by how many bytes each rank grew, and how many of them were messages; None: it was refused memory."""
    table = Table("t", rows, DIM)
    blocks = tuple(blocks_for(table, kind, size))  # type: ignore[arg-type]
    plan = Plan((table,), (Lookup("t", "t", IDS, True),), blocks, size)
    meeting = checkout() / "build" / "bench" / f"meeting-{kind}"
    meeting.parent.mkdir(parents=True, exist_ok=True)
    meeting.unlink(missing_ok=True)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, plan, room, meeting, answers)) for r in range(size)]
    for r in ranks:
        r.start()
    by_rank: dict[int, tuple[int, int] | None] = {}
    try:
        while len(by_rank) < size and None not in by_rank.values():
            by_rank |= [answers.get(timeout=300)]
    except Empty:
        raise RuntimeError("a rank said nothing for five minutes") from None
    finally:
        for r in ranks:
            if None in by_rank.values():
                r.terminate()  # one that waits for the rank that was refused
            r.join()
        meeting.unlink(missing_ok=True)
    return [by_rank.get(r) for r in range(size)]


def memory_figures(size: int = 2, rows: int = 10_000_000) -> list[Figure]:
    """Measure the peak growth of each rank's memory; a table on every rank must be refused under the same limit."""
    tables, lookups = (Table("t", rows, DIM),), (Lookup("t", "t", IDS, True),)
    plan = Plan(tables, lookups, tuple(blocks_for(tables[0], "row_wise", size)), size)
    work = Workload(tables, lookups, size, BATCH * size, OPTIMIZER.kind, Sharding(zipf=0.0))
    load, alone = (plan_load(replace(work, other_memory=OtherMemory(0.0, shares)), plan) for shares in (True, False))
    planned, messages = load.memory + load.buffers, load.buffers - alone.buffers
    room = int(ROOM * planned.max())
    measured = [f for f in peaks("row_wise", room, size, rows) if f is not None]
    if len(measured) < size:
        raise RuntimeError(f"a rank was refused memory within {ROOM} of the planner's figure: {measured}")
    if None not in peaks("data_parallel", room, size, rows):
        raise RuntimeError("the whole table on each rank fitted into the limit: it is no limit")
    table_size = rows * (DIM * 4 + 4)
    name = f"of {size}, limited to {ROOM} of the planner's; the whole table is refused (floor: planned, peer: whole)"
    return [
        *(
            Figure(
                f"peak memory of rank {r} {name}",
                measured[r][0] / 2**20,
                "MiB",
                float(planned[r]) / 2**20,
                table_size / 2**20,
            )
            for r in range(size)
        ),
        *(
            Figure(
                f"of it messages in shared memory, rank {r} (floor: planned)",
                measured[r][1] / 2**20,
                "MiB",
                float(messages[r]) / 2**20,
            )
            for r in range(size)
        ),
        *raw_figures(1),
        *raw_figures(size),
    ]


def _raw(rank: int, size: int, spec: DynamicSpec, batches: int, ids: int, meeting: Path, answers: Any) -> None:
    import torch.distributed as dist

    from headrace.comm.torch_dist import TorchCollective

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    collective = shared(TorchCollective())
    _train_raw(DynamicSpec("small", spec.dim), collective, 2, ids)
    start_size = _status("VmRSS") - _status("RssShmem")
    report = _train_raw(spec, collective, batches, ids)
    sent = collective.nbytes if isinstance(collective, SharedCollective) else 0
    answers.put((rank, (_status("VmHWM") - _status("RssShmem") - start_size + sent, report.rows, report.evicted)))
    dist.barrier()
    dist.destroy_process_group()


def _train_raw(spec: DynamicSpec, collective: Collective, batches: int, ids: int) -> DynamicReport:
    tables = DynamicEmbeddings([spec], collective, seed=1)
    tables.configure_optimizer(OPTIMIZER)
    size = collective.world.size
    embeddings = ShardedEmbeddings(Plan((), (), (), size), collective, seed=1, dynamic=tables)
    for batch in range(batches):
        first = (batch * size + collective.world.rank) * ids
        raw = torch.from_numpy(mix(np.arange(first, first + ids)).view(np.int64))
        prepared = embeddings.prepare(torch.zeros(0, 0, dtype=torch.int64), raw=[raw])
        embeddings(prepared)
        prepared.found[0][0].sum().backward()
        embeddings.drop_gradients()  # there are none of planned tables
        tables.step()
    return tables.report()[spec.name]


def raw_figures(size: int, mib: float = 384.0, batches: int = 60, ids: int = 32_768) -> list[Figure]:
    """Measure peak growth of processes that fill their part of a table of raw ids to its limit, all ids distinct."""
    spec = DynamicSpec("t", DIM, memory_mib=mib)
    planned = dynamic_table_bytes([spec], [1], ids * size, size, OPTIMIZER.kind)
    meeting = checkout() / "build" / "bench" / f"meeting-raw-{size}"
    meeting.unlink(missing_ok=True)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_raw, args=(r, size, spec, batches, ids, meeting, answers)) for r in range(size)]
    for r in ranks:
        r.start()
    by_rank = dict(answers.get(timeout=300) for _ in ranks)
    for r in ranks:
        r.join()
    meeting.unlink(missing_ok=True)
    figures = []
    for rank in range(size):
        grown, rows, evicted = by_rank[rank]
        if not evicted:
            raise RuntimeError(f"{rows:,} rows are no limit")
        name = (
            f"peak memory of rank {rank} of {size}, raw ids, {rows:,} rows in all, {evicted:,} evicted (floor: planned)"
        )
        figures.append(Figure(name, grown / 2**20, "MiB", planned / 2**20))
    return figures


if __name__ == "__main__":
    main()
