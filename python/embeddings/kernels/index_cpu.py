"""The C++ loops over indices (native/cpp): codes to indices, duplicates, and what is asked of other ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace import native
from headrace.embeddings.kernels.cpu import data_pointer


def jagged_indices(
    samples: int,
    pieces: Tensor,
    blocks: Tensor,
    shard_offsets: Tensor,
    dtype: torch.dtype,
    *,
    most: int,
    bags: bool,
    weighted: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None] | None:
    """Indices of the codes that are looked up, bag by bag; None: a code is outside its table, or offsets do not fit.

    Args:
        samples: B.
        pieces: of each piece of a sample's output its codes: int64 [P, 8], as `Piece` of native/cpp/embeddings.cpp.
        blocks: rows, first shard and shards of each: int64 [P, 3].
        shard_offsets: int64 [shards].
        dtype: of the indices, int32 or int64.
        most: codes that there are.
        bags: whether bags and starts are wanted.
        weighted: whether weights are wanted.

    Returns:
        Indices [N], bag of each int64 [N], first occurrence of each bag int64 [B * P], weights float32 [N].
    """
    lib = native.library()
    assert lib is not None
    count = pieces.shape[0]
    indices = torch.empty(most, dtype=dtype)
    bag = torch.empty(most, dtype=torch.int64) if bags else None
    starts = torch.empty(samples * count, dtype=torch.int64) if bags else None
    weights = torch.empty(most) if weighted else None
    n = lib.headrace_jagged_indices(
        samples,
        pieces.data_ptr(),
        blocks.data_ptr(),
        count,
        shard_offsets.data_ptr(),
        indices.data_ptr(),
        dtype is torch.int64,
        data_pointer(bag),
        data_pointer(starts),
        data_pointer(weights),
    )
    if n < 0:
        return None
    return indices[:n], None if bag is None else bag[:n], starts, None if weights is None else weights[:n]


def duplicates(values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Distinct values of an int32 vector [N], none negative: they, ascending; order, starts and group int64.

    See headrace.embeddings.kernels.duplicates.Duplicates.
    """
    lib = native.library()
    assert lib is not None
    n = values.numel()
    values = values.contiguous()
    unique = torch.empty(n, dtype=torch.int32)
    order, starts, group = (torch.empty(n, dtype=torch.int64) for _ in range(3))
    distinct = lib.headrace_duplicates(
        values.data_ptr(), n, unique.data_ptr(), order.data_ptr(), starts.data_ptr(), group.data_ptr()
    )
    return unique[:distinct], order, starts[:distinct], group


def distinct(values: Tensor, ends: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """Distinct values of an int32 vector [N], none negative, and the position of each element among them, int64 [N].

    Args:
        values: the vector.
        ends: None: distinct values ascend. Otherwise they come range by range, each range's in the order in which the
            vector has them first; range g ends before value ends[g], the last behind all: int64 [G], ascending.

    Returns:
        None where they ascend and the largest is so large that sorting is faster.
    """
    lib = native.library()
    assert lib is not None
    values, ends = values.contiguous(), None if ends is None else ends.contiguous()
    unique, inverse = torch.empty_like(values), torch.empty(values.numel(), dtype=torch.int64)
    count = lib.headrace_distinct(
        values.data_ptr(),
        values.numel(),
        data_pointer(ends),
        0 if ends is None else ends.numel(),
        unique.data_ptr(),
        inverse.data_ptr(),
    )
    return None if count < 0 else (unique[:count], inverse)


def bucketize_bags(
    indices: Tensor, bag: Tensor, weights: Tensor | None, rank_offsets: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, list[int], list[int]]:
    """Indices by owner, then in their order; the fields of headrace.embeddings.exchange.pooled.Parts.

    Args:
        indices: int32 or int64 [N].
        bag: int64 [N], ascending.
        weights: float32 [N].
        rank_offsets: int64 [W + 1].
    """
    lib = native.library()
    assert lib is not None
    n, world = indices.numel(), rank_offsets.numel() - 1
    indices, bag, rank_offsets = indices.contiguous(), bag.contiguous(), rank_offsets.contiguous()
    weights = None if weights is None else weights.contiguous()
    out, begins, part_bag = torch.empty_like(indices), torch.empty(n, dtype=torch.bool), torch.empty_like(bag)
    out_weights = None if weights is None else torch.empty_like(weights)
    ids, decode_requests = torch.empty(world, dtype=torch.int64), torch.empty(world, dtype=torch.int64)
    total = lib.headrace_bucketize_bags(
        indices.data_ptr(),
        indices.dtype is torch.int64,
        bag.data_ptr(),
        data_pointer(weights),
        n,
        rank_offsets.data_ptr(),
        world,
        out.data_ptr(),
        data_pointer(out_weights),
        begins.data_ptr(),
        part_bag.data_ptr(),
        ids.data_ptr(),
        decode_requests.data_ptr(),
    )
    return out, out_weights, begins, part_bag[:total], ids.tolist(), decode_requests.tolist()


def encode_requests(
    indices: Tensor, ids: Sequence[int], shift: Tensor, begins: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Indices, owner by owner, in the owners' own numbering; one that begins a part, v, as -1 - v.

    Args:
        indices: int32 or int64 [N].
        ids: how many are each owner's, [W].
        shift: what is added to them, int64 [W].
        begins: bool [N]; None: there are no parts.
        dtype: of the result, int32 or int64.
    """
    lib = native.library()
    assert lib is not None
    counts, shift, indices = torch.tensor(ids), shift.contiguous(), indices.contiguous()
    out = torch.empty(indices.numel(), dtype=dtype)
    lib.headrace_encode_requests(
        indices.data_ptr(),
        indices.dtype is torch.int64,
        counts.data_ptr(),
        shift.data_ptr(),
        counts.numel(),
        data_pointer(begins),
        out.data_ptr(),
        dtype is torch.int64,
    )
    return out


def decode_requests(numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `encode_requests` marked, int32 or int64 [N].

    Rows [N], first of each part int64 [P], part of each int64 [N].
    """
    lib = native.library()
    assert lib is not None
    numbers, n = numbers.contiguous(), numbers.numel()
    rows, starts, part = torch.empty_like(numbers), torch.empty(n, dtype=torch.int64), torch.empty(n, dtype=torch.int64)
    count = lib.headrace_decode_requests(
        numbers.data_ptr(), numbers.dtype is torch.int64, n, rows.data_ptr(), starts.data_ptr(), part.data_ptr()
    )
    return rows, starts[:count], part


def group(keys: Tensor, groups: int, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Positions of int64 keys [N] in [0, groups), equal ones together in their order [N]; where each begins [groups].

    With `values` int64 [N] the values at those positions.
    """
    lib = native.library()
    assert lib is not None
    keys, values = keys.contiguous(), None if values is None else values.contiguous()
    order, starts = torch.empty_like(keys), torch.empty(groups, dtype=torch.int64)
    lib.headrace_group(keys.data_ptr(), data_pointer(values), keys.numel(), groups, order.data_ptr(), starts.data_ptr())
    return order, starts
