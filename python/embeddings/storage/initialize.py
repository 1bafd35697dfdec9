"""Where rows start: a function of (seed, table, row, column) alone, so any rank draws just its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.counter_random import GOLDEN, mix
from headrace.embeddings.kernels import hashing

#: Rows start uniform in +- this. Independent of the table's size, so that a table that grows starts its new rows alike.
INIT_BOUND = 0.05
#: Numbers drawn at once: what passes through memory besides the rows themselves.
_PIECE = 2**20
#: float32 [N, D] -> rows as stored.
Store = Callable[[Tensor], Tensor]


def initial_rows(
    table: str, rows: range, columns: range, seed: int, bound: float, out: Tensor, store: Store | None = None
) -> None:
    """Fill `out` [len(rows), columns as stored] with rows of numbers uniform in [-bound, bound).

    Counter-based: SplitMix64 (Steele, Lea and Flood, 2014) of the row's place, then of the pair of columns; each half
    of the 64 bits is one number of 24 bits. `store` makes of float32 rows what `out` holds.
    """
    here = out.device.type == "cpu"
    step = max(1, (_PIECE if here else 16 * _PIECE) // max(1, len(columns)))
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        if not here:  # drawn where they stay
            ids = torch.arange(part.start, part.stop, part.step, device=out.device)
            drawn = hashing.initial_values(table, ids, columns.stop, seed, bound)[:, columns.start :]
            out[start : start + len(part)] = drawn if store is None else store(drawn)
            continue
        places = np.arange(part.start, part.stop, part.step, dtype=np.uint64)
        values = torch.from_numpy(initial_values(table, places, columns, seed, bound))
        out[start : start + len(places)] = values if store is None else store(values)


def initial_values(
    table: str, places: NDArray[np.uint64], columns: range, seed: int, bound: float
) -> NDArray[np.float32]:
    """The numbers of any rows: float32 [len(places), len(columns)]."""
    text = hashlib.sha256(f"{seed}/{table}".encode()).digest()
    key = np.frombuffer(text[:8], dtype="<u8")
    first, last = columns.start // 2, (columns.stop + 1) // 2
    pairs = np.arange(first, last, dtype=np.uint64) * GOLDEN
    hashed = mix(mix(key + places * GOLDEN)[:, None] + pairs)
    halves = hashed.view("<u4").reshape(len(places), 2 * len(pairs))[:, columns.start - 2 * first :][:, : len(columns)]
    values: NDArray[np.float32] = (halves >> np.uint32(8)).astype(np.float32)
    values *= np.float32(bound / 2**23)
    values -= np.float32(bound)
    return values
