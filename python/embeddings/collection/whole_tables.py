"""Whole tables, put together from the ranks' rows and dealt to them."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.storage.dtypes import decode, encode


def gather_table(embeddings: LocalTables, name: str) -> Tensor:
    """A planned table on every rank: float32 [rows, dim]. Collective.

    Raises:
        KeyError: there is no such table.
    """
    table = embeddings.plan.by_name[name]
    whole = torch.zeros(table.rows, table.dim)
    embeddings.flush()
    for fused, weight in zip(embeddings.layout.fused_tables, embeddings.weights, strict=True):
        for block, rows, first in fused.local_blocks:
            if block.table == name and (not block.replicated or embeddings.collective.world.is_chief):
                part = decode(weight[first : first + len(rows)]).cpu()
                whole[rows.start : rows.stop : rows.step, block.columns.start : block.columns.stop] = part
    embeddings.collective.all_reduce_sum([whole])  # each number is some rank's, and nobody else's
    return whole


def scatter_table(embeddings: LocalTables, name: str, whole: Tensor) -> None:
    """Take a rank's rows of a planned table [rows, dim], rounded as they are stored. Speaks to no other rank.

    Raises:
        KeyError: there is no such table.
        ValueError: it has another shape.
    """
    table = embeddings.plan.by_name[name]
    if whole.shape != (table.rows, table.dim):
        raise ValueError(f"table '{name}' is [{table.rows}, {table.dim}], not {list(whole.shape)}")
    embeddings.invalidate()
    for fused, weight in zip(embeddings.layout.fused_tables, embeddings.weights, strict=True):
        for block, rows, first in fused.local_blocks:
            if block.table == name:
                part = whole[rows.start : rows.stop : rows.step, block.columns.start : block.columns.stop]
                weight[first : first + len(rows)] = encode(part.detach().float().to(weight.device), fused.dtype)
