"""Why tables do not fit the ranks' memory, and what would make them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headrace.embeddings.optim.rules import state_bytes_per_row
from headrace.embeddings.planner.cost import GIB, Workload, load_of
from headrace.embeddings.planner.options import rule_of
from headrace.embeddings.sharding.plan import Table, blocks_for
from headrace.embeddings.storage.row_format import row_bytes
from headrace.errors import UserError


class InsufficientMemory(UserError):
    """The tables do not fit the ranks' memory."""


def insufficient_memory(work: Workload, table: Table, limit: float) -> InsufficientMemory:
    """Why the tables do not fit, and what would make them."""
    world, rule = work.world_size, rule_of(work, table)
    total = work.table_bytes
    largest = max(work.tables, key=lambda t: (work.bytes_of(t), t.name))
    taken = f" (beside {work.other_memory.raw_ids / GIB:.3g} GiB for raw ids)" if work.other_memory.raw_ids else ""
    room = f"{world} rank(s) of {limit / GIB:.3g} GiB{taken}"
    head = (
        f"table '{table.name}' ({table.rows:,} rows of {table.dim}, {work.bytes_of(table) / GIB:.3g} GiB with its "
        f"optimizer's states) does not fit"
    )
    if rule.kind in ("table_wise", "column_wise", "data_parallel") and work.bytes_of(table) <= limit * world:
        return InsufficientMemory(
            f"{head} {room} as train.sharding.tables.{table.name}.kind={rule.kind} asks; leave the kind to the "
            f"planner, or set it to row_wise"
        )
    advice = []
    ranks = _ranks_needed(work, total, limit)
    if ranks is not None and ranks > world:
        advice.append(f"{ranks} ranks")
    step = _step_bytes(work, world)
    usable = max(0.0, limit - step) * world
    half = sum(t.rows * (t.dim * 2 + state_bytes_per_row(work.optimizer, t.dim)) for t in work.tables)
    if half <= usable and half < total:
        advice.append(f"rows stored as bf16 (train.sharding.storage=bf16: {half / GIB:.3g} GiB)")
    if work.optimizer != "rowwise_adagrad":
        by_row = sum(t.rows * (row_bytes(t.storage, t.dim) + 4) for t in work.tables)
        if by_row <= usable and by_row < total:
            advice.append(f"train.embeddings.kind=rowwise_adagrad ({by_row / GIB:.3g} GiB)")
    width = max(t.dim for t in work.tables)
    narrow = int(width * usable / total)
    if narrow >= 1:
        advice.append(f"model.embedding_dim={narrow}")
    per_row = work.bytes_of(largest) / largest.rows
    left = usable - (total - work.bytes_of(largest))
    if left > per_row:
        advice.append(f"'{largest.name}' hashed to {int(left / per_row):,} buckets (operator hash_bucket)")
    what = "; or ".join(advice) if advice else "more memory for each rank (train.sharding.memory_gib)"
    return InsufficientMemory(
        f"{head}: all tables need {total / GIB:.4g} GiB, and a step {step / GIB:.3g} GiB on each of {room}. It "
        f"would fit with {what}"
    )


def _step_bytes(work: Workload, ranks: int) -> float:
    """What a step needs besides the tables where all are dealt by rows; and one row of each, for rows left over."""
    work = replace(work, world_size=ranks)
    loads = [load_of(work, blocks_for(t, "row_wise", ranks)) for t in work.tables]
    return sum(float(x.buffers.max()) for x in loads) + sum(work.bytes_of(t) / t.rows for t in work.tables)


def _ranks_needed(work: Workload, total: float, limit: float) -> int | None:
    """The fewest ranks on which all tables by rows fit; None: more than 2^20."""
    ranks = work.world_size
    while ranks <= 2**20:
        step = _step_bytes(work, ranks)
        if total / ranks + step <= limit:
            return ranks
        ranks = max(ranks + 1, min(2 * ranks, int(np.ceil(total / max(1.0, limit - step)))))
    return None
