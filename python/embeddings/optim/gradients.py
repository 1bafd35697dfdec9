"""Gradients of rows on their way from backward to step: not summed before somebody must."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.embeddings.input.addressing import JaggedIndices
from headrace.embeddings.kernels import cpu
from headrace.embeddings.kernels.duplicates import Duplicates, find_duplicates
from headrace.embeddings.sharding.layout import FusedTable


@dataclass(frozen=True)
class Gradient:
    """What one backward pass says of a fused table's rows on this rank.

    The gradient of row `duplicates.unique[u]` is the sum, over its occurrences i in `duplicates`' order, of
    weights[i] * grad[bag[i]] / divisor[bag[i]] (None: 1, row i of `grad`, 1).
    """

    #: Distinct rows of the fused table's matrix (indices, where no other rank has any).
    duplicates: Duplicates
    #: float32 [M, D].
    grad: Tensor
    bag: Tensor | None = None
    weights: Tensor | None = None
    divisor: Tensor | None = None
    #: The memory addresses of `grad`'s rows, int64 [M], which are not in `grad` then: it is [0, D].
    pointers: Tensor | None = None
    #: What that memory belongs to.
    keep_alive: object = None

    @staticmethod
    def of_bags(duplicates: Duplicates, grad: Tensor, jagged: JaggedIndices) -> Gradient:
        """Of a pooled sum."""
        return Gradient(duplicates, grad, jagged.bag_ids, jagged.weights, jagged.divisor)

    @staticmethod
    def of_rows(rows: Tensor, grad: Tensor) -> Gradient:
        """Of rows [N] that may repeat."""
        return Gradient(find_duplicates(rows), grad)

    @staticmethod
    def of_sums(unique: Tensor, grad: Tensor) -> Gradient:
        """Of distinct rows, sorted as `Updater.runs` says."""
        each = torch.arange(unique.numel())
        return Gradient(Duplicates(unique, each, each, each), grad)

    @property
    def rows(self) -> Tensor:
        """Distinct rows: int32 or int64 [U]."""
        return self.duplicates.unique

    def sums(self) -> Tensor:
        """The gradient of each distinct row: float32 [U, D]."""
        if self.pointers is not None:
            order = self.duplicates.order
            weights = None if self.weights is None else self.weights.index_select(0, order)
            pointers = self.pointers.index_select(0, order if self.bag is None else self.bag.index_select(0, order))
            return cpu.sum_pointers(pointers, self.grad.shape[1], self.duplicates.starts, weights)
        grad = self.grad if self.divisor is None else self.grad / self.divisor
        return self.duplicates.sum_rows(grad, self.bag, self.weights)

    def materialized(self) -> Gradient:
        """The same in memory of its own."""
        return self if self.pointers is None else Gradient.of_sums(self.rows, self.sums())


class NonFiniteGradient(ArithmeticError):
    """A gradient is NaN or infinite on some rank; nothing was changed. `tables`: whose it is on this rank."""

    def __init__(self, tables: Sequence[str]) -> None:
        super().__init__(f"the gradient is not finite (tables here: {', '.join(tables) or 'none'})")
        self.tables = list(tables)


def non_finite_tables(fused: FusedTable, rows: Tensor, grad: Tensor) -> set[str]:
    """Tables of a fused table with a NaN or infinite number in the gradient float32 [U, D] of its rows [U]."""
    bad = rows[~grad.isfinite().all(dim=1)]
    return {
        b.table for b, held, first in fused.local_blocks if bool(((bad >= first) & (bad < first + len(held))).any())
    }


def merge(parts: Sequence[Gradient]) -> Gradient:
    """One gradient of several backward passes (at least one)."""
    if len(parts) == 1:
        return parts[0]
    return Gradient.of_rows(torch.cat([p.rows.long() for p in parts]), torch.cat([p.sums() for p in parts]))
