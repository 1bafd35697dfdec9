"""The C++ loops of native/cpp/embeddings.cpp, where `make native` has built them; torch does the work elsewhere.

Only float32 tables on the CPU. Sums run in the same order as torch's, so forward passes agree bit for bit; a row's mean
square is summed in another order.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from headrace.embeddings.optimizers import ADAGRAD_EPS, ADAM_BETAS, ADAM_EPS
from headrace.workspace import checkout

_VERSION = 2
_KINDS = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2, "adam": 3}
_EPS = {"sgd": 0.0, "adagrad": ADAGRAD_EPS, "rowwise_adagrad": ADAGRAD_EPS, "adam": ADAM_EPS}


def library_path() -> Path:
    """Where the build puts it."""
    return checkout() / "build" / "native" / "libheadrace_embeddings.so"


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None where it was not built (or by another version of its source)."""
    try:
        found = ctypes.CDLL(str(library_path()))
        if found.headrace_embeddings_version() != _VERSION:
            return None
    except (OSError, AttributeError):
        return None
    i64, i32, f32, p = ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    found.headrace_pool_sum.argtypes = [p, i64, p, i32, i64, p, i64, p, p, i32]
    found.headrace_pool_sum.restype = None
    found.headrace_update.argtypes = [
        p, p, p, i64, p, i32, p, i64, p, i64, p, p, p, p, i32, f32, f32, f32, f32, f32, i32,
    ]  # fmt: skip
    found.headrace_update.restype = None
    found.headrace_occurrences.argtypes = [p, i64, i64, p, i64, p, i64, p, i32, p, p]
    found.headrace_occurrences.restype = i64
    found.headrace_duplicates.argtypes = [p, i64, p, p, p, p]
    found.headrace_duplicates.restype = i64
    return found


def usable(*tensors: Tensor) -> bool:
    """Whether the library is there and can work on these tables: contiguous float32 on the CPU."""
    return library() is not None and all(
        t.dtype is torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors
    )


def pool_sum(
    table: Tensor, index: Tensor, bags: int, starts: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Sum of weights[i] * table[index[i]] by bag: float32 [bags, D]; without `starts` occurrence i is bag i.

    Args:
        table: float32 [rows, D], contiguous.
        index: int32 or int64 [N], within the table.
        bags: B.
        starts: int64 [B], ascending.
        weights: float32 [N].
    """
    lib = library()
    assert lib is not None
    out = table.new_empty(bags, table.shape[1])
    index = index.contiguous()
    lib.headrace_pool_sum(
        table.data_ptr(), table.shape[1], index.data_ptr(), index.dtype is torch.int64, index.numel(),
        _pointer(starts), bags, _pointer(weights), out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out


def update(
    kind: str, table: Tensor, states: list[Tensor], rows: Tensor, starts: Tensor, order: Tensor, n: int, grad: Tensor,
    *, bag: Tensor | None, weights: Tensor | None, divisor: Tensor | None, lr: float, decay: float, step: int,
) -> None:  # fmt: skip
    """Sum the gradients of each distinct row and apply an optimizer to it, in place.

    Args:
        kind: of the optimizer.
        table: float32 [local rows, D].
        states: float32 [local rows, D], or [local rows, 1] where the rule works by row.
        rows: distinct rows of the table, int32 or int64 [U].
        starts: where each row's occurrences start in `order`, int64 [U].
        order: occurrences by row, int64; the last row's end at place `n`.
        n: see `order`.
        grad: float32 [M, D]; occurrence i has row bag[i] of it (None: row i).
        bag: int64.
        weights: of each occurrence.
        divisor: of each row of `grad`.
        lr: learning rate.
        decay: weight decay.
        step: from 1.
    """
    lib = library()
    assert lib is not None
    beta1, beta2 = ADAM_BETAS
    if kind == "adam":
        lr = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    grad = grad.contiguous()
    lib.headrace_update(
        table.data_ptr(), _pointer(states[0] if states else None), _pointer(states[1] if len(states) > 1 else None),
        table.shape[1], rows.data_ptr(), rows.dtype is torch.int64, starts.data_ptr(), rows.numel(),
        order.data_ptr(), n,
        _pointer(bag), _pointer(weights), _pointer(divisor), grad.data_ptr(), _KINDS[kind], lr, decay, _EPS[kind],
        beta1, beta2, torch.get_num_threads(),
    )  # fmt: skip


def occurrences(
    codes: Tensor, columns: Tensor, shard_address: Tensor, pieces: int, dtype: torch.dtype, bags: bool
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """Addresses of the codes that are looked up, bag by bag; None where a code is outside its table.

    Args:
        codes: int64 [B, S].
        columns: int64 [E, 6]: slot, piece, whether code 0 is padding, rows, first shard and shards; pieces ascend.
        shard_address: int64 [shards].
        pieces: bags of a row of `codes`.
        dtype: of the addresses, int32 or int64.
        bags: whether bags and starts are wanted.

    Returns:
        Addresses [N], bag of each int64 [N], first occurrence of each bag int64 [B * pieces].
    """
    lib = library()
    assert lib is not None
    batch, count = codes.shape[0], columns.shape[0]
    codes = codes.contiguous()
    addresses = torch.empty(batch * count, dtype=dtype)
    bag = torch.empty(batch * count, dtype=torch.int64) if bags else None
    starts = torch.empty(batch * pieces, dtype=torch.int64) if bags else None
    n = lib.headrace_occurrences(
        codes.data_ptr(), batch, codes.shape[1], columns.data_ptr(), count, shard_address.data_ptr(), pieces,
        addresses.data_ptr(), dtype is torch.int64, _pointer(bag), _pointer(starts),
    )  # fmt: skip
    return None if n < 0 else (addresses[:n], None if bag is None else bag[:n], starts)


def duplicates(values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Distinct values of an int32 vector [N], none negative: they, ascending; order, starts and group int64.

    See headrace.embeddings.exchange.Duplicates.
    """
    lib = library()
    assert lib is not None
    n = values.numel()
    values = values.contiguous()
    unique = torch.empty(n, dtype=torch.int32)
    order, starts, group = (torch.empty(n, dtype=torch.int64) for _ in range(3))
    distinct = lib.headrace_duplicates(
        values.data_ptr(), n, unique.data_ptr(), order.data_ptr(), starts.data_ptr(), group.data_ptr()
    )
    return unique[:distinct], order, starts[:distinct], group


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
