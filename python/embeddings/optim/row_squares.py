"""The mean squared gradient of rows whose columns are on several ranks, for optimizers that work by row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.comm.base import Collective
from headrace.embeddings.sharding.layout import FusedTable, Layout

#: By fused table: (distinct rows int64 [U], their gradient float32 [U, width]).
Gradients = list[tuple[Tensor, Tensor]]


class RowSquares:
    """The mean of each touched row's squared gradient over all columns, also where ranks hold columns of one row.

    Every block of columns of a table is touched in the same rows, so the ranks exchange plain vectors of sums.
    """

    def __init__(self, layout: Layout, collective: Collective) -> None:
        plan = layout.plan
        self._layout = layout
        self._collective = collective
        #: Tables in several blocks, with the rank of each block.
        self._cut = {
            t.name: [b.first_rank for b in plan.blocks_of(t.name)]
            for t in plan.tables
            if len(plan.blocks_of(t.name)) > 1
        }
        for name in self._cut:
            if any(b.ranks > 1 for b in plan.blocks_of(name)):
                raise ValueError(f"rowwise_adagrad: table '{name}' is cut by columns and by rows; cut it one way")

    def of(self, fused_tables: Sequence[FusedTable], gradients: Gradients) -> list[Tensor]:
        """By fused table: float32 [U, 1]. Collective where a table is in several blocks."""
        means = []
        #: Sums of this rank's blocks of cut tables, in order of their columns: (first column, fused table, start, end).
        mine: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in self._cut}
        for i, (fused, (rows, grad)) in enumerate(zip(fused_tables, gradients, strict=True)):
            means.append(grad.square().sum(1, keepdim=True))
            ends = [first + len(r) for _, r, first in fused.local_blocks]
            bounds = [0, *torch.searchsorted(rows, torch.tensor(ends, dtype=rows.dtype)).tolist()]
            for (block, _, _), start, end in zip(fused.local_blocks, bounds, bounds[1:], strict=False):
                if block.table in mine:
                    mine[block.table].append((block.columns.start, i, start, end))
                else:
                    means[i][start:end] /= self._layout.plan.by_name[block.table].dim
        if self._cut:
            self._complete(means, mine)
        return means

    def _complete(self, sums: list[Tensor], mine: dict[str, list[tuple[int, int, int, int]]]) -> None:
        """Replace the sums of cut tables' blocks by the means over all columns. One all-to-all."""
        size = self._collective.world.size
        message, counts = [torch.empty(0)], []
        for rank in range(size):
            parts = [
                sums[i][start:end, 0]
                for name, ranks in self._cut.items()
                if rank in ranks
                for _, i, start, end in sorted(mine[name])
            ]
            message += parts
            counts.append(sum(p.numel() for p in parts))
        received, back = self._collective.all_to_all(torch.cat(message), counts)
        #: (block's number among the table's, its sums), by table.
        found: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in self._cut if mine[name]}
        # A sender's message: tables in plan order, its blocks by column.
        for rank, sent in enumerate(torch.split(received, back)):
            at = 0
            for name in found:
                length = mine[name][0][3] - mine[name][0][2]
                for number in (p for p, r in enumerate(self._cut[name]) if r == rank):
                    found[name].append((number, sent[at : at + length]))
                    at += length
        for name, parts_of_table in found.items():
            by_column = [part for _, part in sorted(parts_of_table, key=lambda x: x[0])]
            mean = torch.stack(by_column).sum(0) / self._layout.plan.by_name[name].dim
            for _, i, start, end in mine[name]:
                sums[i][start:end, 0] = mean
