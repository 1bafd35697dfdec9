"""The two messages of a lookup: ids to their owners and rows back; gradients to the owners.

Pure functions over a rank's addresses (headrace.embeddings.plan) and a collective. All tables travel in one message
each way, each distinct row once. Duplicates are found by one stable sort, and sums over duplicates run in that order
(embedding_bag sums a bag front to back), so the same input gives the same bits: `index_add_` would be neither
parallel nor faster here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from headrace.embeddings.collective import Collective


@dataclass(frozen=True)
class Duplicates:
    """Equal values of a vector [N], found by sorting it."""

    #: Distinct values, ascending: [U].
    unique: Tensor
    #: Positions in the vector, grouped by value, first position first: int64 [N].
    order: Tensor
    #: Where each value's group starts in `order`: int64 [U].
    starts: Tensor
    #: Index into `unique` by place in `order`: int64 [N].
    group: Tensor

    def inverse(self) -> Tensor:
        """Index into `unique` of each element of the vector: int64 [N]."""
        return torch.empty_like(self.order).scatter_(0, self.order, self.group)

    def sum_rows(self, x: Tensor, row_of: Tensor | None = None) -> Tensor:
        """Sum over equal values, float32 [U, D]: element i of the vector adds x[row_of[i]] (None: x[i])."""
        rows = self.order if row_of is None else row_of.index_select(0, self.order)
        return sum_bags(x, rows, self.starts)


def find_duplicates(x: Tensor) -> Duplicates:
    """Sort out the duplicates of an integer vector [N]."""
    values, order = torch.sort(x, stable=True)
    is_first = torch.ones_like(values, dtype=torch.bool)
    torch.ne(values[1:], values[:-1], out=is_first[1:])
    starts = is_first.nonzero().view(-1)
    return Duplicates(values.index_select(0, starts), order, starts, is_first.cumsum(0) - 1)


def sum_bags(x: Tensor, rows: Tensor, starts: Tensor) -> Tensor:
    """Sum of x[rows[starts[i] : starts[i + 1]]] for each i: float32 [len(starts), D]; an empty bag is zero."""
    if rows.numel() == 0:
        return x.new_zeros(starts.numel(), x.shape[1])
    return embedding_bag(rows, x, starts, mode="sum")


@dataclass(frozen=True)
class Request:
    """What this rank asked for, and what it was asked for, in one lookup."""

    #: Distinct rows asked for, by owner: [W], summing to U.
    sent: list[int]
    #: Rows of the own weight matrix that each rank asks for, ranks in order: [R].
    rows: Tensor
    #: How many of them each rank asks for: [W], summing to R.
    received: list[int]


def send_ids(unique: Tensor, rank_starts: Tensor, collective: Collective) -> Request:
    """Tell the owners which rows are wanted; learn which are wanted from here. One all-to-all.

    Args:
        unique: addresses, ascending: [U].
        rank_starts: first address of each rank and the end: int64 [W + 1].
    """
    bounds = torch.searchsorted(unique, rank_starts.to(unique.dtype))
    sent = bounds.diff()
    # The owner's own row numbers travel, so that the owner has nothing to decode.
    local = unique - torch.repeat_interleave(rank_starts[:-1].to(unique.dtype), sent, output_size=unique.numel())
    split: list[int] = sent.tolist()
    rows, received = collective.all_to_all(local, split)
    return Request(sent=split, rows=rows, received=received)


def fetch_rows(request: Request, weight: Tensor, collective: Collective) -> Tensor:
    """The rows asked for, in the order of the addresses: float32 [U, D]. One all-to-all."""
    rows, _ = collective.all_to_all(weight.index_select(0, request.rows), request.received)
    return rows


def return_gradients(request: Request, gradients: Tensor, collective: Collective) -> Tensor:
    """Send gradients [U, D] of the rows asked for to their owners; those of `request.rows` arrive, [R, D]."""
    mine, _ = collective.all_to_all(gradients, request.sent)
    return mine


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Sum gradients by row: [(rows [N], gradients [N, D]), ...] -> distinct rows int64 [U], sums [U, D]."""
    rows = torch.cat([r for r, _ in parts])
    gradients = torch.cat([g for _, g in parts])
    found = find_duplicates(rows)
    return found.unique.long(), found.sum_rows(gradients)
