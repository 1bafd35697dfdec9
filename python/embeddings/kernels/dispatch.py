"""Dispatch between devices: which tensors the Triton kernels take, and calls of the kernels.

    with default_device(torch.device("cuda")):
        torch.zeros(3)      # on the GPU

Triton is imported at the first use, so that machines without a GPU need not have it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headrace.errors import UserError

#: Types of rows that the kernels take.
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@cache
def kernels() -> Any:
    """Return the module headrace.embeddings.kernels.gpu."""
    from headrace.embeddings.kernels import gpu

    return gpu


def usable(*tensors: Tensor) -> bool:
    """Return whether the kernels can work on these tables: contiguous floats on a GPU."""
    return all(t.device.type == "cuda" and t.dtype in _TYPES and t.is_contiguous() for t in tensors)


def reads_directly(table: Tensor) -> bool:
    """Return whether lookups read rows of a table in place: rows of 16 bits by the kernels alone."""
    return table.dtype is torch.float32 or usable(table)


def default_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which new tensors without a device of their own are on `device`.

    For the CPU nothing at all, at no cost.

    So code that says nothing of devices serves both. It is a thread's own: autograd's threads enter it anew.
    """
    return nullcontext() if device.type == "cpu" else device


def pool_sum(
    table: Tensor, index: Tensor, bags: int, starts: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Pool on a GPU; see gpu.pool_sum."""
    pooled: Tensor = kernels().pool_sum(table, index, bags, starts, weights)
    return pooled


def check(device: torch.device) -> None:
    """Raise UserError where tables cannot be on a device: there is no such GPU."""
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device '{device}': embedding tables are on 'cpu' or 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"device '{device}': torch {torch.__version__} sees no GPU here: see `nvidia-smi`, or set it to cpu"
        )
