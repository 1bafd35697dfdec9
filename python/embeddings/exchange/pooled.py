"""Bags that are summed by the owners of their rows: one vector travels for each bag and owner, not one for each row.

What is less depends on the batch: long bags with few duplicates are cheaper this way, single ids never. The plan says
so for each table (`Block.pooled`). Where one rank has all rows of a bag, it sums them front to back as the asking rank
would: the same bits. By rows, each owner sums its part of a bag, and the parts are summed in order of the owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace import native
from headrace.embeddings.input.addressing import Occurrences
from headrace.embeddings.kernels import cpu
from headrace.embeddings.kernels.duplicates import find_duplicates, sum_bags
from headrace.embeddings.sharding.layout import Arena
from headrace.embeddings.storage.dtypes import decode


@dataclass(frozen=True)
class Parts:
    """A batch's bags of one arena, cut by owner, as the asking rank has them. N ids, P parts that are not empty."""

    #: Addresses by owner, then by bag, in each bag front to back: [N].
    addresses: Tensor
    #: float32 [N], where a lookup is weighted.
    weights: Tensor | None
    #: Which addresses begin a part: bool [N].
    begins: Tensor
    #: Bag of each part: int64 [P].
    bag: Tensor
    #: Ids, and parts, for each owner: [W].
    ids: list[int]
    parts: list[int]

    def sum(self, vectors: Tensor, bags: int) -> Tensor:
        """The bags' sums [bags, D] of their parts' vectors [P, D]; zeros for empty bags."""
        if cpu.usable(vectors):
            return sum_bags(vectors, *cpu.group(self.bag, bags))
        order = torch.argsort(self.bag, stable=True)
        counts = torch.bincount(self.bag, minlength=bags)
        return sum_bags(vectors, order, counts.cumsum(0) - counts)


def cut_bags(arena: Arena, occurrences: Occurrences) -> Parts:
    """Sort a batch's occurrences by owner."""
    world = len(arena.rank_starts) - 1
    assert occurrences.bag is not None
    if occurrences.addresses.device.type == "cpu" and native.library() is not None:
        return Parts(*cpu.cut_bags(occurrences.addresses, occurrences.bag, occurrences.weights, arena.rank_starts))
    ends = arena.rank_starts[1:].to(occurrences.addresses.dtype)
    owner = torch.bucketize(occurrences.addresses, ends, right=True, out_int32=True)
    order = torch.argsort(owner, stable=True)
    owner, bag = owner.index_select(0, order), occurrences.bag.index_select(0, order)
    begins = torch.ones(bag.numel(), dtype=torch.bool)
    torch.ne(bag[1:], bag[:-1], out=begins[1:])
    begins[1:] |= owner[1:] != owner[:-1]
    return Parts(
        addresses=occurrences.addresses.index_select(0, order),
        weights=None if occurrences.weights is None else occurrences.weights.index_select(0, order),
        begins=begins,
        bag=bag[begins],
        ids=torch.bincount(owner, minlength=world).tolist(),
        parts=torch.bincount(owner[begins], minlength=world).tolist(),
    )


@dataclass(frozen=True)
class Asked:
    """What the ranks ask of one arena here, where bags are summed by the owner; parts in order of the ranks."""

    #: First id of each part: int64 [P].
    starts: Tensor
    #: Part of each id: int64 [N].
    part: Tensor
    #: float32 [N], where a lookup is weighted.
    weights: Tensor | None

    @staticmethod
    def of(begins: Tensor, weights: Tensor | None) -> Asked:
        """From which ids begin a part: bool [N]."""
        return Asked(begins.nonzero().view(-1), begins.cumsum(0) - 1, weights)

    def sums_into(self, parts: Sequence[Tensor], weight: Tensor, rows: Tensor) -> None:
        """`sums` of a float32 matrix, by the C++ loop, in consecutive pieces of memory: float32 [P_r, D] each."""
        starts, first = torch.split(self.starts, [len(p) for p in parts]), 0
        for number, (part, of_part) in enumerate(zip(parts, starts, strict=True)):
            following = next((int(s[0]) for s in starts[number + 1 :] if len(s)), rows.numel())
            if len(part):
                weights = None if self.weights is None else self.weights[first:following]
                cpu.pool_sum(weight, rows[first:following], len(part), of_part - first, weights, part)
            first = following

    def sums(self, weight: Tensor, rows: Tensor) -> Tensor:
        """The parts' sums: float32 [P, D]; of another storage each distinct row is decoded once."""
        if weight.dtype is not torch.float32:
            found = find_duplicates(rows)
            weight, rows = decode(weight.index_select(0, found.unique)), found.inverse()
        return sum_bags(weight, rows, self.starts, self.weights)
