"""Large pages for tables: a random row is then a miss of the caches alone, not of the page tables too."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

_HUGE = 2 * 2**20
_MADV_HUGEPAGE = 14  # linux/mman.h


def empty_table(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`torch.empty(rows, columns)` whose memory is asked to be of pages of 2 MiB, before anybody writes to it.

    Linux gives them where /sys/kernel/mm/transparent_hugepage/enabled is `madvise` (the usual) or `always`; elsewhere
    the memory is as it is.
    """
    table = torch.empty(rows, columns, dtype=dtype)
    if table.device.type != "cpu":  # see headrace.embeddings.kernels.dispatch.placing
        return table
    start = -(-table.data_ptr() // _HUGE) * _HUGE
    size = (table.data_ptr() + table.numel() * table.element_size()) // _HUGE * _HUGE - start
    if sys.platform == "linux" and size > 0:
        # A kernel without them answers with an error, which changes nothing.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_HUGEPAGE)
    return table
