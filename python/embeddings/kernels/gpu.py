"""Embedding tables on a GPU, in Triton: pooled lookup, and row-wise Adagrad with duplicates summed, in one pass each.

The same functions as headrace.embeddings.kernels.cpu has for CPUs, over tensors of a GPU (kernels.dispatch says which
is called). A matrix may hold many tables, one below the other: one launch looks all of them up. All sums run in the
order of the occurrences, so the same input gives the same bits. With TRITON_INTERPRET=1 they run on CPUs, slowly, for
tests.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Occurrences of a row that one program sums. A row with more is summed in parts, so that the most popular id of a
#: batch does not keep one program busy while the others are done.
PART = 64

# Triton compiles a kernel anew for whole numbers that are 1 or multiples of 16, and for addresses that are multiples of
# 16 bytes. What changes from batch to batch is kept out of that, or training would stop to compile. A table, its states
# and the vectors' width stay the same.


@triton.jit(do_not_specialize=["n", "bags"], do_not_specialize_on_alignment=["index", "starts", "weights"])
def _pool(table, index, starts, weights, out, n, bags, dim, WEIGHTED: tl.constexpr, DIM: tl.constexpr):
    """A program a bag: out[bag] = sum of weights[i] * table[index[i]], front to back."""
    bag = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DIM)
    inside = column < dim
    begin = tl.load(starts + bag)
    end = tl.load(starts + bag + 1, mask=bag + 1 < bags, other=n)
    total = tl.zeros((DIM,), tl.float32)
    for i in range(begin, end):
        row = tl.load(index + i).to(tl.int64)
        found = tl.load(table + row * dim + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            found = found * tl.load(weights + i)
        total += found
    tl.store(out + bag * dim + column, total, mask=inside)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["index"])
def _gather(table, index, out, n, dim, ROWS: tl.constexpr, DIM: tl.constexpr):
    """A program some rows: out[i] = table[index[i]]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    of = tl.load(index + row, mask=row < n, other=0).to(tl.int64)
    inside = (row < n)[:, None] & (column < dim)[None, :]
    found = tl.load(table + of[:, None] * dim + column[None, :], mask=inside, other=0.0)
    tl.store(out + row[:, None] * dim + column[None, :], found.to(tl.float32), mask=inside)


@triton.jit
def _gradient(
    i,
    order,
    bag,
    weights,
    divisor,
    grad,
    dim,
    column,
    inside,
    BAGS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    DIVIDED: tl.constexpr,
):
    """What the occurrence at position i of `order` adds to its row's gradient."""
    occurrence = tl.load(order + i)
    of = occurrence
    if BAGS:
        of = tl.load(bag + occurrence)
    found = tl.load(grad + of * dim + column, mask=inside, other=0.0)
    if DIVIDED:
        found = found / tl.load(divisor + of)
    if WEIGHTED:
        found = found * tl.load(weights + occurrence)
    return found


@triton.jit(
    do_not_specialize=["n", "rows"],
    do_not_specialize_on_alignment=["part_row", "first_part", "starts", "order", "bag", "weights", "divisor", "parts"],
)
def _parts(
    part_row,
    first_part,
    starts,
    order,
    bag,
    weights,
    divisor,
    grad,
    out,
    n,
    rows,
    parts,
    dim,
    BAGS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    DIVIDED: tl.constexpr,
    PART: tl.constexpr,
    DIM: tl.constexpr,
):
    """A program a part of a row that has several: out[part] = sum of its gradients."""
    part = tl.program_id(0).to(tl.int64)
    if part < tl.load(parts):
        row = tl.load(part_row + part)
        column = tl.arange(0, DIM)
        inside = column < dim
        last = tl.load(starts + row + 1, mask=row + 1 < rows, other=n)
        begin = tl.load(starts + row) + (part - tl.load(first_part + row)) * PART
        total = tl.zeros((DIM,), tl.float32)
        for i in range(begin, tl.minimum(begin + PART, last)):
            total += _gradient(i, order, bag, weights, divisor, grad, dim, column, inside, BAGS, WEIGHTED, DIVIDED)
        tl.store(out + part * dim + column, total, mask=inside)


@triton.jit
def _by_chance(x, noise, HALF: tl.constexpr):
    """float32 x up or down to a neighbour that bfloat16 (HALF: float16) holds, in the mean to itself; 32 random bits.

    Of the bits that are lost: what is added to them before they are cut off carries over with the probability of the
    part that they are. Below 2^-14 float16 has no exponent left: its numbers are the multiples of 2^-24. A NaN stays
    one: of CUDA's, 0x7FFFFFFF, the carry would make a zero.
    """
    bits = x.to(tl.uint32, bitcast=True)
    if HALF:
        cut = ((bits + (noise & 0x1FFF)) & 0xFFFFE000).to(tl.float32, bitcast=True)
        places = tl.floor(tl.abs(x) * 16777216.0 + (noise & 0x1FFF).to(tl.float32) / 8192.0) / 16777216.0
        rounded = tl.where(tl.abs(x) < 6.103515625e-05, tl.where(x < 0, -places, places), cut)
    else:
        rounded = ((bits + (noise & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)


@triton.jit(
    do_not_specialize=["n", "rows", "seed"],
    do_not_specialize_on_alignment=["unique", "names", "first_part", "starts", "order", "bag", "weights", "divisor"],
)
def _rowwise_adagrad(
    table,
    state,
    unique,
    names,
    starts,
    order,
    bag,
    weights,
    divisor,
    grad,
    sums,
    first_part,
    n,
    rows,
    dim,
    lr,
    decay,
    eps,
    seed,
    BAGS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    DIVIDED: tl.constexpr,
    PART: tl.constexpr,
    DIM: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """A program a distinct row: sum its gradients, then s += mean(g^2), w -= lr * g / (sqrt(s) + eps)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DIM)
    inside = column < dim
    begin = tl.load(starts + row)
    last = tl.load(starts + row + 1, mask=row + 1 < rows, other=n)
    total = tl.zeros((DIM,), tl.float32)
    if last - begin <= PART:
        for i in range(begin, last):
            total += _gradient(i, order, bag, weights, divisor, grad, dim, column, inside, BAGS, WEIGHTED, DIVIDED)
    else:
        first = tl.load(first_part + row)
        for part in range(first, first + (last - begin + PART - 1) // PART):
            total += tl.load(sums + part * dim + column, mask=inside, other=0.0)
    address = tl.load(unique + row).to(tl.int64)
    weight = tl.load(table + address * dim + column, mask=inside, other=0.0).to(tl.float32)
    total += decay * weight
    square = tl.load(state + address) + tl.sum(total * total, 0) / dim
    tl.store(state + address, square)
    stepped = weight - lr * total / (tl.sqrt(square) + eps)
    if STOCHASTIC:
        # Drawn by the row's name and the seed, so the same step gives the same bits.
        noise = tl.randint(seed, tl.load(names + row).to(tl.int64) * dim + column).to(tl.uint32, bitcast=False)
        stepped = _by_chance(stepped, noise, table.dtype.element_ty == tl.float16)
    tl.store(table + address * dim + column, stepped.to(table.dtype.element_ty), mask=inside)


def pool_sum(
    table: Tensor, index: Tensor, bags: int, starts: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Sum of weights[i] * table[index[i]] by bag: float32 [bags, D]; without `starts` occurrence i is bag i.

    Args:
        table: float32, float16 or bfloat16 [rows, D], contiguous.
        index: int32 or int64 [N], within the table.
        bags: B.
        starts: int64 [B], ascending.
        weights: float32 [N]; only with `starts`.
    """
    dim = table.shape[1]
    out = torch.empty(bags, dim, dtype=torch.float32, device=table.device)
    if bags == 0:
        return out
    width = triton.next_power_of_2(dim)
    if starts is None:
        if weights is not None:
            raise ValueError("weights without bags")
        rows = max(1, 4096 // width)
        _gather[(triton.cdiv(bags, rows),)](table, index, out, bags, dim, rows, width)
    else:
        given = index if weights is None else weights
        _pool[(bags,)](table, index, starts, given, out, index.numel(), bags, dim, weights is not None, width)
    return out


def rowwise_adagrad(
    table: Tensor,
    state: Tensor,
    rows: Tensor,
    starts: Tensor,
    order: Tensor,
    grad: Tensor,
    *,
    lr: float,
    decay: float = 0.0,
    eps: float = 1e-10,
    bag: Tensor | None = None,
    weights: Tensor | None = None,
    divisor: Tensor | None = None,
    seed: int | None = None,
    end: int | None = None,
    names: Tensor | None = None,
) -> None:
    """Sum the gradients of each distinct row and apply row-wise Adagrad to it, in place (FBGEMM's exact variant).

    Args:
        table: float32, float16 or bfloat16 [rows, D], contiguous.
        state: float32 [rows, 1].
        rows: distinct rows of the table, int32 or int64 [U].
        starts: where each row's occurrences start in `order`, int64 [U], ascending.
        order: occurrences by row, int64 [N].
        grad: float32 [M, D], contiguous; occurrence i has row bag[i] of it (None: row i).
        lr: learning rate.
        decay: weight decay.
        eps: what keeps the division from zero.
        bag: int64 [N].
        weights: of each occurrence, float32 [N].
        divisor: of each row of `grad`, float32 [M, 1].
        seed: another one for each step: a row of 16-bit numbers is rounded up or down by chance, so that steps smaller
            than half of a number's last place are not lost but come true on average (Gupta et al., Deep Learning with
            Limited Numerical Precision, 2015). None: to nearest.
        end: where the last row's occurrences end in `order`; None: with it.
        names: what a row's rounding is drawn by, int32 or int64 [U]; None: `rows`.

    Raises:
        ValueError: a seed for a table of float32.
    """
    if seed is not None and table.dtype is torch.float32:
        raise ValueError("rows of torch.float32 are not rounded: a seed is for those of 16 bits")
    count, n, dim = rows.numel(), order.numel() if end is None else end, table.shape[1]
    if count == 0:
        return
    width = triton.next_power_of_2(dim)
    flags = (bag is not None, weights is not None, divisor is not None)
    optional = [grad if x is None else x for x in (bag, weights, divisor)]
    ends = torch.cat([starts[1:], starts.new_full((1,), n)])
    lengths = ends - starts
    of_row = torch.where(lengths > PART, (lengths + PART - 1) // PART, 0)
    last_part = of_row.cumsum(0)
    first_part = last_part - of_row
    # A row in parts has more than PART occurrences, so there are fewer than this: no number comes back to the host.
    most = 2 * n // PART
    sums = grad.new_empty(max(most, 1), dim)
    if most:
        part_row = torch.searchsorted(last_part, torch.arange(most, device=table.device), right=True)
        _parts[(most,)](
            part_row,
            first_part,
            starts,
            order,
            *optional,
            grad,
            sums,
            n,
            count,
            last_part[-1:],
            dim,
            *flags,
            PART,
            width,
        )
    _rowwise_adagrad[(count,)](
        table,
        state,
        rows,
        rows if names is None else names,
        starts,
        order,
        *optional,
        grad,
        sums,
        first_part,
        n,
        count,
        dim,
        lr,
        decay,
        eps,
        seed or 0,
        *flags,
        PART,
        width,
        seed is not None,
    )
