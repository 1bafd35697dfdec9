"""DLRM's interaction: one pass over the batch each way, in C++ on CPUs and a kernel on GPUs; torch does the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.embeddings.kernels import cpu, dispatch
from headrace.embeddings.lookup.zero_copy import ZeroCopyVectors
from headrace.models import feature_interaction_cpu
from headrace.models.mlp import pairwise_dots


def dot_interaction(bottom: Tensor, features: Tensor | ZeroCopyVectors) -> Tensor:
    """The top MLP's input: float32 [B, D], [B, F, D] -> [B, D + F (F + 1) / 2], on a GPU with zeros behind it.

    `bottom` itself, then the dot products of all pairs of the F + 1 vectors: pairs (i, j), j < i, by i; vector 0 is
    `bottom`. (Naumov et al., 2019, section 2.) The ways differ by rounding. On CPUs, under autocast a `bottom` of
    bfloat16 leaves it to torch, so vectors in place are not for it; on GPUs so do samples that are too large for a
    kernel (headrace.models.feature_interaction_triton).
    """
    bottom = bottom.contiguous()
    if isinstance(features, ZeroCopyVectors):
        return _zero_copy_pairs(bottom, features)
    features = features.contiguous()
    if torch.compiler.is_exporting():  # a graph has torch's operators alone
        return _by_torch(bottom, features)
    if dispatch.usable(bottom, features):
        from headrace.models import feature_interaction_triton as interaction  # brings Triton

        if interaction.fits(*features.shape[1:]):
            return interaction.interact(bottom, features)
    if cpu.usable(bottom, features):
        out: Tensor = _DotInteraction.apply(bottom, features)  # type: ignore[no-untyped-call]
        return out
    return _by_torch(bottom, features)


def _by_torch(bottom: Tensor, features: Tensor) -> Tensor:
    return torch.cat([bottom, pairwise_dots(torch.cat([bottom.unsqueeze(1), features], dim=1))], dim=1)


def _zero_copy_pairs(bottom: Tensor, features: ZeroCopyVectors) -> Tensor:
    assert features.pointers is not None
    wanted = (features.pointers.shape[0], features.width)
    if not cpu.usable(bottom) or bottom.shape != wanted:
        raise ValueError(f"no float32 {list(wanted)}, but {bottom.dtype} {list(bottom.shape)}")
    out: Tensor = _ZeroCopyPairs.apply(features.anchor, bottom, features)  # type: ignore[no-untyped-call]
    if not torch.is_grad_enabled():
        features.release()
    return out


class _DotInteraction(torch.autograd.Function):
    """(bottom, features) -> the top MLP's input. Both gradients come from one pass, whoever wants them."""

    @staticmethod
    def forward(ctx: Any, bottom: Tensor, features: Tensor) -> Tensor:
        ctx.save_for_backward(bottom, features)
        return feature_interaction_cpu.interact(bottom, features)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        bottom, features = ctx.saved_tensors
        of_bottom, of_features = feature_interaction_cpu.interact_gradient(bottom, features, grads[0])
        assert of_features is not None
        return of_bottom, of_features


class _ZeroCopyPairs(torch.autograd.Function):
    """(anchor, bottom, features in place) -> the same; backward the features' gradients go where they are needed."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, bottom: Tensor, features: ZeroCopyVectors) -> Tensor:
        ctx.save_for_backward(bottom)
        ctx.features = features
        return feature_interaction_cpu.interact(bottom, None, features.pointers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        (bottom,) = ctx.saved_tensors
        features: ZeroCopyVectors = ctx.features
        features.check()
        if torch.get_num_threads() > 1:  # which would meet where samples have a row in common
            of_bottom, of_features = feature_interaction_cpu.interact_gradient(
                bottom, None, grads[0], features.pointers
            )
            assert of_features is not None
            with features.span():
                features.set_gradient(of_features)
            return None, of_bottom, None
        with features.span():
            to = features.gradient_pointers()
        of_bottom, _ = feature_interaction_cpu.interact_gradient(bottom, None, grads[0], features.pointers, to)
        with features.span():
            features.send_gradient()
        return None, of_bottom, None
