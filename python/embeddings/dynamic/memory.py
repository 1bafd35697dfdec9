"""What tables of raw ids take of a rank's memory: as they are filled, at most, and in a step."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.embeddings.dynamic.admission_cpu import RECORD_BYTES, waiting_bytes
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.kernels.id_map_cpu import SLOT_BYTES, slots_for
from headrace.embeddings.optim.rules import state_bytes_per_row

_MIB = 2**20


def bytes_for(rows: int, dim: int, optimizer: str | None) -> int:
    """Bytes of so many rows with all that belongs to them."""
    each = 4 * dim + RECORD_BYTES + (state_bytes_per_row(optimizer, dim) if optimizer else 0)
    return rows * each + SLOT_BYTES * slots_for(rows)


def rows_within(limit: float, dim: int, optimizer: str | None) -> int:
    """The most rows that take at most `limit` bytes."""
    low, high = 0, int(limit) // (4 * dim) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bytes_for(middle, dim, optimizer) <= limit else (low, middle)
    return low


def rows_allowed(spec: DynamicSpec, world_size: int, optimizer: str | None) -> int | None:
    """The most rows of a rank; None: any number."""
    limits = []
    if spec.max_rows is not None:
        limits.append(max(1, spec.max_rows // world_size))
    if spec.memory_mib is not None:
        limits.append(rows_within(spec.memory_mib * _MIB, spec.dim, optimizer))
    return min(limits, default=None)


def most_bytes(spec: DynamicSpec, world_size: int, optimizer: str) -> int | None:
    """The most that a rank's part of a table takes, with the ids that wait; None: there is no limit."""
    rows = rows_allowed(spec, world_size, optimizer)
    if rows is None:
        return None
    may_wait = spec.admit_after > 1 or spec.admit_chance < 1
    return bytes_for(rows, spec.dim, optimizer) + may_wait * waiting_bytes(max(1, spec.max_waiting // world_size))


def step_bytes(ids: float, dim: int, world_size: int) -> float:
    """What a step takes of a rank that looks up so many raw ids, all of them distinct.

    Hashes, their sort, numbers and counts of ids, here and (on several ranks) of those that others ask for; at a time
    four vectors of each (found, gathered, two gradients), or five where they travel. See bench.embeddings_memory.
    """
    if world_size == 1:
        return ids * (200 + 4 * 4 * dim)
    return ids * (300 + 5 * 4 * dim)


def dynamic_table_bytes(
    specs: Sequence[DynamicSpec], ids: Sequence[int], batch_size: int, world_size: int, optimizer: str, copies: int = 1
) -> float:
    """Bytes that tables of raw ids take of each rank, a step included; those without a limit count with the step alone.

    Args:
        specs: the tables.
        ids: most ids of each in a row of the batch.
        batch_size: rows of a step over all ranks.
        world_size: ranks.
        optimizer: kind of the optimizer.
        copies: that are there at a time: 2 where tables are saved while training goes on.
    """
    each = [
        copies * (most_bytes(s, world_size, optimizer) or 0)
        + step_bytes(n * batch_size / world_size, s.dim, world_size)
        for s, n in zip(specs, ids, strict=True)
    ]
    return float(sum(each))
