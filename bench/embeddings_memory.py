"""Peak memory of ranks that hold a table together which a limit on each process would not let one hold alone.

Every rank is a process. It is told to take at most 1.1 of the planner's figure more than it has (RLIMIT_DATA: all that
it can write to and shares with nobody), so that a step which needs more fails. The same limit with the table on every
rank must fail. Messages go through memory that the ranks share, and each rank counts those that it sends.

And of a table of raw ids that is filled to its limit, and goes on with ids that are new.
"""

from __future__ import annotations

import multiprocessing
import resource
from dataclasses import replace
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import torch

from bench.report import Figure
from headrace.comm.base import Collective
from headrace.comm.shared_memory import SharedCollective, shared
from headrace.config import EmbeddingOptimizer, Sharding
from headrace.embeddings.dynamic.rows import DynamicReport, dynamic_table_bytes
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.embeddings.kernels.id_map import mix
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.planner.cost import OtherMemory, Workload, plan_load
from headrace.embeddings.sharding_plan import Lookup, Plan, Table, blocks_for
from headrace.workspace import checkout

OPTIMIZER = EmbeddingOptimizer(kind="rowwise_adagrad", learning_rate=0.01)
DIM, BATCH, IDS = 64, 8_192, 4
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
