"""How rows are stored, and the way from and to float32.

fp16 and bf16 round to the nearest (in a step on a GPU by chance: gpu.kernels). int8 is one byte a number on a grid of
the row's own: numbers = offset + scale * code, scale and offset as two float32 behind the codes (the form of FBGEMM's
fused 8-bit row-wise quantisation). What training writes is rounded up or down by chance, so that a small step is not
lost but taken in the mean: an update errs by less than one step of the grid, (largest - smallest number of the row) /
255, and on average not at all (Gupta et al., "Deep Learning with Limited Numerical Precision", 2015). The draw is a
function of step, row and column: reruns give the same bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.embeddings.kernels import hashing
from headrace.embeddings.storage.initialize import initial_values
from headrace.embeddings.storage.row_format import Storage

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.uint8}
#: Bytes of scale and offset behind the codes.
_TAIL = 8


def stored_width(storage: Storage, columns: int) -> int:
    """Columns of the matrix that stores rows of so many numbers."""
    return columns + _TAIL if storage == "int8" else columns


def decode(stored: Tensor) -> Tensor:
    """Rows as stored [N, stored width] -> float32 [N, D] (the same tensor where they are float32)."""
    if stored.dtype is not torch.uint8:
        return stored.float()
    scale, offset = _grid(stored)
    return stored[:, :-_TAIL].float().mul_(scale).add_(offset)


def encode(rows: Tensor, dtype: torch.dtype, noise: Tensor | None = None) -> Tensor:
    """float32 [N, D] -> as stored.

    Args:
        rows: the numbers.
        dtype: of the storage.
        noise: int8: numbers uniform in [0, 1), float32 [N, D], that round by chance; None: to the nearest.
    """
    if dtype is not torch.uint8:
        return rows.to(dtype)
    stored = torch.empty(rows.shape[0], rows.shape[1] + _TAIL, dtype=torch.uint8, device=rows.device)
    if rows.numel() == 0:
        return stored
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    scale = (high - low) / 255
    # A row of equal numbers: all codes 0. Its scale is said to be 0.
    scaled = (rows - low) / torch.where(scale > 0, scale, 1.0)
    codes = (scaled + (0.5 if noise is None else noise)).floor_().clamp_(0, 255)
    stored[:, :-_TAIL] = codes.to(torch.uint8)
    stored[:, -_TAIL:] = torch.cat([scale, low], dim=1).view(torch.uint8)
    return stored


def convert(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as stored in one way, as they are stored in another: to the nearest."""
    return stored if stored.dtype is dtype else encode(decode(stored), dtype)


def numbers_of(stored: Tensor) -> int:
    """Numbers in a row as stored."""
    return stored.shape[1] - _TAIL if stored.dtype is torch.uint8 else stored.shape[1]


def noise_for(places: Tensor, columns: int, step: int) -> Tensor:
    """What rounds rows at a step: float32 [len(places), columns] in [0, 1), by the rows' places (int64)."""
    if places.device.type != "cpu":
        return hashing.initial_values("round", places, columns, step, 0.5).add_(0.5)
    drawn = initial_values("round", places.numpy().astype(np.uint64), range(columns), step, 0.5)
    return torch.from_numpy(drawn).add_(0.5)


def _grid(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset of rows: float32 [N, 1] each."""
    tail = stored[:, -_TAIL:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return tail[:, :1], tail[:, 1:]
