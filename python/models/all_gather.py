"""Rows of all ranks, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.comm.base import Collective


def all_gather_rows(x: Tensor, collective: Collective) -> Tensor:
    """The ranks' `x` [B_r, ...] one below the other in their order: [sum of B_r, ...]. Collective, as is its backward.

    B_r may differ and be 0. The gradient of `x` is the sum of what all ranks have for its rows, in their order.
    """
    if collective.world.size == 1:
        return x
    gathered: Tensor = _AllGather.apply(x, collective)  # type: ignore[no-untyped-call]
    return gathered


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: Collective) -> Tensor:
        size = collective.world.size
        # To each rank the same: one message, which tells how many rows are whose.
        copies = x.detach().unsqueeze(0).expand(size, *x.shape).reshape(size * len(x), *x.shape[1:])
        gathered, rows = collective.all_to_all(copies, [len(x)] * size)
        ctx.collective, ctx.rows, ctx.mine = collective, rows, len(x)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        size = ctx.collective.world.size
        back, _ = ctx.collective.all_to_all(grads[0].contiguous(), ctx.rows)
        return back.view(size, ctx.mine, *back.shape[1:]).sum(0), None
