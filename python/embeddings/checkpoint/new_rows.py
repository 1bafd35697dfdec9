"""Initial values of rows that a save lacks: the mean of its rows, or of the rows of their segment.

A new id then begins as an average one, whose vector the dense part knows how to read, and moves from there. (For ids
that start cold, means over similar ids are a common start: Briand et al., "A Semi-Personalized System for User Cold
Start Recommendation", 2021.) Optimizer states of new rows stay those of rows that no step has touched, at zero, so that
they learn at the full rate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.sharding_plan import Block
from headrace.embeddings.storage import decode, encode

#: Rows that are decoded or encoded at a time.
_ROWS = 65_536


@dataclass(frozen=True)
class GrownTable:
    """A table with more rows than were saved.

    Attributes:
        known: the rows whose values have a meaning and were saved; special codes come before them.
        segments: int32 [rows of the table], the segment of each row's id, -1 where it is not known; None: they have
            none. The same on all ranks.
    """

    known: range
    segments: NDArray[np.int32] | None = None


def start_at_means(embeddings: LocalTables, grown: Mapping[str, GrownTable]) -> None:
    """Set the rows after `known` of these tables to means over known rows. Collective.

    A row of a segment that has a known row starts at the segment's mean, any other at the table's; in a table without
    known rows all stay where they are. Means are taken in float64 over all ranks.
    """
    embeddings.invalidate()
    for name, table in sorted(grown.items()):
        means = _means(embeddings, name, table)
        if means is None:
            continue
        for matrix, block, rows, first in _blocks(embeddings, name):
            of_block = means.rows[:, block.columns.start : block.columns.stop].float()
            for part in _parts(rows, table.known.stop, rows.stop):
                positions = first + (part - rows.start) // rows.step
                place = _places(table, part)
                place[~means.has_rows[place]] = 0
                values = encode(of_block[torch.from_numpy(place)], matrix.dtype)
                matrix[torch.from_numpy(positions).to(matrix.device)] = values.to(matrix.device)


@dataclass(frozen=True)
class _Means:
    """Means of the whole table (0) and of segment s (s + 1): float64 [segments + 1, dim]; True where a row is known."""

    rows: Tensor
    has_rows: NDArray[np.bool_]


def _means(embeddings: LocalTables, name: str, table: GrownTable) -> _Means | None:
    dim = embeddings.plan.by_name[name].dim
    segments = 0 if table.segments is None else int(table.segments.max(initial=-1)) + 1
    sums = torch.zeros(segments + 1, dim, dtype=torch.float64)
    counts = torch.zeros(segments + 1, dtype=torch.float64)
    is_chief = embeddings.collective.world.rank == 0
    for matrix, block, rows, first in _blocks(embeddings, name):
        if block.replicated and not is_chief:
            continue
        columns = slice(block.columns.start, block.columns.stop)
        for part in _parts(rows, table.known.start, table.known.stop):
            positions = torch.from_numpy(first + (part - rows.start) // rows.step)
            values = decode(matrix.index_select(0, positions.to(matrix.device))).cpu().double()
            place = torch.from_numpy(_places(table, part))
            sums[0, columns] += values.sum(dim=0)
            if segments:
                of_segment = place > 0
                part_sums = torch.zeros(segments + 1, values.shape[1], dtype=torch.float64)
                part_sums.index_add_(0, place[of_segment], values[of_segment])
                sums[:, columns] += part_sums
            if columns.start == 0:
                counts[0] += len(part)
                counts += torch.bincount(place[place > 0], minlength=segments + 1).double()
    embeddings.collective.all_reduce_sum([sums, counts])
    if not counts[0]:
        return None
    return _Means(sums / counts.clamp(min=1)[:, None], (counts > 0).numpy())


def _parts(rows: range, first: int, stop: int) -> Iterator[NDArray[np.int64]]:
    """Yield the part of `rows` in [first, stop), at most _ROWS at a time: int64, ascending."""
    inside = rows[bisect_left(rows, first) : bisect_left(rows, stop)]
    for start in range(0, len(inside), _ROWS):
        part = inside[start : start + _ROWS]
        yield np.arange(part.start, part.stop, part.step)


def _places(table: GrownTable, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of each row's mean; 0: the mean of the table."""
    if table.segments is None:
        return np.zeros(len(rows), np.int64)
    return table.segments[rows].astype(np.int64) + 1


def _blocks(embeddings: LocalTables, name: str) -> Iterator[tuple[Tensor, Block, range, int]]:
    """Yield this rank's blocks of a table: (matrix, block, rows, position of the first row in the matrix)."""
    for fused in embeddings.layout.fused_tables:
        for block, rows, first in fused.local_blocks:
            if block.table == name:
                yield embeddings.weights[fused.number], block, rows, first
