"""What a plan costs each rank: memory, bytes on the wire, bytes of memory traffic, and the time that follows.

The exchange sends each distinct row once, so what counts is the expected number of distinct ids in a rank's part of
the batch (`Popularity`), not the number of ids; where owners sum bags, the ids and the parts of bags. All figures are
of one training step; all vectors are by rank, [W].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headrace.config import Sharding
from headrace.embeddings.optim.rules import RULES, state_bytes_per_row
from headrace.embeddings.planner.popularity import Popularity
from headrace.embeddings.sharding.plan import Block, Lookup, Plan, Table
from headrace.embeddings.storage.row_format import BYTES, row_bytes

Vector = NDArray[np.float64]
GIB = 2**30
#: What a cache of rows takes on the device besides the rows (headrace.embeddings.storage.host_cache): bytes of each
#: row that is there, and of each row of the table.
CACHE_SLOT_BYTES, CACHE_INDEX_BYTES = 25, 4


@dataclass(frozen=True)
class OtherMemory:
    """What else takes a rank's memory, besides tables and what a step needs of them."""

    #: Bytes that no plan changes: tables of raw ids at their limits, and what a step takes of them.
    raw_ids: float = 0.0
    #: Whether messages go through memory that the ranks share (headrace.comm.shared_memory).
    shares_memory: bool = False
    #: Whether tables are copied to be saved while training goes on.
    saves_copies: bool = False


@dataclass(frozen=True)
class Workload:
    """What the plan is for."""

    tables: tuple[Table, ...]
    lookups: tuple[Lookup, ...]
    world_size: int
    #: Rows of a step over all ranks.
    batch_size: int
    #: Kind of the optimizer (config.EmbeddingOptimizer).
    optimizer: str
    settings: Sharding
    #: Known popularities by table; the others are Zipf with `settings.zipf`.
    popularity: Mapping[str, Popularity] = field(default_factory=dict)
    other_memory: OtherMemory = OtherMemory()

    @cached_property
    def by_name(self) -> dict[str, Table]:
        return {t.name: t for t in self.tables}

    @cached_property
    def slots(self) -> dict[str, int]:
        """Ids of each table in one sample; lists are taken to be full."""
        found = {t.name: 0 for t in self.tables}
        for x in self.lookups:
            found[x.table] += x.length
        return found

    def bytes_of(self, table: Table) -> int:
        """Weights and optimizer states of a whole table."""
        return table.rows * (row_bytes(table.storage, table.dim) + state_bytes_per_row(self.optimizer, table.dim))

    @cached_property
    def table_bytes(self) -> int:
        """Weights and optimizer states of all tables."""
        return sum(self.bytes_of(t) for t in self.tables)

    @property
    def local_batch(self) -> float:
        return self.batch_size / self.world_size

    def popularity_of(self, table: str) -> Popularity:
        known = self.popularity.get(table)
        return known if known is not None else self._zipf[table]

    @cached_property
    def _zipf(self) -> dict[str, Popularity]:
        return {t.name: Popularity.zipf(t.rows, self.settings.zipf) for t in self.tables}

    def comm_bytes(self, table: Table, columns: int) -> int:
        """Bytes of a table's row on its way; float32 numbers travel as `settings.comm_seconds`."""
        return columns * self.number_bytes if table.storage == "fp32" else row_bytes(table.storage, columns)

    @property
    def number_bytes(self) -> int:
        """Bytes of a number of a gradient, or of a sum, on its way."""
        return BYTES[self.settings.wire]

    @cached_property
    def id_bytes(self) -> int:
        """Ids travel as row numbers of their owner: 4 bytes where the shards have fewer than 2^31 rows."""
        return 4 if sum(t.rows for t in self.tables) < 2**31 * self.world_size else 8


@dataclass
class Load:
    """Sums by rank, each float64 [W]."""

    #: Weights and optimizer states; of cached tables what is on the GPU.
    memory: Vector
    #: Most of what one step holds besides them, and of `OtherMemory` what depends on the plan: messages that the rank
    #: sends in shared memory, copies.
    buffers: Vector
    sent: Vector
    received: Vector
    #: Bytes read and written in the rank's own memory.
    memory_traffic: Vector
    #: Bytes that each rank puts into the all-reduce of replicated tables, the rank's share of its ring.
    reduced: Vector
    #: Cached tables in host memory, and the bytes of their rows that come from there and go back.
    host: Vector
    carried: Vector

    @staticmethod
    def zero(world_size: int) -> Load:
        return Load(*(np.zeros(world_size) for _ in range(8)))

    def add(self, other: Load, sign: float = 1.0) -> None:
        """Add, or take away, in place."""
        for name in vars(self):
            getattr(self, name).__iadd__(sign * getattr(other, name))

    def seconds(self, settings: Sharding) -> Vector:
        """Expected time of a step's embedding part on each rank, [W].

        Messages inside a machine and between machines travel at the same time; memory traffic, and rows of caches
        from host memory, come before and after.
        """
        world = len(self.memory)
        near = min(settings.ranks_per_node, world) - 1
        inside = near / max(1, world - 1)
        moved = np.maximum(self.sent, self.received) + self.reduced
        comm_seconds = (
            np.maximum(moved * inside / settings.node_gbps, moved * (1 - inside) / settings.network_gbps) / 1e9
        )
        messages = 3 * bool(self.sent.any()) + bool(self.reduced.any())
        moved_here = self.memory_traffic / settings.memory_gbps + self.carried / settings.host_gbps
        return comm_seconds + moved_here / 1e9 + messages * settings.latency_us * 1e-6


def block_bytes(work: Workload, block: Block) -> int:
    """Bytes of one row of a block with its optimizer states."""
    table = work.by_name[block.table]
    width = len(block.columns)
    return row_bytes(table.storage, width) + state_bytes_per_row(work.optimizer, width)


def resident_bytes(work: Workload, block: Block) -> float:
    """Bytes that a row of a block takes where it is computed: of a cached table a share of the row, and its slot."""
    cached, row = work.by_name[block.table].cached, block_bytes(work, block)
    return float(row) if cached == 1 or block.replicated else cached * (row + CACHE_SLOT_BYTES) + CACHE_INDEX_BYTES


def load_of(work: Workload, blocks: Sequence[Block]) -> Load:
    """What the blocks of one table cost each rank."""
    world = work.world_size
    load = Load.zero(world)
    for block in blocks:
        table = work.by_name[block.table]
        width = len(block.columns)
        stored = row_bytes(table.storage, width)
        numbers = 4 * width  # a row's gradient
        ids = work.local_batch * work.slots[block.table]
        pieces = work.local_batch * sum(1 for x in work.lookups if x.table == block.table)
        popularity = work.popularity_of(block.table)
        distinct = popularity.distinct(ids)
        row = block_bytes(work, block)
        # Everywhere: codes, indices and their sort (about 40 bytes an id), output and its gradient, summed gradient.
        load.buffers += 40 * ids + 2 * pieces * numbers
        load.memory_traffic += 40 * ids + 3 * pieces * numbers
        if not block.pooled or world == 1:  # pooled here, from rows
            load.buffers += distinct * numbers
            load.memory_traffic += ids * numbers * 2
        if block.replicated:
            load.memory += table.rows * row
            load.buffers += table.rows * row * work.other_memory.saves_copies
            touched = popularity.distinct(ids * world)
            dense = table.rows * (numbers + 4)
            load.buffers += 2 * dense + 4 * touched * numbers
            load.memory_traffic += 4 * dense + 2 * touched * row
            load.reduced += 2 * dense * (world - 1) / world
            if work.other_memory.shares_memory:
                load.buffers += dense
            continue
        holders = (block.first_rank + np.arange(block.ranks)) % world
        held = (table.rows - np.arange(block.ranks) + block.ranks - 1) // block.ranks
        load.memory[holders] += held * resident_bytes(work, block)
        copies = held * row * work.other_memory.saves_copies
        (load.buffers if table.cached == 1 else load.host)[holders] += copies
        own = np.zeros(world)  # distinct rows that a rank asks of itself
        own[holders] = popularity.distinct_by_shard(ids, block.ranks)
        touched_here = np.zeros(world)
        touched_here[holders] = popularity.distinct_by_shard(ids * world, block.ranks)
        if table.cached < 1:
            load.host[holders] += held * row
            beyond = popularity.distinct_beyond(ids * world, table.cached * table.rows)
            # Rows come, with their states, and others go back.
            load.carried += touched_here * beyond / max(1e-9, popularity.distinct(ids * world)) * 2 * row
        if block.pooled and world > 1:
            _add_pooled(load, work, block, holders, touched_here)
            continue
        # Two sums of the same numbers in another order: without a tiny difference where a rank holds all.
        away, served = np.maximum(distinct - own, 0.0) if world > 1 else np.zeros(1), own * (world - 1)
        sent_row, gradient_bytes = work.comm_bytes(table, width), width * work.number_bytes
        load.sent += away * (work.id_bytes + gradient_bytes) + served * sent_row
        load.received += away * sent_row + served * (work.id_bytes + gradient_bytes)
        if work.other_memory.shares_memory:
            # Ids are under way with rows, or with gradients.
            load.buffers += away * work.id_bytes + np.maximum(served * sent_row, away * gradient_bytes)
        asked = served + own
        if world > 1:
            # Rows as stored and as float32, both ways.
            load.buffers += distinct * (stored + numbers) + asked * (stored + 2 * numbers)
        load.buffers += touched_here * (2 * numbers + row)
        load.memory_traffic += (
            asked * 2 * stored + asked * 2 * numbers + touched_here * 2 * row + distinct * 2 * numbers
        )
    if len(blocks) > 1 and RULES[work.optimizer].by_row:
        # The blocks' owners tell each other their sums of squares.
        touched = 4 * work.popularity_of(blocks[0].table).distinct(work.batch_size * work.slots[blocks[0].table])
        holders = np.array([b.first_rank for b in blocks])
        others = touched * (len(set(holders.tolist())) - 1)
        load.sent[np.unique(holders)] += others
        load.received[np.unique(holders)] += others
    return load


def _add_pooled(load: Load, work: Workload, block: Block, holders: NDArray[np.int64], touched_here: Vector) -> None:
    """Ids, parts of bags and the owners' work of a block whose owners sum bags."""
    world, width = work.world_size, len(block.columns)
    table, popularity = work.by_name[block.table], work.popularity_of(block.table)
    numbers = 4 * width
    share = np.zeros(world)
    share[holders] = popularity.share_by_shard(block.ranks)
    ids, parts = np.zeros(world), np.zeros(world)  # of one asking rank, by owner
    id_bytes = np.zeros(world)
    for x in work.lookups:
        if x.table == block.table:
            ids += work.local_batch * x.length * share
            id_bytes += work.local_batch * x.length * share * (work.id_bytes + (4 if x.weighted else 0))
            parts += work.local_batch * -np.expm1(x.length * np.log1p(-np.minimum(share, 1 - 1e-15)))
    vector = width * work.number_bytes
    others = world - 1
    load.sent += id_bytes.sum() - id_bytes + (parts.sum() - parts) * vector + others * parts * vector
    load.received += others * id_bytes + others * parts * vector + (parts.sum() - parts) * vector
    if work.other_memory.shares_memory:
        load.buffers += id_bytes.sum() - id_bytes + np.maximum(others * parts, parts.sum() - parts) * vector
    # Here: vectors and their gradients; at the owner: rows and sorting of the ids of all, sums, gradients.
    load.buffers += 40 * ids.sum() + 2 * parts.sum() * numbers + world * (40 * ids + 2 * parts * numbers)
    row = block_bytes(work, block)
    load.buffers += touched_here * (2 * numbers + row)
    stored = row_bytes(table.storage, width)
    load.memory_traffic += 40 * ids.sum() + 4 * parts.sum() * numbers
    load.memory_traffic += world * (ids * (stored + numbers) + 4 * parts * numbers) + touched_here * 2 * row


def plan_load(work: Workload, plan: Plan) -> Load:
    """What a whole plan costs each rank."""
    total = Load.zero(work.world_size)
    for t in work.tables:
        total.add(load_of(work, plan.blocks_of(t.name)))
    return total
