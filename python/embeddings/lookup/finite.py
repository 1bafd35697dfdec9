"""Which tables have NaN or infinite numbers, in the gradients that wait for a step or in what would be saved."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.embeddings.kernels.dispatch import default_device
from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.optim.gradients import non_finite_tables
from headrace.embeddings.storage.dtypes import decode

#: Rows that are looked at together.
_ROWS = 1 << 18


def bad_gradients(embeddings: LocalTables) -> list[str]:
    """Tables with such a number in this rank's gradients since the last step. All ranks call it: messages may come."""
    waiting, found = embeddings.waiting_gradients(), set[str]()
    with default_device(embeddings.device):
        for fused, parts in zip(embeddings.layout.fused_tables, waiting, strict=True):
            for part in parts:
                found |= non_finite_tables(fused, part.rows, part.sums())
    if embeddings.dynamic is not None:
        found |= {t.spec.name for t in embeddings.dynamic.tables if not bool(t.squares().isfinite())}
    return sorted(found)


def bad_rows(embeddings: LocalTables) -> list[str]:
    """Tables with such a number in this rank's rows or their optimizer states."""
    embeddings.flush()
    found: set[str] = set()
    states = embeddings.states or [{} for _ in embeddings.weights]
    for fused, weight, own in zip(embeddings.layout.fused_tables, embeddings.weights, states, strict=True):
        for block, rows, first in fused.local_blocks:
            if not all(_is_finite(x[first : first + len(rows)]) for x in (weight, *own.values())):
                found.add(block.table)
    for t in () if embeddings.dynamic is None else embeddings.dynamic.tables:
        if not all(_is_finite(x) for x in (t.weight, *(s[: len(t)] for s in t.states.values()))):
            found.add(t.spec.name)
    return sorted(found)


def _is_finite(stored: Tensor) -> bool:
    """Whether all numbers are: a sum of which one is NaN or infinite is no finite number."""
    return all(bool(decode(part).sum().isfinite()) for part in torch.split(stored, _ROWS))
