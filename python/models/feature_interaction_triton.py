"""Triton kernels of DLRM's interaction, forward and backward: dot products of all pairs, after the bottom vector.

Plain torch computes a matrix of all products of a sample, N x N, and gathers the half below its diagonal. The kernels
store neither that matrix nor the stacked vectors. They multiply 16-bit numbers and sum in float32, as autocast does, or
multiply float32 (TF32 by torch.set_float32_matmul_precision). With TRITON_INTERPRET=1 they run on CPUs, slowly, for
tests.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls, allow-incomplete-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _stacked(x, vectors, sample, row, column, features, dim):
    """Load the rows of a sample: 0 is its bottom vector, 1 to `features` its features' vectors; [ALL, DIM], zeros
    outside.
    """
    inside = column < dim
    first = tl.load(x + sample * dim + column, mask=(row == 0) & inside, other=0.0)
    rest = tl.load(
        vectors + (sample * features + row - 1) * dim + column, mask=(row > 0) & (row <= features) & inside, other=0.0
    )
    return tl.where(row == 0, first, rest.to(first.dtype))


@triton.jit
def _interact(x, vectors, out, features, dim, width, ALL: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr):
    """Compute out = [x, products of rows (i, j), j < i, by i, zeros to `width`]; one program a sample."""
    sample = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, ALL)[:, None], tl.arange(0, DIM)[None, :]
    z = _stacked(x, vectors, sample, row, column, features, dim)
    products = tl.dot(z, tl.trans(z), input_precision=PRECISION)
    i, j = tl.arange(0, ALL)[:, None], tl.arange(0, ALL)[None, :]
    place = out + sample * width + dim + i * (i - 1) // 2 + j
    tl.store(place, products.to(out.dtype.element_ty), mask=(j < i) & (i <= features))
    column_index = tl.arange(0, DIM)
    bottom = tl.load(x + sample * dim + column_index, mask=column_index < dim, other=0.0)
    tl.store(out + sample * width + column_index, bottom.to(out.dtype.element_ty), mask=column_index < dim)
    end = dim + (features + 1) * features // 2
    rest = end + tl.arange(0, 16)
    tl.store(out + sample * width + rest, tl.zeros((16,), tl.float32).to(out.dtype.element_ty), mask=rest < width)


@triton.jit
def _interact_back(
    x,
    vectors,
    grad,
    of_x,
    of_vectors,
    features,
    dim,
    width,
    ALL: tl.constexpr,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradient of z, (G + G^T) z with G that of the products, plus x's own part; one program a sample."""
    sample = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, ALL)[:, None], tl.arange(0, DIM)[None, :]
    z = _stacked(x, vectors, sample, row, column, features, dim)
    i, j = tl.arange(0, ALL)[:, None], tl.arange(0, ALL)[None, :]
    high, low = tl.maximum(i, j), tl.minimum(i, j)
    place = grad + sample * width + dim + high * (high - 1) // 2 + low
    both = tl.load(place, mask=(i != j) & (high <= features), other=0.0)
    result = tl.dot(both.to(z.dtype), z, input_precision=PRECISION)
    inside = column < dim
    bottom_grad = tl.load(grad + sample * width + column, mask=(row == 0) & inside, other=0.0).to(tl.float32)
    result += tl.where(row == 0, bottom_grad, 0.0)
    tl.store(of_x + sample * dim + column + row * 0, result.to(of_x.dtype.element_ty), mask=(row == 0) & inside)
    tl.store(
        of_vectors + (sample * features + row - 1) * dim + column,
        result.to(of_vectors.dtype.element_ty),
        mask=(row > 0) & (row <= features) & inside,
    )


class _Interact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, vectors: Tensor) -> Tensor:
        ctx.save_for_backward(x, vectors)
        return products(x, vectors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, vectors = ctx.saved_tensors
        return gradients(x, vectors, grads[0].contiguous())


def products(x: Tensor, vectors: Tensor) -> Tensor:
    """Compute the forward pass of `interact`."""
    samples, features, dim = vectors.shape
    width = interaction_width(features, dim)
    out = torch.empty(samples, width, dtype=x.dtype, device=x.device)
    if samples:
        _interact[(samples,)](x, vectors, out, features, dim, width, *_tile(features, dim), _precision())
    return out


def gradients(x: Tensor, vectors: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of both inputs from that of the products: [B, D] and [B, F, D]."""
    samples, features, dim = vectors.shape
    of_x, of_vectors = torch.empty_like(x), torch.empty_like(vectors)
    if samples:
        _interact_back[(samples,)](
            x, vectors, grad, of_x, of_vectors, features, dim, grad.shape[1], *_tile(features, dim), _precision()
        )
    return of_x, of_vectors


def fits(features: int, dim: int) -> bool:
    """Return whether a sample's tiles fit a program's share of a multiprocessor."""
    rows, columns = _tile(features, dim)
    return rows <= 64 and rows * columns <= 8_192


def interaction_width(features: int, dim: int) -> int:
    """Return the columns of `interact`: a multiple of 16, as products of 16-bit matrices need."""
    return -(-(dim + (features + 1) * features // 2) // 16) * 16


def interact(x: Tensor, vectors: Tensor) -> Tensor:
    """Return the bottom vector, all pairs' dot products, then zeros: [B, interaction_width(F, D)] of x's type.

    Args:
        x: bottom vectors [B, D], contiguous; their float type is that of the products.
        vectors: vectors of the features [B, F, D], contiguous, of any float type.
    """
    out: Tensor = _Interact.apply(x.contiguous(), vectors.contiguous())
    return out


def _tile(features: int, dim: int) -> tuple[int, int]:
    """Return rows and columns of a sample's tile: at least 16 each for products of tiles."""
    return max(16, triton.next_power_of_2(features + 1)), max(16, triton.next_power_of_2(dim))


def _precision() -> str:
    """Return the precision of float32 products."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
