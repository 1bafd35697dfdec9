"""Cost model of a plan: memory, bytes on the wire, memory traffic, and the time that follows, for each rank.

The exchange sends each distinct row once, so the cost depends on the expected number of distinct ids in a rank's part
of the batch (`Popularity`), not on the number of ids; where owners sum bags, on the ids and the parts of bags. All
figures are of one training step; all vectors are by rank, [W].

Direct messages are compared with messages by machines (headrace.embeddings.hierarchical_exchange) in means over the
ranks: which rank is slowest hardly depends on the route. Between machines a row goes once for each machine that needs
it, not once for each rank; in return everything goes twice, inside and across.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headrace.config.embeddings import Sharding
from headrace.embeddings.planner.tables import Popularity
from headrace.embeddings.sharding_plan import BYTES, Block, Lookup, Plan, Table, row_bytes
from headrace.embeddings.update_rules import RULES, state_bytes_per_row
from headrace.errors import UserError

Vector = NDArray[np.float64]
GIB = 2**30
#: Device memory of a cache of rows besides the rows (headrace.embeddings.storage): bytes of each row in the cache, and
#: of each row of the table.
CACHE_SLOT_BYTES, CACHE_INDEX_BYTES = 25, 4


@dataclass(frozen=True)
class OtherMemory:
    """Memory of a rank besides tables and the buffers of a step."""

    #: Bytes that no plan changes: tables of raw ids at their limits, and their part of a step.
    raw_ids: float = 0.0
    #: True if messages go through memory that the ranks share (headrace.comm.shared_memory).
    shares_memory: bool = False
    #: True if tables are copied to be saved while training goes on.
    saves_copies: bool = False


@dataclass(frozen=True)
class Workload:
    """Tables, lookups and ranks for which a plan is made."""

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
        slots = {t.name: 0 for t in self.tables}
        for x in self.lookups:
            slots[x.table] += x.length
        return slots

    def bytes_of(self, table: Table) -> int:
        """Return the bytes of weights and optimizer states of a whole table."""
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
        """Return the bytes of a row in a message; float32 values travel as `settings.wire`."""
        return columns * self.number_bytes if table.storage == "fp32" else row_bytes(table.storage, columns)

    @property
    def number_bytes(self) -> int:
        """Bytes of one value of a gradient or a sum in a message."""
        return BYTES[self.settings.wire]

    @cached_property
    def id_bytes(self) -> int:
        """Ids travel as row numbers of their owner: 4 bytes where the shards have fewer than 2^31 rows."""
        return 4 if sum(t.rows for t in self.tables) < 2**31 * self.world_size else 8


@dataclass
class RankLoad:
    """Load of each rank, vectors float64 [W]."""

    #: Weights and optimizer states; of cached tables the part on the GPU.
    memory: Vector
    #: Most of the buffers of one step, and of `OtherMemory` the part that depends on the plan: messages that the rank
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
    def zero(world_size: int) -> RankLoad:
        return RankLoad(*(np.zeros(world_size) for _ in range(8)))

    def add(self, load: RankLoad, sign: float = 1.0) -> None:
        """Add `sign` times a load, in place."""
        for name in vars(self):
            getattr(self, name).__iadd__(sign * getattr(load, name))

    def seconds(self, settings: Sharding) -> Vector:
        """Return the expected time of a step's embedding part on each rank, seconds [W].

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
    """Return the bytes of one row of a block with its optimizer states."""
    table = work.by_name[block.table]
    width = len(block.columns)
    return row_bytes(table.storage, width) + state_bytes_per_row(work.optimizer, width)


def resident_bytes(work: Workload, block: Block) -> float:
    """Return the device bytes of a row of a block: of a cached table a share of the row, and its slot."""
    cached, row = work.by_name[block.table].cached, block_bytes(work, block)
    return float(row) if cached == 1 or block.replicated else cached * (row + CACHE_SLOT_BYTES) + CACHE_INDEX_BYTES


def load_of(work: Workload, blocks: Sequence[Block]) -> RankLoad:
    """Return the load of each rank by the blocks of one table."""
    world = work.world_size
    load = RankLoad.zero(world)
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
        local_distinct = np.zeros(world)  # distinct rows that a rank holds itself
        local_distinct[holders] = popularity.distinct_by_shard(ids, block.ranks)
        touched_here = np.zeros(world)
        touched_here[holders] = popularity.distinct_by_shard(ids * world, block.ranks)
        if table.cached < 1:
            load.host[holders] += held * row
            missing_rows = popularity.distinct_beyond(ids * world, table.cached * table.rows)
            # Rows come, with their states, and others go back.
            load.carried += touched_here * missing_rows / max(1e-9, popularity.distinct(ids * world)) * 2 * row
        if block.pooled and world > 1:
            _add_pooled(load, work, block, holders, touched_here)
            continue
        # Two sums of the same values in another order: no tiny negative difference where a rank holds all rows.
        away, served = (
            np.maximum(distinct - local_distinct, 0.0) if world > 1 else np.zeros(1),
            local_distinct * (world - 1),
        )
        sent_row, gradient_bytes = work.comm_bytes(table, width), width * work.number_bytes
        load.sent += away * (work.id_bytes + gradient_bytes) + served * sent_row
        load.received += away * sent_row + served * (work.id_bytes + gradient_bytes)
        if work.other_memory.shares_memory:
            # Ids are under way with rows, or with gradients.
            load.buffers += away * work.id_bytes + np.maximum(served * sent_row, away * gradient_bytes)
        looked_up = served + local_distinct
        if world > 1:
            # Rows as stored and as float32, both ways.
            load.buffers += distinct * (stored + numbers) + looked_up * (stored + 2 * numbers)
        load.buffers += touched_here * (2 * numbers + row)
        load.memory_traffic += (
            looked_up * 2 * stored + looked_up * 2 * numbers + touched_here * 2 * row + distinct * 2 * numbers
        )
    if len(blocks) > 1 and RULES[work.optimizer].by_row:
        # The owners of the blocks exchange their sums of squares.
        touched = 4 * work.popularity_of(blocks[0].table).distinct(work.batch_size * work.slots[blocks[0].table])
        holders = np.array([b.first_rank for b in blocks])
        exchanged = touched * (len(set(holders.tolist())) - 1)
        load.sent[np.unique(holders)] += exchanged
        load.received[np.unique(holders)] += exchanged
    return load


def _add_pooled(load: RankLoad, work: Workload, block: Block, holders: NDArray[np.int64], touched_here: Vector) -> None:
    """Add the load of a block whose owners sum bags: ids, parts of bags, and the owners' work."""
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
    peers = world - 1
    load.sent += id_bytes.sum() - id_bytes + (parts.sum() - parts) * vector + peers * parts * vector
    load.received += peers * id_bytes + peers * parts * vector + (parts.sum() - parts) * vector
    if work.other_memory.shares_memory:
        load.buffers += id_bytes.sum() - id_bytes + np.maximum(peers * parts, parts.sum() - parts) * vector
    # Here: vectors and their gradients; at the owner: rows and sorting of the ids of all, sums, gradients.
    load.buffers += 40 * ids.sum() + 2 * parts.sum() * numbers + world * (40 * ids + 2 * parts * numbers)
    row = block_bytes(work, block)
    load.buffers += touched_here * (2 * numbers + row)
    stored = row_bytes(table.storage, width)
    load.memory_traffic += 40 * ids.sum() + 4 * parts.sum() * numbers
    load.memory_traffic += world * (ids * (stored + numbers) + 4 * parts * numbers) + touched_here * 2 * row


def plan_load(work: Workload, plan: Plan) -> RankLoad:
    """Return the load of each rank by a whole plan."""
    total = RankLoad.zero(work.world_size)
    for t in work.tables:
        total.add(load_of(work, plan.blocks_of(t.name)))
    return total


@dataclass(frozen=True)
class RouteTraffic:
    """Bytes that a rank sends in a step, to ranks of its machine and to others, and the time of the wires."""

    inside: float
    across: float
    seconds: float


@dataclass(frozen=True)
class ExchangeTraffic:
    """Traffic of both exchanges, with machines of `ranks_per_node` ranks."""

    ranks_per_node: int
    direct: RouteTraffic
    by_machine: RouteTraffic


def compare_exchanges(work: Workload, blocks: Sequence[Block]) -> ExchangeTraffic | None:
    """Compare both exchanges of a plan; None where only one is possible: no machines of several ranks, or owners sum
    bags.
    """
    world, settings = work.world_size, work.settings
    ranks_per_node = settings.ranks_per_node
    remote = [b for b in blocks if not b.replicated]
    if not (1 < ranks_per_node < world) or world % ranks_per_node or not remote or any(b.pooled for b in remote):
        return None
    machines = world // ranks_per_node
    direct_inside = direct_across = inside = across = 0.0
    for block in remote:
        table, width = work.by_name[block.table], len(block.columns)
        # An id and a gradient one way, a row the other: means of what is sent.
        each = work.id_bytes + width * work.number_bytes + work.comm_bytes(table, width)
        popularity, ids = work.popularity_of(block.table), work.local_batch * work.slots[block.table]
        alone, together = popularity.distinct(ids), popularity.distinct(ids * ranks_per_node)
        direct_inside += each * alone * (ranks_per_node - 1) / world
        direct_across += each * alone * (world - ranks_per_node) / world
        inside += each * alone * (1 - 1 / ranks_per_node)
        across += each * together / ranks_per_node * (1 - 1 / machines)
    return ExchangeTraffic(
        ranks_per_node,
        RouteTraffic(direct_inside, direct_across, _seconds(settings, direct_inside, direct_across, together=True)),
        RouteTraffic(inside, across, _seconds(settings, inside, across, together=False)),
    )


def choose_exchange(work: Workload, blocks: Sequence[Block]) -> tuple[int, ExchangeTraffic | None]:
    """Return `Plan.ranks_per_node` and the traffic by which it was chosen.

    Raises:
        UserError: machines are asked for and not possible.
    """
    exchange = work.settings.exchange
    traffic = compare_exchanges(work, blocks)
    if exchange == "by_machine" and traffic is None and work.world_size > 1:
        raise UserError(
            f"train.sharding.exchange=by_machine needs machines of several ranks that make up the world "
            f"(train.sharding.ranks_per_node={work.settings.ranks_per_node}, {work.world_size} ranks) and tables whose "
            f"bags are not summed by their owners (pooled)"
        )
    if traffic is None or exchange == "direct" or (exchange == "auto" and work.settings.kind != "auto"):
        return 1, traffic
    faster = traffic.by_machine.seconds < traffic.direct.seconds
    return (traffic.ranks_per_node if exchange == "by_machine" or faster else 1), traffic


def _seconds(settings: Sharding, inside: float, across: float, *, together: bool) -> float:
    """Return the time of three messages whose two wires work at the same time; or of six, one wire after the other."""
    near, far = inside / settings.node_gbps / 1e9, across / settings.network_gbps / 1e9
    messages = (3 if together else 6) * settings.latency_us * 1e-6
    return (max(near, far) if together else near + far) + messages
