"""Rows that are brought to a lookup, where no process has the whole table: their indices, and where they stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.embeddings.sharding.layout import FusedTable
from headrace.embeddings.sharding.plan import Plan


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
    """The rows of a fused table that is not held: its indices become places in a small matrix.

    Places ascend as indices do, so whatever is sorted, or summed in order, is so as with the whole table: to the bit.

    Args:
        plan: of the tables, for one rank.
        fused: which of its fused tables.
    """

    def __init__(self, plan: Plan, fused: FusedTable) -> None:
        self._plan, self._fused = plan, fused
        self._indices = torch.empty(0, dtype=fused.index_dtype)

    def set(self, rows: Mapping[str, TableRows]) -> Tensor:
        """The matrix of some rows, [N, stored width], which `places` is about from now on.

        Args:
            rows: by table; those of other tables are left alone.

        Raises:
            ValueError: rows of another width or type than the plan's, or codes that do not ascend or are outside.
        """
        fused = self._fused
        indices, parts = [self._indices[:0]], [torch.empty(0, fused.stored_width, dtype=fused.dtype)]
        for number, block in enumerate(fused.blocks):
            given = rows.get(block.table)
            if given is None or not given.codes.numel():
                continue
            if given.rows.dtype is not fused.dtype or given.rows.shape != (given.codes.numel(), fused.stored_width):
                raise ValueError(f"rows of table '{block.table}' are {given.rows.dtype} {list(given.rows.shape)}")
            inside = int(given.codes[0]) >= 0 and int(given.codes[-1]) < self._plan.by_name[block.table].rows
            if not inside or not bool((given.codes.diff() > 0).all()):
                raise ValueError(f"codes of table '{block.table}' do not ascend, or are outside")
            indices.append(fused.indices(given.codes, number))
            parts.append(given.rows)
        # On one rank the blocks of a fused table lie one behind the other: the indices ascend.
        self._indices = torch.cat(indices)
        return torch.cat(parts)

    def places(self, indices: Tensor) -> Tensor:
        """Rows of the matrix, in the type of the indices [N].

        Raises:
            RuntimeError: a row was not brought.
        """
        if not indices.numel():
            return indices
        found = torch.searchsorted(self._indices, indices).clamp_(max=max(0, self._indices.numel() - 1))
        if not self._indices.numel() or not torch.equal(self._indices[found], indices):
            tables = ", ".join(dict.fromkeys(b.table for b in self._fused.blocks))
            raise RuntimeError(f"rows of the tables {tables} are looked up that were not brought")
        return found.to(indices.dtype)
