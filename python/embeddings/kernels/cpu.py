"""C++ loops of native/cpp, where `make native` has built them; torch does the work elsewhere.

Only float32 tables on the CPU. Sums run in the same order as torch's, so forward passes agree bit for bit; a row's mean
square is summed in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.compute import native


def usable(*tensors: Tensor) -> bool:
    """Return whether the library is built and can work on these tables: contiguous float32 on the CPU."""
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
        data_pointer(starts),
        bags,
        data_pointer(weights),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def sum_pointers(pointers: Tensor, width: int, starts: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum, as `pool_sum`, the float32 rows at memory addresses int64 [N]: [bags, width]."""
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
        data_pointer(weights),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def row_pointers(matrix: Tensor, rows: Tensor | None, out: Tensor) -> None:
    """Write the memory addresses of a matrix's rows, int32 or int64 [N], or of its first N ones, to int64 [N]."""
    lib = native.library()
    assert lib is not None
    rows = None if rows is None else rows.contiguous()
    lib.headrace_row_pointers(
        matrix.data_ptr(),
        matrix.stride(0) * matrix.element_size(),
        data_pointer(rows),
        rows is not None and rows.dtype is torch.int64,
        out.numel(),
        out.data_ptr(),
    )


def gather_pointers(rows: Tensor, index: Tensor, mark_first: bool = False) -> Tensor:
    """Return rows[index]: memory addresses int64 [N] of rows whose addresses are `rows` int64 [U].

    `mark_first`: with 1 added where a row comes for the first time.
    """
    lib = native.library()
    assert lib is not None
    out = torch.empty_like(index)
    lib.headrace_gather_pointers(
        rows.data_ptr(), rows.numel(), index.data_ptr(), index.numel(), mark_first, out.data_ptr()
    )
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
        order: occurrences by row, int64; the last row's end at position `n`.
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
        data_pointer(states[0] if states else None),
        data_pointer(states[1] if len(states) > 1 else None),
        table.shape[1],
        rows.data_ptr(),
        rows.dtype is torch.int64,
        starts.data_ptr(),
        rows.numel(),
        order.data_ptr(),
        n,
        data_pointer(bag),
        data_pointer(weights),
        data_pointer(divisor),
        data_pointer(grad),
        kernel,
        lr,
        decay,
        eps,
        *betas,
        torch.get_num_threads(),
    )


def data_pointer(x: Tensor | None) -> int | None:
    """Return the address of a tensor's data; None for None."""
    return None if x is None else x.data_ptr()


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
    """Compute indices of codes, bag by bag; None: a code is outside its table, or offsets do not fit.

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
    """Find the distinct values, ascending, of an int32 vector [N], none negative; and order, starts and group, int64.

    See headrace.embeddings.kernels.dispatch.Duplicates.
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
    """Find the distinct values of an int32 vector [N], none negative, and each element's position among them, int64
    [N].

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
    """Sort indices by owner, stably; return the fields of headrace.embeddings.exchange.BagRequest.

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
    """Convert indices to the owners' numbering, owner by owner; v that begins a part becomes -1 - v.

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
    """Decode the numbers of `encode_requests`, int32 or int64 [N].

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
    """Group positions of int64 keys [N] in [0, groups), stably; return the order [N] and each group's start [groups].

    With `values` int64 [N] the values at those positions.
    """
    lib = native.library()
    assert lib is not None
    keys, values = keys.contiguous(), None if values is None else values.contiguous()
    order, starts = torch.empty_like(keys), torch.empty(groups, dtype=torch.int64)
    lib.headrace_group(keys.data_ptr(), data_pointer(values), keys.numel(), groups, order.data_ptr(), starts.data_ptr())
    return order, starts
