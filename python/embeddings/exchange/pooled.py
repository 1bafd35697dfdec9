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
from headrace.embeddings.input.addressing import JaggedIndices
from headrace.embeddings.kernels import cpu, index_cpu
from headrace.embeddings.kernels.duplicates import find_duplicates, sum_bags
from headrace.embeddings.sharding.layout import FusedTable
from headrace.embeddings.storage.dtypes import decode


@dataclass(frozen=True)
class BagRequest:
    """A batch's bags of one fused table, cut by owner, as the rank that asks has them.

    N ids, P parts that are not empty.
    """

    #: Indices by owner, then by bag, in each bag front to back: [N].
    indices: Tensor
    #: float32 [N], where a lookup is weighted.
    weights: Tensor | None
    #: Which indices begin a part of a bag: bool [N].
    begins: Tensor
    #: Bag of each part: int64 [P].
    bag_ids: Tensor
    #: Indices, and parts of bags, for each owner: [W].
    ids_per_rank: list[int]
    bags_per_rank: list[int]

    def sum(self, vectors: Tensor, bags: int) -> Tensor:
        """The bags' sums [bags, D] of their parts' vectors [P, D]; zeros for empty bags."""
        if cpu.usable(vectors):
            return sum_bags(vectors, *index_cpu.group(self.bag_ids, bags))
        order = torch.argsort(self.bag_ids, stable=True)
        counts = torch.bincount(self.bag_ids, minlength=bags)
        return sum_bags(vectors, order, counts.cumsum(0) - counts)


def bucketize_bags(fused: FusedTable, jagged: JaggedIndices) -> BagRequest:
    """Sort a batch's occurrences by owner."""
    world = len(fused.rank_offsets) - 1
    assert jagged.bag_ids is not None
    if jagged.indices.device.type == "cpu" and native.library() is not None:
        return BagRequest(*index_cpu.bucketize_bags(jagged.indices, jagged.bag_ids, jagged.weights, fused.rank_offsets))
    ends = fused.rank_offsets[1:].to(jagged.indices.dtype)
    owner = torch.bucketize(jagged.indices, ends, right=True, out_int32=True)
    order = torch.argsort(owner, stable=True)
    owner, bag = owner.index_select(0, order), jagged.bag_ids.index_select(0, order)
    begins = torch.ones(bag.numel(), dtype=torch.bool)
    torch.ne(bag[1:], bag[:-1], out=begins[1:])
    begins[1:] |= owner[1:] != owner[:-1]
    return BagRequest(
        indices=jagged.indices.index_select(0, order),
        weights=None if jagged.weights is None else jagged.weights.index_select(0, order),
        begins=begins,
        bag_ids=bag[begins],
        ids_per_rank=torch.bincount(owner, minlength=world).tolist(),
        bags_per_rank=torch.bincount(owner[begins], minlength=world).tolist(),
    )


@dataclass(frozen=True)
class RequestedBags:
    """What the ranks ask of one fused table here, where bags are summed by the owner; parts in order of the ranks."""

    #: First index of each part of a bag: int64 [P].
    offsets: Tensor
    #: Part of a bag of each index: int64 [N].
    bag_ids: Tensor
    #: float32 [N], where a lookup is weighted.
    weights: Tensor | None

    @staticmethod
    def of(begins: Tensor, weights: Tensor | None) -> RequestedBags:
        """From which ids begin a part: bool [N]."""
        return RequestedBags(begins.nonzero().view(-1), begins.cumsum(0) - 1, weights)

    def sums_into(self, parts: Sequence[Tensor], weight: Tensor, rows: Tensor) -> None:
        """`sums` of a float32 matrix, by the C++ loop, in consecutive pieces of memory: float32 [P_r, D] each."""
        starts, first = torch.split(self.offsets, [len(p) for p in parts]), 0
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
        return sum_bags(weight, rows, self.offsets, self.weights)
