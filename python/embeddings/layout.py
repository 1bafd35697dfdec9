"""Layout of a plan: fused tables, index arithmetic, and the part of the output to which each row adds.

A fused table is one matrix on each rank: all blocks of one width, one storage, one reach (sharded or replicated), one
form in messages (rows, or bags summed by the owner) and one memory (the device's, the host's with a cache on the
device, or none: joined rows). A model whose tables have one width has one fused table, or two where small tables are
replicated. An index is `first index of the owner's rank + row in the owner's matrix`: indices in ascending order are
grouped by owner, so sorting a batch's indices both removes duplicates and groups them by owner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headrace.embeddings.sharding_plan import Block, Plan
from headrace.embeddings.storage import DTYPES, stored_width

_INT32_MAX = 2**31 - 1


class FusedTable:
    """Fused table: the blocks that share one matrix on each rank, and the arithmetic from codes to its rows."""

    def __init__(self, plan: Plan, number: int, blocks: Sequence[Block], rank: int) -> None:
        table = plan.by_name[blocks[0].table]
        self.number = number
        self.width = len(blocks[0].columns)
        self.dtype = DTYPES[table.storage]
        #: Columns of the matrix.
        self.stored_width = stored_width(table.storage, self.width)
        self.replicated = blocks[0].replicated
        #: True if rows are in host memory, some of them on the device as well.
        self.cached = is_cached(plan, blocks[0])
        #: True if no rank holds rows: they are joined to each lookup.
        self.joined = table.joined
        self.blocks = tuple(blocks)
        #: True if lookups send no ids: all rows are local.
        self.is_local = self.replicated or plan.world_size == 1
        #: True if owners sum bags.
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
        self.rows = 0 if self.joined else int(rank_rows[0 if self.replicated else rank])
        #: Addresses are int32 where there are fewer than 2^31: torch sorts those by radix, twice as fast.
        self.index_dtype = torch.int32 if int(self.rank_offsets[-1]) <= _INT32_MAX else torch.int64
        self._shard_offsets = torch.cat([self.rank_offsets[holder] + used for holder, used in shards])
        counts = torch.tensor([max(1, b.ranks) for b in blocks])
        #: By block: ranks that it is dealt to, its first shard.
        self._ranks = counts
        self._first_shard = counts.cumsum(0) - counts
        #: True if each block is on one rank (or all are on all).
        self.one_rank_each = bool((counts == 1).all())
        self._share = {b.table: plan.by_name[b.table].cached for b in blocks}
        #: By block: its first row in this rank's matrix (-1: none here) and the rows' range.
        me = 0 if self.replicated else rank
        self.local_blocks: list[tuple[Block, range, int]] = []
        for block, (holder, used) in zip(blocks, shards, strict=True):
            local_shards = (holder == me).nonzero().flatten().tolist()
            local_rows = plan.rows_on(block, rank)
            if local_shards and len(local_rows) and not self.joined:
                self.local_blocks.append((block, local_rows, int(used[local_shards[0]])))

    @property
    def capacity(self) -> int:
        """Rows on the device where the fused table is cached: each block's share of those of this rank; 1 at least."""
        return max(1, sum(math.ceil(self._share[b.table] * len(rows)) for b, rows, _ in self.local_blocks))

    def shards_of(self, block: int) -> tuple[int, int]:
        """Return the first shard of a block of the fused table, and its number of shards: see `shard_offsets`."""
        return int(self._first_shard[block]), int(self._ranks[block])

    @property
    def shard_offsets(self) -> Tensor:
        """First index of each shard: int64."""
        return self._shard_offsets

    def indices(self, codes: Tensor, block: Tensor | int) -> Tensor:
        """Return the indices of codes (any shape, int64) of the blocks with these numbers (broadcastable)."""
        first = self._first_shard[block]
        if self.one_rank_each:
            return (codes + self._shard_offsets[first]).to(self.index_dtype)
        ranks = self._ranks[block]
        quotient = torch.div(codes, ranks, rounding_mode="trunc")
        return (self._shard_offsets[codes - quotient * ranks + first] + quotient).to(self.index_dtype)


def is_cached(plan: Plan, block: Block) -> bool:
    """Return whether a block's rows are in host memory with a cache on the device."""
    return plan.by_name[block.table].cached < 1 and not block.replicated


@dataclass(frozen=True)
class Entry:
    """A feature's codes in one block: they add to the output piece `piece`."""

    lookup: int
    #: Number of the block in its fused table.
    block: int
    piece: int


@dataclass(frozen=True)
class TableGroup:
    """Output pieces that are pooled from one fused table in one way: [B, pieces, width] of an output.

    A sequence has groups of its own, in which each of its codes counts as a sample.
    """

    fused: int
    mode: Literal["sum", "max"]
    #: Number of the lookup that is a sequence; None: pieces of vectors, one a sample.
    sequence: int | None
    entries: tuple[Entry, ...]
    #: First output column of each piece.
    columns: tuple[int, ...]

    @property
    def pieces(self) -> int:
        return len(self.columns)


class Layout:
    """Fused tables, groups and output columns of a plan, seen from one rank.

    The outputs of a lookup are the vectors of all features side by side, [B, width], and of each sequence in turn those
    of its codes, [N, dim].
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        by_key: dict[tuple[int, str, bool, bool, bool, bool], list[Block]] = {}
        for b in plan.blocks:
            summed = b.pooled and plan.world_size > 1
            table = plan.by_name[b.table]
            key = (len(b.columns), table.storage, b.replicated, summed, is_cached(plan, b), table.joined)
            by_key.setdefault(key, []).append(b)
        self.fused_tables = [FusedTable(plan, i, blocks, rank) for i, blocks in enumerate(by_key.values())]
        self._place = {b: (a.number, i) for a in self.fused_tables for i, b in enumerate(a.blocks)}
        #: Numbers of the lookups that are sequences.
        self.sequences = tuple(i for i, x in enumerate(plan.lookups) if x.pooling == "none")
        #: First output column of each lookup, and the end; a sequence has none.
        self.columns = [0]
        for x in plan.lookups:
            self.columns.append(self.columns[-1] + (0 if x.pooling == "none" else plan.by_name[x.table].dim))
        self.groups = self._groups()
        self._runs = [self._find_runs(g) for g in self.groups]
        #: Widths of the outputs.
        self._widths = [self.width, *(plan.by_name[plan.lookups[i].table].dim for i in self.sequences)]
        #: By group: the number of its output.
        self._outputs = [0 if g.sequence is None else 1 + self.sequences.index(g.sequence) for g in self.groups]

    @property
    def width(self) -> int:
        """Columns of the vectors side by side."""
        return self.columns[-1]

    def _groups(self) -> list[TableGroup]:
        entries: dict[tuple[int, Literal["sum", "max"], int | None], list[Entry]] = {}
        columns: dict[tuple[int, Literal["sum", "max"], int | None], list[int]] = {}
        for number, x in enumerate(self.plan.lookups):
            mode: Literal["sum", "max"] = "max" if x.pooling == "max" else "sum"
            is_sequence = x.pooling == "none"
            for b in self.plan.blocks_of(x.table):
                fused, block = self._place[b]
                key = (fused, mode, number if is_sequence else None)
                group_columns = columns.setdefault(key, [])
                entries.setdefault(key, []).append(Entry(number, block, len(group_columns)))
                group_columns.append((0 if is_sequence else self.columns[number]) + b.columns.start)
        return [TableGroup(*k, tuple(entries[k]), tuple(columns[k])) for k in entries]

    def split(self, outs: Sequence[Tensor]) -> list[Tensor]:
        """Split the outputs by feature: [B, dim], or [N, dim] of a sequence. Views."""
        vectors, sequences = [], iter(outs[1:])
        for x, start, end in zip(self.plan.lookups, self.columns, self.columns[1:], strict=False):
            vectors.append(next(sequences) if x.pooling == "none" else outs[0][:, start:end])
        return vectors

    def join(self, pooled: list[Tensor], samples: int) -> list[Tensor]:
        """Join the groups' bags, [B * pieces, fused table's width] each, to the outputs."""
        outs: list[Tensor | None] = [None] * len(self._widths)
        for number, runs, group, part in zip(self._outputs, self._runs, self.groups, pooled, strict=True):
            width = self._widths[number]
            flat = part.view(len(part) // group.pieces, group.pieces * part.shape[1])
            if len(runs) == 1 and runs[0] == (0, width, 0):
                outs[number] = flat
                continue
            out = outs[number]
            if out is None:
                out = outs[number] = part.new_empty(len(flat), width)
            for start, end, column in runs:
                out[:, column : column + end - start] = flat[:, start:end]
        if outs[0] is None:  # nothing but sequences
            outs[0] = torch.zeros(samples, 0)
        return [out for out in outs if out is not None]

    def cut(self, outs: Sequence[Tensor]) -> list[Tensor]:
        """Cut outputs into contiguous matrices [B * pieces, fused table's width] by group: the reverse of `join`."""
        matrices = []
        for number, runs, group in zip(self._outputs, self._runs, self.groups, strict=True):
            parts = [outs[number][:, column : column + end - start] for start, end, column in runs]
            flat = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            matrices.append(flat.reshape(-1, self.fused_tables[group.fused].width).contiguous())
        return matrices

    def _find_runs(self, group: TableGroup) -> list[tuple[int, int, int]]:
        """Find pieces that lie side by side in the output: (start, end) among the group's columns, first output
        column.
        """
        width = self.fused_tables[group.fused].width
        runs: list[tuple[int, int, int]] = []
        for i, column in enumerate(group.columns):
            if runs and runs[-1][2] + runs[-1][1] - runs[-1][0] == column:
                runs[-1] = (runs[-1][0], (i + 1) * width, runs[-1][2])
            else:
                runs.append((i * width, (i + 1) * width, column))
        return runs


@dataclass(frozen=True)
class TableRows:
    """Some rows of a table.

    Attributes:
        codes: which, or of a table of raw ids whose; int64 [n], ascending, none twice.
        rows: as they are stored, [n, stored width].
    """

    codes: Tensor
    rows: Tensor


class JoinedRows:
    """Rows of a fused table that no process holds: its indices become positions in a small matrix.

    Places ascend as indices do, so whatever is sorted, or summed in order, is so as with the whole table: to the bit.

    Args:
        plan: of the tables, for one rank.
        fused: which of its fused tables.
    """

    def __init__(self, plan: Plan, fused: FusedTable) -> None:
        self._plan, self._fused = plan, fused
        self._indices = torch.empty(0, dtype=fused.index_dtype)

    def set(self, rows: Mapping[str, TableRows]) -> Tensor:
        """Return the matrix of some rows, [N, stored width], to which `places` refers from now on.

        Args:
            rows: by table; those of other tables are left alone.

        Raises:
            ValueError: rows of another width or type than the plan's, or codes that do not ascend or are outside.
        """
        fused = self._fused
        indices, parts = [self._indices[:0]], [torch.empty(0, fused.stored_width, dtype=fused.dtype)]
        for number, block in enumerate(fused.blocks):
            table_rows = rows.get(block.table)
            if table_rows is None or not table_rows.codes.numel():
                continue
            if table_rows.rows.dtype is not fused.dtype or table_rows.rows.shape != (
                table_rows.codes.numel(),
                fused.stored_width,
            ):
                raise ValueError(
                    f"rows of table '{block.table}' are {table_rows.rows.dtype} {list(table_rows.rows.shape)}"
                )
            inside = int(table_rows.codes[0]) >= 0 and int(table_rows.codes[-1]) < self._plan.by_name[block.table].rows
            if not inside or not bool((table_rows.codes.diff() > 0).all()):
                raise ValueError(f"codes of table '{block.table}' do not ascend, or are outside")
            indices.append(fused.indices(table_rows.codes, number))
            parts.append(table_rows.rows)
        # On one rank the blocks of a fused table lie one behind the other: the indices ascend.
        self._indices = torch.cat(indices)
        return torch.cat(parts)

    def places(self, indices: Tensor) -> Tensor:
        """Return the rows of the matrix for indices [N], in their type.

        Raises:
            RuntimeError: a row was not brought.
        """
        if not indices.numel():
            return indices
        positions = torch.searchsorted(self._indices, indices).clamp_(max=max(0, self._indices.numel() - 1))
        if not self._indices.numel() or not torch.equal(self._indices[positions], indices):
            tables = ", ".join(dict.fromkeys(b.table for b in self._fused.blocks))
            raise RuntimeError(f"rows of the tables {tables} are looked up that were not brought")
        return positions.to(indices.dtype)
