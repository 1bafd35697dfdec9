"""A plan as arithmetic: fused tables, indices, and which part of the output each looked-up row adds to.

A fused table is one matrix on each rank: all blocks of one width, one storage, one reach (sharded or replicated), one
way to travel (rows, or bags summed by the owner) and one memory (the device's, or the host's with a cache on it). A
model whose tables have one width has one fused table, or two where small tables are replicated. An index is `first
index of the owner's rank + row in the owner's matrix`: indices in ascending order are grouped by owner, so sorting
a batch's indices both removes duplicates and groups them by owner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headrace.embeddings.sharding.plan import Block, Plan
from headrace.embeddings.storage.dtypes import DTYPES, stored_width

_INT32_MAX = 2**31 - 1


class FusedTable:
    """The blocks that share one matrix on each rank, and the arithmetic from codes to its rows."""

    def __init__(self, plan: Plan, number: int, blocks: Sequence[Block], rank: int) -> None:
        table = plan.by_name[blocks[0].table]
        self.number = number
        self.width = len(blocks[0].columns)
        self.dtype = DTYPES[table.storage]
        #: Columns of the matrix.
        self.stored_width = stored_width(table.storage, self.width)
        self.replicated = blocks[0].replicated
        #: Whether rows are in host memory, some of them on the device as well.
        self.cached = is_cached(plan, blocks[0])
        self.blocks = tuple(blocks)
        #: Whether lookups send no ids: everything is here.
        self.is_local = self.replicated or plan.world_size == 1
        #: Whether owners sum bags.
        self.pooled = blocks[0].pooled and not self.is_local
        world = 1 if self.replicated else plan.world_size
        rank_rows = torch.zeros(world, dtype=torch.int64)
        shards = []
        for block in blocks:
            rows, ranks = plan.by_name[block.table].rows, max(1, block.ranks)
            shard = torch.arange(ranks)
            holder = (block.first_rank + shard) % world
            shards.append((holder, rank_rows[holder]))
            rank_rows[holder] += (rows - shard + ranks - 1) // ranks
        #: First index of each rank, and the end: int64 [W + 1].
        self.rank_offsets = torch.cat([torch.zeros(1, dtype=torch.int64), rank_rows.cumsum(0)])
        #: Rows of this rank's matrix.
        self.rows = int(rank_rows[0 if self.replicated else rank])
        #: Addresses are int32 where there are fewer than 2^31: torch sorts those by radix, twice as fast.
        self.index_dtype = torch.int32 if int(self.rank_offsets[-1]) <= _INT32_MAX else torch.int64
        self._shard_offsets = torch.cat([self.rank_offsets[holder] + used for holder, used in shards])
        counts = torch.tensor([max(1, b.ranks) for b in blocks])
        #: By block: ranks that it is dealt to, its first shard.
        self._ranks = counts
        self._first_shard = counts.cumsum(0) - counts
        #: Whether each block is on one rank (or all are on all).
        self.one_rank_each = bool((counts == 1).all())
        self._share = {b.table: plan.by_name[b.table].cached for b in blocks}
        #: By block: its first row in this rank's matrix (-1: none here) and the rows' range.
        me = 0 if self.replicated else rank
        self.local_blocks: list[tuple[Block, range, int]] = []
        for block, (holder, used) in zip(blocks, shards, strict=True):
            here = (holder == me).nonzero().flatten().tolist()
            rows_here = plan.rows_on(block, rank)
            if here and len(rows_here):
                self.local_blocks.append((block, rows_here, int(used[here[0]])))

    @property
    def capacity(self) -> int:
        """Rows on the device where the fused table is cached: each block's share of those of this rank; 1 at least."""
        return max(1, sum(math.ceil(self._share[b.table] * len(rows)) for b, rows, _ in self.local_blocks))

    def shards_of(self, block: int) -> tuple[int, int]:
        """First shard of a block of the fused table, and how many it has: see `shard_offsets`."""
        return int(self._first_shard[block]), int(self._ranks[block])

    @property
    def shard_offsets(self) -> Tensor:
        """First index of each shard: int64."""
        return self._shard_offsets

    def indices(self, codes: Tensor, block: Tensor | int) -> Tensor:
        """Addresses of codes (any shape, int64) of the blocks with these numbers in the fused table (broadcastable)."""
        first = self._first_shard[block]
        if self.one_rank_each:
            return (codes + self._shard_offsets[first]).to(self.index_dtype)
        ranks = self._ranks[block]
        quotient = torch.div(codes, ranks, rounding_mode="trunc")
        return (self._shard_offsets[codes - quotient * ranks + first] + quotient).to(self.index_dtype)


def is_cached(plan: Plan, block: Block) -> bool:
    """Whether a block's rows are in host memory with a cache on the device."""
    return plan.by_name[block.table].cached < 1 and not block.replicated


@dataclass(frozen=True)
class Entry:
    """A feature's codes in one block: they add to the output pieces `piece`, `piece + stride`, ... (a sequence)."""

    lookup: int
    #: Number of the block in its fused table.
    block: int
    #: First slot of the feature in the padded codes.
    slot: int
    piece: int
    #: Pieces between the positions of a sequence; 0: all codes of the feature add to one piece.
    stride: int


@dataclass(frozen=True)
class Group:
    """The output pieces that are pooled from one fused table in one way: [B, pieces, width] of the output."""

    fused: int
    mode: Literal["sum", "max"]
    entries: tuple[Entry, ...]
    #: First output column of each piece.
    columns: tuple[int, ...]

    @property
    def pieces(self) -> int:
        return len(self.columns)


class Layout:
    """Fused tables, groups and output columns of a plan, seen from one rank."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        by_key: dict[tuple[int, str, bool, bool, bool], list[Block]] = {}
        for b in plan.blocks:
            summed = b.pooled and plan.world_size > 1
            key = (len(b.columns), plan.by_name[b.table].storage, b.replicated, summed, is_cached(plan, b))
            by_key.setdefault(key, []).append(b)
        self.fused_tables = [FusedTable(plan, i, blocks, rank) for i, blocks in enumerate(by_key.values())]
        self._place = {b: (a.number, i) for a in self.fused_tables for i, b in enumerate(a.blocks)}
        #: First output column of each lookup, and the end.
        self.columns = [0]
        for x in plan.lookups:
            vectors = x.length if x.pooling == "none" else 1
            self.columns.append(self.columns[-1] + vectors * plan.by_name[x.table].dim)
        self.groups = self._groups()
        self._runs = [self._find_runs(g) for g in self.groups]

    @property
    def width(self) -> int:
        """Columns of the output."""
        return self.columns[-1]

    def _groups(self) -> list[Group]:
        entries: dict[tuple[int, Literal["sum", "max"]], list[Entry]] = {}
        columns: dict[tuple[int, Literal["sum", "max"]], list[int]] = {}
        slot = 0
        for number, x in enumerate(self.plan.lookups):
            mode: Literal["sum", "max"] = "max" if x.pooling == "max" else "sum"
            blocks = self.plan.blocks_of(x.table)
            dim = self.plan.by_name[x.table].dim
            keys = [(self._place[b][0], mode) for b in blocks]
            stride = {k: keys.count(k) for k in keys}
            first = {k: len(columns.setdefault(k, [])) for k in stride}
            for position in range(x.length if x.pooling == "none" else 1):
                for b, key in zip(blocks, keys, strict=True):
                    if position == 0:
                        piece = len(columns[key])
                        entries.setdefault(key, []).append(
                            Entry(number, self._place[b][1], slot, piece, stride[key] if x.pooling == "none" else 0)
                        )
                    columns[key].append(self.columns[number] + position * dim + b.columns.start)
            assert all(len(columns[k]) > first[k] for k in stride)
            slot += x.length
        return [Group(k[0], k[1], tuple(entries[k]), tuple(columns[k])) for k in entries]

    def split(self, out: Tensor) -> list[Tensor]:
        """The output [B, width] by feature: [B, dim], or [B, length, dim] of a sequence. Views."""
        found = []
        for x, start, end in zip(self.plan.lookups, self.columns, self.columns[1:], strict=False):
            part = out[:, start:end]
            found.append(part.view(len(out), x.length, self.plan.by_name[x.table].dim) if x.pooling == "none" else part)
        return found

    def join(self, pooled: list[Tensor], samples: int) -> Tensor:
        """The output [B, width] from the groups' bags, [B * pieces, fused table's width] each."""
        if len(self._runs) == 1 and self._runs[0][0][2] == 0 and len(self._runs[0]) == 1:
            return pooled[0].view(samples, self.width)
        out = pooled[0].new_empty(samples, self.width)
        for runs, group, part in zip(self._runs, self.groups, pooled, strict=True):
            flat = part.view(samples, group.pieces * part.shape[1])
            for start, end, column in runs:
                out[:, column : column + end - start] = flat[:, start:end]
        return out

    def cut(self, out: Tensor) -> list[Tensor]:
        """The reverse of `join`: contiguous matrices [B * pieces, fused table's width] by group."""
        found = []
        for runs, group in zip(self._runs, self.groups, strict=True):
            parts = [out[:, column : column + end - start] for start, end, column in runs]
            flat = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            found.append(flat.reshape(-1, self.fused_tables[group.fused].width).contiguous())
        return found

    def _find_runs(self, group: Group) -> list[tuple[int, int, int]]:
        """Pieces that lie side by side in the output: (start, end) among the group's columns, first output column."""
        width = self.fused_tables[group.fused].width
        runs: list[tuple[int, int, int]] = []
        for i, column in enumerate(group.columns):
            if runs and runs[-1][2] + runs[-1][1] - runs[-1][0] == column:
                runs[-1] = (runs[-1][0], (i + 1) * width, runs[-1][2])
            else:
                runs.append((i * width, (i + 1) * width, column))
        return runs
