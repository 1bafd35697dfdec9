"""Duplicates in a vector, and sums over them.

Found by one stable sort, or as if by one; sums over duplicates run in that order (embedding_bag sums a bag front to
back), so the same input gives the same bits: `index_add_` would be neither parallel nor faster here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from headrace.compute import native
from headrace.embeddings.kernels import cpu, dispatch


class Duplicates:
    """Equal values of a vector [N]. Properties are computed on first use."""

    def __init__(
        self,
        unique: Tensor,
        order: Tensor | None = None,
        starts: Tensor | None = None,
        group: Tensor | None = None,
        *,
        inverse: Tensor | None = None,
    ) -> None:
        """Create from either all of `order`, `starts` and `group`, or `inverse`."""
        #: Distinct values, in the order of `find_duplicates`: [U].
        self.unique = unique
        self._order, self._starts, self._group, self._inverse = order, starts, group, inverse

    @property
    def order(self) -> Tensor:
        """Positions in the vector, grouped by value, first position first: int64 [N]."""
        return self._sorted()[0]

    @property
    def starts(self) -> Tensor:
        """First position of each value's group in `order`: int64 [U]."""
        return self._sorted()[1]

    @property
    def group(self) -> Tensor:
        """Index into `unique` by position in `order`: int64 [N]."""
        if self._group is None:
            self._group = self.inverse().index_select(0, self.order)
        return self._group

    def inverse(self) -> Tensor:
        """Return the index into `unique` of each element of the vector: int64 [N]."""
        if self._inverse is None:
            self._inverse = torch.empty_like(self.order).scatter_(0, self.order, self.group)
        return self._inverse

    def _sorted(self) -> tuple[Tensor, Tensor]:
        if self._order is None or self._starts is None:
            self._order, self._starts = cpu.group(self.inverse(), self.unique.numel())
        return self._order, self._starts

    def in_order(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return values int64 [N] in the order of `order`, and `starts`."""
        if self._order is None and self._inverse is not None:  # without a way through the positions
            return cpu.group(self._inverse, self.unique.numel(), values)
        return values.index_select(0, self.order), self.starts

    def sum_rows(self, x: Tensor, row_of: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Sum over equal values, float32 [U, D]: element i adds weights[i] * x[row_of[i]] (None: 1, x[i])."""
        rows = self.order if row_of is None else row_of.index_select(0, self.order)
        return sum_bags(x, rows, self.starts, None if weights is None else weights.index_select(0, self.order))

    def part(self, start: int, end: int) -> Duplicates:
        """Return the same distinct values for the elements [start, end) alone; a value may have none there."""
        inside = (self.order >= start) & (self.order < end)
        group = self.group[inside]
        counts = torch.bincount(group, minlength=self.unique.numel())
        return Duplicates(self.unique, self.order[inside] - start, counts.cumsum(0) - counts, group)


def find_duplicates(x: Tensor, ends: Tensor | None = None) -> Duplicates:
    """Find the duplicates of an integer vector [N]; int32: none negative.

    Args:
        x: the vector.
        ends: None: distinct values ascend. Otherwise they are sorted by range alone: range g ends before value ends[g],
            the last behind all (int64 [G], ascending). Inside of a range they come in the order of their first
            elements, where there is a loop for it: what belongs to them is then read and written front to back by who
            goes through the vector.
    """
    if x.dtype is torch.int32 and x.device.type == "cpu" and native.library() is not None:
        distinct = cpu.distinct(x, ends)
        return Duplicates(*cpu.duplicates(x)) if distinct is None else Duplicates(distinct[0], inverse=distinct[1])
    values, order = torch.sort(x, stable=True)
    is_first = torch.ones_like(values, dtype=torch.bool)
    torch.ne(values[1:], values[:-1], out=is_first[1:])
    starts = is_first.nonzero().view(-1)
    return Duplicates(values.index_select(0, starts), order, starts, is_first.cumsum(0) - 1)


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """Return x[rows]: [len(rows), D]."""
    if cpu.usable(x):
        return cpu.pool_sum(x, rows, rows.numel())
    return x.index_select(0, rows)


def sum_bags(x: Tensor, rows: Tensor, starts: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum of weights[j] * x[rows[j]] over j in starts[i] : starts[i + 1]: [len(starts), D]; an empty bag is zero."""
    if rows.numel() == 0:
        return x.new_zeros(starts.numel(), x.shape[1], dtype=torch.float32)
    if cpu.usable(x):
        return cpu.pool_sum(x, rows, starts.numel(), starts, weights)
    if dispatch.usable(x):
        return dispatch.pool_sum(x, rows, starts.numel(), starts, weights)
    return embedding_bag(rows, x, starts.to(rows.dtype), mode="sum", per_sample_weights=weights)
