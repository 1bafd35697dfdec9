"""Triton kernels of embedding tables: pooled lookup, row-wise Adagrad with duplicates summed, and a hash table of ids.

The same functions as headrace.embeddings.kernels.cpu has for CPUs, over tensors of a GPU (kernels.dispatch says which
is called). A matrix may hold many tables, one below the other: one launch looks all of them up. All sums run in the
order of the occurrences, so the same input gives the same bits. The hash table gives the answers of
kernels.id_map.IdMap: an insert claims a free slot by compare-and-swap; which of two ids gets it is left to the GPU, and
no answer depends on it. With TRITON_INTERPRET=1 the kernels run on CPUs, slowly, for tests.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.embeddings.kernels.id_map import SlotTable, slots_for

#: Occurrences of a row that one program sums. A row with more is summed in parts, so that the most popular id of a
#: batch does not keep one program busy while the others are done.
PART = 64

# Triton compiles a kernel anew for whole numbers that are 1 or multiples of 16, and for addresses that are multiples of
# 16 bytes. What changes from batch to batch is kept out of that, or training would stop to compile. A table, its states
# and the vectors' width stay the same.


@triton.jit(do_not_specialize=["n", "bags"], do_not_specialize_on_alignment=["index", "starts", "weights"])
def _pool(table, index, starts, weights, out, n, bags, dim, WEIGHTED: tl.constexpr, DIM: tl.constexpr):
    """Compute out[bag] = sum of weights[i] * table[index[i]], front to back; one program a bag."""
    bag = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DIM)
    inside = column < dim
    begin = tl.load(starts + bag)
    end = tl.load(starts + bag + 1, mask=bag + 1 < bags, other=n)
    total = tl.zeros((DIM,), tl.float32)
    for i in range(begin, end):
        row = tl.load(index + i).to(tl.int64)
        vector = tl.load(table + row * dim + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            vector = vector * tl.load(weights + i)
        total += vector
    tl.store(out + bag * dim + column, total, mask=inside)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["index"])
def _gather(table, index, out, n, dim, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Compute out[i] = table[index[i]]; one program for some rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    source_row = tl.load(index + row, mask=row < n, other=0).to(tl.int64)
    inside = (row < n)[:, None] & (column < dim)[None, :]
    vector = tl.load(table + source_row[:, None] * dim + column[None, :], mask=inside, other=0.0)
    tl.store(out + row[:, None] * dim + column[None, :], vector.to(tl.float32), mask=inside)


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
    """Return the part of a row's gradient from the occurrence at position i of `order`."""
    occurrence = tl.load(order + i)
    grad_row = occurrence
    if BAGS:
        grad_row = tl.load(bag + occurrence)
    vector = tl.load(grad + grad_row * dim + column, mask=inside, other=0.0)
    if DIVIDED:
        vector = vector / tl.load(divisor + grad_row)
    if WEIGHTED:
        vector = vector * tl.load(weights + occurrence)
    return vector


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
    """Compute out[part] = sum of the part's gradients; one program for each part of a row in several parts."""
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
    """Round float32 x up or down to a bfloat16 (HALF: float16) neighbour, in the mean to x; by 32 random bits.

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
    """Sum the gradients of a row, then s += mean(g^2), w -= lr * g / (sqrt(s) + eps); one program a row."""
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
        # Drawn by the row's name and the seed: the same step gives the same bits.
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
        optional_weights = index if weights is None else weights
        _pool[(bags,)](
            table, index, starts, optional_weights, out, index.numel(), bags, dim, weights is not None, width
        )
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


#: Ids of one program.
_BLOCK = 256


@triton.jit
def _hash(ids):
    """Hash ids by SplitMix64: see headrace.embeddings.kernels.id_map.mix."""
    x = ids.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return (x ^ (x >> 31)).to(tl.int64, bitcast=True)


# What changes from batch to batch is kept out of what Triton compiles a kernel anew for: see kernels.
@triton.jit(do_not_specialize=["n", "last"], do_not_specialize_on_alignment=["ids", "out"])
def _find(keys, numbers, ids, out, n, last, BLOCK: tl.constexpr):
    """Compute out[i] = the number of ids[i], or -1. `last`: number of slots less one, a mask."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    looks = position < n
    id_ = tl.load(ids + position, mask=looks, other=0)
    slot = _hash(id_) & last
    result = tl.full((BLOCK,), -1, tl.int64)
    while tl.max(looks.to(tl.int32), 0) > 0:
        number = tl.load(numbers + slot, mask=looks, other=-1)
        key = tl.load(keys + slot, mask=looks, other=0)
        looks = looks & (number >= 0)
        result = tl.where(looks & (key == id_), number, result)
        looks = looks & (key != id_)
        slot = (slot + 1) & last
    tl.store(out + position, result, mask=position < n)


@triton.jit(do_not_specialize=["n", "last"], do_not_specialize_on_alignment=["ids", "new_numbers"])
def _put(keys, numbers, ids, new_numbers, n, last, BLOCK: tl.constexpr):
    """Insert ids[i], which the map lacks, with the number new_numbers[i]."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    looks = position < n
    new = tl.load(ids + position, mask=looks, other=0)
    number = tl.load(new_numbers + position, mask=looks, other=0)
    free = tl.full((BLOCK,), -1, tl.int64)
    slot = _hash(new) & last
    while tl.max(looks.to(tl.int32), 0) > 0:
        # There is no mask for it: lanes that are done ask the cell behind the last slot, which is never free.
        previous = tl.atomic_cas(numbers + tl.where(looks, slot, last + 1), free, number)
        tl.store(keys + slot, new, mask=looks & (previous < 0))
        looks = looks & (previous >= 0)
        slot = (slot + 1) & last


class DeviceMap(SlotTable):
    """Map from ids to numbers on a GPU. Linear probing, at most half full.

    Nothing is ever taken out alone: who evicts makes a new map of those who stay.

    Args:
        device: where it is.
        ids: int64 [N], distinct: the first of the map, in this order.
    """

    def __init__(self, device: torch.device, ids: Tensor | None = None) -> None:
        self._device = device
        self._used = 0
        self._make(slots_for(1))
        if ids is not None:
            self.add(ids)

    def find(self, ids: Tensor) -> Tensor:
        """Return the number of each id [N]; -1 where the map lacks it."""
        out = torch.empty_like(ids)
        if len(ids):
            self._launch(_find, ids.contiguous(), out)
        return out

    def add(self, ids: Tensor) -> Tensor:
        """Give distinct new ids [N] the next numbers, in their order: int64 [N]."""
        numbers = torch.arange(self._used, self._used + len(ids), device=self._device)
        self._used += len(ids)
        if 2 * self._used > len(self._keys):
            held = self._numbers[:-1] >= 0
            previous = self._keys[held], self._numbers[:-1][held]
            self._make(slots_for(self._used))
            self._put(*previous)
        self._put(ids.contiguous(), numbers)
        return numbers

    def _make(self, slots: int) -> None:
        self._keys = torch.zeros(slots, dtype=torch.int64, device=self._device)
        #: -1: the slot is free. One cell more than slots: see `_put`.
        self._numbers = torch.full((slots + 1,), -1, dtype=torch.int64, device=self._device)
        self._numbers[-1] = 0

    def _put(self, ids: Tensor, numbers: Tensor) -> None:
        if len(ids):
            self._launch(_put, ids, numbers)

    def _launch(self, kernel, ids: Tensor, numbers: Tensor) -> None:
        n = len(ids)
        kernel[(triton.cdiv(n, _BLOCK),)](self._keys, self._numbers, ids, numbers, n, len(self._keys) - 1, _BLOCK)
