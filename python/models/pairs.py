"""DLRM's interaction on CPUs: one C++ pass over the batch each way, or torch where it was not built.

(headrace.models.interaction has it for GPUs.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.embeddings import native
from headrace.models.mlp import pairwise_dots


def with_pairs(bottom: Tensor, features: Tensor) -> Tensor:
    """The top MLP's input: float32 [B, D], [B, F, D] -> [B, D + F (F + 1) / 2].

    `bottom` itself, then the dot products of all pairs of the F + 1 vectors: pairs (i, j), j < i, by i; vector 0 is
    `bottom`. (Naumov et al., 2019, section 2.) The two ways differ by rounding. Under autocast a `bottom` of bfloat16
    leaves it to torch.
    """
    bottom, features = bottom.contiguous(), features.contiguous()
    if native.usable(bottom, features):
        out: Tensor = _Pairs.apply(bottom, features)  # type: ignore[no-untyped-call]
        return out
    return torch.cat([bottom, pairwise_dots(torch.cat([bottom.unsqueeze(1), features], dim=1))], dim=1)


class _Pairs(torch.autograd.Function):
    """(bottom, features) -> the top MLP's input. Both gradients come from one pass, whoever wants them."""

    @staticmethod
    def forward(ctx: Any, bottom: Tensor, features: Tensor) -> Tensor:
        ctx.save_for_backward(bottom, features)
        return native.interact(bottom, features)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        bottom, features = ctx.saved_tensors
        return native.interact_gradient(bottom, features, grads[0])
