"""Matrices in files that processes map: pages of the page cache, which all processes of a host share."""

from __future__ import annotations

import mmap
import warnings

import torch
from torch import Tensor

from headrace.storage import Location


def mapped_matrix(file: Location, rows: int, columns: int, dtype: torch.dtype, *, write: bool = False) -> Tensor:
    """A file's numbers [rows, columns]; with `write` those of a new one, zeros, whose changes go to the disk."""
    size = rows * columns * dtype.itemsize
    if not size:
        return torch.empty(rows, columns, dtype=dtype)
    with open(file.local_path(), "w+b" if write else "rb") as f:
        if write:
            f.truncate(size)
        pages = mmap.mmap(f.fileno(), size, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ)
    with warnings.catch_warnings():  # nobody writes to what is read
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(pages, dtype=dtype).view(rows, columns)
