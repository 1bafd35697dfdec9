"""The C++ loops of native/cpp, where `make native` has built them; torch does the work elsewhere.

Only float32 tables on the CPU. Sums run in the same order as torch's, so forward passes agree bit for bit; a row's mean
square is summed in another order.
"""

from __future__ import annotations

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
        data_pointer(starts),
        bags,
        data_pointer(weights),
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
    """rows[index]: memory addresses int64 [N] of rows whose addresses are `rows` int64 [U].

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
    """Where a tensor's numbers are; None: there is none."""
    return None if x is None else x.data_ptr()
