"""The C++ loops of native/cpp, where `make native` has built them; torch does the work elsewhere.

Only float32 tables on the CPU. Sums run in the same order as torch's, so forward passes agree bit for bit; a row's mean
square is summed in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace import native


def usable(*tensors: Tensor) -> bool:
    """Whether the library is there and can work on these tables: contiguous float32 on the CPU."""
    return native.library() is not None and all(
        t.dtype is torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors
    )


def pool_sum(
    table: Tensor,
    index: Tensor,
    bags: int,
    starts: Tensor | None = None,
    weights: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Sum of weights[i] * table[index[i]] by bag: float32 [bags, D]; without `starts` occurrence i is bag i.

    Args:
        table: float32 [rows, D], contiguous.
        index: int32 or int64 [N], within the table.
        bags: B.
        starts: int64 [B], ascending.
        weights: float32 [N].
        out: where the sums go, float32 [bags, D], contiguous; None: new memory.
    """
    lib = native.library()
    assert lib is not None
    out = table.new_empty(bags, table.shape[1]) if out is None else out
    index = index.contiguous()
    lib.headrace_pool_sum(
        table.data_ptr(),
        table.shape[1],
        index.data_ptr(),
        index.dtype is torch.int64,
        index.numel(),
        _pointer(starts),
        bags,
        _pointer(weights),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def sum_pointers(pointers: Tensor, width: int, starts: Tensor, weights: Tensor | None = None) -> Tensor:
    """`pool_sum` of the float32 rows at memory addresses int64 [N]: [bags, width]."""
    lib = native.library()
    assert lib is not None
    out, bags = torch.empty(starts.numel(), width), starts.numel()
    lib.headrace_pool_sum(
        None,
        width,
        pointers.data_ptr(),
        True,
        pointers.numel(),
        starts.data_ptr(),
        bags,
        _pointer(weights),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def row_pointers(matrix: Tensor, rows: Tensor | None, out: Tensor) -> None:
    """Write the memory addresses of a matrix's rows, int32 or int64 [N], or of its first N ones, to int64 [N]."""
    lib = native.library()
    assert lib is not None
    rows = None if rows is None else rows.contiguous()
    lib.headrace_addresses(
        matrix.data_ptr(),
        matrix.stride(0) * matrix.element_size(),
        _pointer(rows),
        rows is not None and rows.dtype is torch.int64,
        out.numel(),
        out.data_ptr(),
    )


def gather_pointers(rows: Tensor, index: Tensor, mark_first: bool = False) -> Tensor:
    """rows[index]: memory addresses int64 [N] of rows whose addresses are `rows` int64 [U].

    `mark_first`: with 1 added where a row comes for the first time.
    """
    lib = native.library()
    assert lib is not None
    out = torch.empty_like(index)
    lib.headrace_places(rows.data_ptr(), rows.numel(), index.data_ptr(), index.numel(), mark_first, out.data_ptr())
    return out


def update(
    kernel: int,
    table: Tensor,
    states: list[Tensor],
    rows: Tensor,
    starts: Tensor,
    order: Tensor,
    n: int,
    grad: Tensor | None,
    *,
    bag: Tensor | None,
    weights: Tensor | None,
    divisor: Tensor | None,
    lr: float,
    decay: float,
    eps: float,
    betas: tuple[float, float],
) -> None:
    """Sum the gradients of each distinct row and apply an optimizer to it, in place.

    Args:
        kernel: number of the optimizer in native/cpp/embeddings.cpp.
        table: float32 [local rows, D].
        states: float32 [local rows, D], or [local rows, 1] where the rule works by row.
        rows: distinct rows of the table, int32 or int64 [U].
        starts: where each row's occurrences start in `order`, int64 [U].
        order: occurrences by row, int64; the last row's end at place `n`.
        n: see `order`.
        grad: float32 [M, D]; occurrence i has row bag[i] of it (None: row i). None: `order` has the addresses of the
            occurrences' gradients, and there is nothing else to them.
        bag: int64.
        weights: of each occurrence.
        divisor: of each row of `grad`.
        lr: learning rate (Adam: with the correction of bias).
        decay: weight decay.
        eps: what keeps the division from zero.
        betas: of Adam.
    """
    lib = native.library()
    assert lib is not None
    grad = None if grad is None else grad.contiguous()
    lib.headrace_update(
        table.data_ptr(),
        _pointer(states[0] if states else None),
        _pointer(states[1] if len(states) > 1 else None),
        table.shape[1],
        rows.data_ptr(),
        rows.dtype is torch.int64,
        starts.data_ptr(),
        rows.numel(),
        order.data_ptr(),
        n,
        _pointer(bag),
        _pointer(weights),
        _pointer(divisor),
        _pointer(grad),
        kernel,
        lr,
        decay,
        eps,
        *betas,
        torch.get_num_threads(),
    )


def jagged_indices(
    codes: Tensor, columns: Tensor, shard_offsets: Tensor, pieces: int, dtype: torch.dtype, bags: bool
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """Indices of the codes that are looked up, bag by bag; None where a code is outside its table.

    Args:
        codes: int64 [B, S].
        columns: int64 [E, 6]: slot, piece, whether code 0 is padding, rows, first shard and shards; pieces ascend.
        shard_offsets: int64 [shards].
        pieces: bags of a row of `codes`.
        dtype: of the indices, int32 or int64.
        bags: whether bags and starts are wanted.

    Returns:
        Indices [N], bag of each int64 [N], first occurrence of each bag int64 [B * pieces].
    """
    lib = native.library()
    assert lib is not None
    batch, count = codes.shape[0], columns.shape[0]
    codes = codes.contiguous()
    indices = torch.empty(batch * count, dtype=dtype)
    bag = torch.empty(batch * count, dtype=torch.int64) if bags else None
    starts = torch.empty(batch * pieces, dtype=torch.int64) if bags else None
    n = lib.headrace_occurrences(
        codes.data_ptr(),
        batch,
        codes.shape[1],
        columns.data_ptr(),
        count,
        shard_offsets.data_ptr(),
        pieces,
        indices.data_ptr(),
        dtype is torch.int64,
        _pointer(bag),
        _pointer(starts),
    )
    return None if n < 0 else (indices[:n], None if bag is None else bag[:n], starts)


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
    """Distinct values of an int32 vector [N], none negative, and the place of each element among them, int64 [N].

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
        _pointer(ends),
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
    total = lib.headrace_cut_bags(
        indices.data_ptr(),
        indices.dtype is torch.int64,
        bag.data_ptr(),
        _pointer(weights),
        n,
        rank_offsets.data_ptr(),
        world,
        out.data_ptr(),
        _pointer(out_weights),
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
    lib.headrace_numbers(
        indices.data_ptr(),
        indices.dtype is torch.int64,
        counts.data_ptr(),
        shift.data_ptr(),
        counts.numel(),
        _pointer(begins),
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
    count = lib.headrace_parts(
        numbers.data_ptr(), numbers.dtype is torch.int64, n, rows.data_ptr(), starts.data_ptr(), part.data_ptr()
    )
    return rows, starts[:count], part


def group(keys: Tensor, groups: int, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Places of int64 keys [N] in [0, groups), equal ones together in their order [N]; where each begins [groups].

    With `values` int64 [N] the values of those places.
    """
    lib = native.library()
    assert lib is not None
    keys, values = keys.contiguous(), None if values is None else values.contiguous()
    order, starts = torch.empty_like(keys), torch.empty(groups, dtype=torch.int64)
    lib.headrace_group(keys.data_ptr(), _pointer(values), keys.numel(), groups, order.data_ptr(), starts.data_ptr())
    return order, starts


def interact(bottom: Tensor, features: Tensor | None, pointers: Tensor | None = None) -> Tensor:
    """See headrace.models.feature_interaction: float32 [B, D], [B, F, D], contiguous -> [B, D + F (F + 1) / 2].

    Args:
        bottom: vectors 0.
        features: the others.
        pointers: their addresses in place of themselves, int64 [B, F].
    """
    lib = native.library()
    assert lib is not None
    batch, width = bottom.shape
    count = _count(features, pointers)
    out = bottom.new_empty(batch, width + count * (count + 1) // 2)
    lib.headrace_interact(
        bottom.data_ptr(),
        _pointer(features),
        _pointer(pointers),
        batch,
        count,
        width,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def interact_gradient(
    bottom: Tensor, features: Tensor | None, grad: Tensor, pointers: Tensor | None = None, to: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The gradients of both, from that of the output.

    Args:
        bottom: see `interact`.
        features: see `interact`.
        grad: of the output.
        pointers: see `interact`.
        to: addresses where the features' gradients go, int64 [B, F]; one that is odd, less 1, is stored to, else added
            to, sample by sample: for one thread. None: they are returned.
    """
    lib = native.library()
    assert lib is not None
    grad = grad.contiguous()
    count, threads = _count(features, pointers), torch.get_num_threads() if to is None else 1
    of_bottom = torch.empty_like(bottom)
    of_features = bottom.new_empty(bottom.shape[0], count, bottom.shape[1]) if to is None else None
    lib.headrace_interact_gradient(
        bottom.data_ptr(),
        _pointer(features),
        _pointer(pointers),
        grad.data_ptr(),
        bottom.shape[0],
        count,
        bottom.shape[1],
        of_bottom.data_ptr(),
        _pointer(of_features),
        _pointer(to),
        threads,
    )
    return of_bottom, of_features


def _count(features: Tensor | None, pointers: Tensor | None) -> int:
    given = features if pointers is None else pointers
    assert given is not None
    return given.shape[1]


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
