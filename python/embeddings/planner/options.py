"""In which ways a table may be cut: what the planner tries. Each is cut by sharding.plan.blocks_for."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config import ShardingKind, TableSharding
from headrace.embeddings.planner.cost import Workload
from headrace.embeddings.sharding.plan import Table, can_pool

#: Narrower blocks of columns cost more in ids than they win.
_MIN_COLUMNS = 16
#: A table is replicated only if that takes less than this share of a rank's memory (without a limit: this many bytes).
_REPLICATED_SHARE, _REPLICATED_BYTES = 0.02, 256 * 2**20

#: How a table is cut: kind, number of parts, whether owners sum bags.
ShardingOption = tuple[ShardingKind, int, bool]


def rule_of(work: Workload, table: Table) -> TableSharding:
    """What the settings say of one table."""
    return work.settings.tables.get(table.name, TableSharding())


def sharding_options(work: Workload, table: Table, limit: float) -> list[ShardingOption]:
    """What is tried of a table, within the constraints on it.

    Args:
        work: all tables and the ranks.
        table: one of them.
        limit: bytes of a rank; infinite: there is none.
    """
    return [
        (kind, parts, pooled) for kind, parts in _kinds(work, table, limit) for pooled in _pooled(work, table, kind)
    ]


def _kinds(work: Workload, table: Table, limit: float) -> Iterator[tuple[ShardingKind, int]]:
    """Kinds, and numbers of parts, that are tried."""
    rule = rule_of(work, table)
    if work.world_size == 1:
        yield ("data_parallel" if rule.kind == "data_parallel" else "table_wise"), 1
        return
    default: ShardingKind | None = "row_wise" if work.settings.kind == "row_wise" else None
    kind = rule.kind or default
    if kind in (None, "row_wise"):
        node = work.settings.ranks_per_node
        yield "row_wise", rule.parts or work.world_size
        if kind is None and rule.parts is None and 1 < node < work.world_size:
            yield "row_wise", node
    if kind in (None, "table_wise"):
        yield "table_wise", 1
    if kind == "column_wise" or (kind is None and table.storage != "int8"):
        parts = 2
        while rule.parts is None and parts <= work.world_size and table.dim >= parts * _MIN_COLUMNS:
            yield "column_wise", parts
            parts *= 2
        if kind == "column_wise" and (rule.parts or table.dim < 2 * _MIN_COLUMNS):
            yield "column_wise", rule.parts or min(2, table.dim)
    small = min(_REPLICATED_SHARE * limit, _REPLICATED_BYTES)
    free = kind is None and rule.parts is None and table.cached == 1
    if kind == "data_parallel" or (free and work.bytes_of(table) <= small):
        yield "data_parallel", 1


def _pooled(work: Workload, table: Table, kind: ShardingKind) -> tuple[bool, ...]:
    """Whether owners sum bags: what is tried."""
    wanted = rule_of(work, table).pooled
    if kind == "data_parallel" or work.world_size == 1 or wanted is False or not can_pool(table.name, work.lookups):
        return (False,)
    if wanted:
        return (True,)
    # A sum of parts differs from a sum of rows by rounding: not where nobody asked for a choice.
    return (False,) if work.settings.kind == "row_wise" and rule_of(work, table).kind is None else (False, True)
