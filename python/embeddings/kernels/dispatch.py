"""Dispatch between devices: which tensors the Triton kernels take, calls of the kernels, and sums over duplicates.

    with default_device(torch.device("cuda")):
        torch.zeros(3)      # on the GPU

Triton is imported at the first use, so that machines without a GPU need not have it.

Duplicates of a vector are found by one stable sort, or as if by one. Sums over them run in that order (embedding_bag
sums a bag front to back), so the same input gives the same bits: `index_add_` would be neither parallel nor faster.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from headrace.compute import native
from headrace.embeddings.kernels import cpu
from headrace.errors import UserError

#: Types of rows that the kernels take.
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@cache
def kernels() -> Any:
    """Return the module headrace.embeddings.kernels.gpu."""
    from headrace.embeddings.kernels import gpu

    return gpu


def usable(*tensors: Tensor) -> bool:
    """Return whether the kernels can work on these tables: contiguous floats on a GPU."""
    return all(t.device.type == "cuda" and t.dtype in _TYPES and t.is_contiguous() for t in tensors)


def reads_directly(table: Tensor) -> bool:
    """Return whether lookups read rows of a table in place: rows of 16 bits by the kernels alone."""
    return table.dtype is torch.float32 or usable(table)


def default_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which new tensors without a device of their own are on `device`.

    For the CPU nothing at all, at no cost.

    So code that says nothing of devices serves both. It is a thread's own: autograd's threads enter it anew.
    """
    return nullcontext() if device.type == "cpu" else device


def pool_sum(
    table: Tensor, index: Tensor, bags: int, starts: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Pool on a GPU; see gpu.pool_sum."""
    pooled: Tensor = kernels().pool_sum(table, index, bags, starts, weights)
    return pooled


def check(device: torch.device) -> None:
    """Raise UserError where tables cannot be on a device: there is no such GPU."""
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device '{device}': embedding tables are on 'cpu' or 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"device '{device}': torch {torch.__version__} sees no GPU here: see `nvidia-smi`, or set it to cpu"
        )


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
    if usable(x):
        return pool_sum(x, rows, starts.numel(), starts, weights)
    return embedding_bag(rows, x, starts.to(rows.dtype), mode="sum", per_sample_weights=weights)
