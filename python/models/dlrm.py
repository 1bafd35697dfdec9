"""DLRM: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (2019)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headrace import config
from headrace.compute import native
from headrace.embeddings.kernels import cpu, dispatch
from headrace.embeddings.kernels.cpu import data_pointer
from headrace.embeddings.lookup.zero_copy import ZeroCopyVectors
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.layers import MLP, pairwise_dots


class DLRM(nn.Module):
    """DLRM: a bottom MLP, the dot products of all pairs of vectors, and a top MLP.

    The bottom MLP maps the continuous columns to a vector of the embeddings' width. The top MLP reads this vector and
    the dot products of all pairs of it and the features' embeddings.

    Without continuous features the vector is a learned constant (a linear layer without inputs). Its products with the
    embeddings are the first-order terms of a factorisation machine, such as an item's popularity. Without categorical
    features the top MLP reads only the vector.
    """

    #: The interaction reads embeddings where they are (headrace.embeddings.lookup.zero_copy).
    reads_in_place = True

    def __init__(self, features: InputFeatures, model: config.Model) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(torch.initial_seed())
        columns, width = features.continuous_columns, features.embedding_dim
        self.bottom: MLP | None = None
        self.constant: nn.Parameter | None = None
        if columns:
            widths = (columns, *model.bottom_mlp, width)
            self.bottom = MLP(widths, generator, last_relu=True, dropout=model.dropout)
        else:
            self.constant = nn.Parameter(torch.empty(width).normal_(0.0, width**-0.5, generator=generator))
        vectors = 1 + len(features.categorical)
        inputs = width + vectors * (vectors - 1) // 2
        self.top = MLP((inputs, *model.top_mlp, 1), generator, dropout=model.dropout)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return `logits` float32 [B]."""
        if self.bottom is not None:
            bottom: Tensor = self.bottom(inputs.continuous)  # [B, D], while the embeddings travel
        else:
            assert self.constant is not None
            bottom = self.constant.expand(inputs.rows, -1)
        x = bottom
        if inputs.features.categorical:
            x = inputs.watch(dot_interaction(bottom, inputs.vectors_in_place(bottom.dtype)))
        logits: Tensor = self.top(x).squeeze(1)
        return {"logits": logits}


def dot_interaction(bottom: Tensor, features: Tensor | ZeroCopyVectors) -> Tensor:
    """Compute the top MLP's input: float32 [B, D], [B, F, D] -> [B, D + F (F + 1) / 2], on a GPU followed by zeros.

    The output is `bottom`, then the dot products of all pairs of the F + 1 vectors: pairs (i, j), j < i, by i, where
    vector 0 is `bottom` (Naumov et al., 2019, section 2). C++, Triton and torch compute it with different rounding.
    Torch computes it for a `bottom` of bfloat16 on CPUs (autocast), which excludes vectors in place, and on GPUs for
    samples that are too large for a kernel (headrace.models.feature_interaction_triton).
    """
    bottom = bottom.contiguous()
    if isinstance(features, ZeroCopyVectors):
        return _zero_copy_pairs(bottom, features)
    features = features.contiguous()
    if torch.compiler.is_exporting():  # an exported graph can have only torch's operators
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
    expected = (features.pointers.shape[0], features.width)
    if not cpu.usable(bottom) or bottom.shape != expected:
        raise ValueError(f"no float32 {list(expected)}, but {bottom.dtype} {list(bottom.shape)}")
    out: Tensor = _ZeroCopyPairs.apply(features.anchor, bottom, features)  # type: ignore[no-untyped-call]
    if not torch.is_grad_enabled():
        features.release()
    return out


class _DotInteraction(torch.autograd.Function):
    """Autograd function (bottom, features) -> the top MLP's input; one pass computes both gradients."""

    @staticmethod
    def forward(ctx: Any, bottom: Tensor, features: Tensor) -> Tensor:
        ctx.save_for_backward(bottom, features)
        return interact(bottom, features)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        bottom, features = ctx.saved_tensors
        of_bottom, of_features = interact_gradient(bottom, features, grads[0])
        assert of_features is not None
        return of_bottom, of_features


class _ZeroCopyPairs(torch.autograd.Function):
    """Autograd function (anchor, bottom, features in place) -> the top MLP's input.

    Backward writes the features' gradients to their places in memory.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, bottom: Tensor, features: ZeroCopyVectors) -> Tensor:
        ctx.save_for_backward(bottom)
        ctx.features = features
        return interact(bottom, None, features.pointers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        (bottom,) = ctx.saved_tensors
        features: ZeroCopyVectors = ctx.features
        features.check()
        if torch.get_num_threads() > 1:  # threads would add to one row where samples share it
            of_bottom, of_features = interact_gradient(bottom, None, grads[0], features.pointers)
            assert of_features is not None
            with features.span():
                features.set_gradient(of_features)
            return None, of_bottom, None
        with features.span():
            to = features.gradient_pointers()
        of_bottom, _ = interact_gradient(bottom, None, grads[0], features.pointers, to)
        with features.span():
            features.send_gradient()
        return None, of_bottom, None


def interact(bottom: Tensor, features: Tensor | None, pointers: Tensor | None = None) -> Tensor:
    """Compute the interaction in C++ (native/cpp/interaction.cpp): float32 [B, D], [B, F, D], contiguous -> [B, D + F
    (F + 1) / 2].

    Args:
        bottom: vector 0 of each sample.
        features: the other vectors; None with `pointers`.
        pointers: addresses of the other vectors, int64 [B, F].
    """
    lib = native.library()
    assert lib is not None
    batch, width = bottom.shape
    count = _count(features, pointers)
    out = bottom.new_empty(batch, width + count * (count + 1) // 2)
    lib.headrace_dot_interaction(
        bottom.data_ptr(),
        data_pointer(features),
        data_pointer(pointers),
        batch,
        count,
        width,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def interact_gradient(
    bottom: Tensor, features: Tensor | None, grad: Tensor, pointers: Tensor | None = None, to: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of both inputs from the gradient of the output.

    Args:
        bottom: see `interact`.
        features: see `interact`.
        grad: gradient of the output.
        pointers: see `interact`.
        to: addresses for the features' gradients, int64 [B, F]. An odd address, less 1, is overwritten; an even one is
            added to, sample by sample, so use one thread. None: the gradients are returned.
    """
    lib = native.library()
    assert lib is not None
    grad = grad.contiguous()
    count, threads = _count(features, pointers), torch.get_num_threads() if to is None else 1
    of_bottom = torch.empty_like(bottom)
    of_features = bottom.new_empty(bottom.shape[0], count, bottom.shape[1]) if to is None else None
    lib.headrace_dot_interaction_backward(
        bottom.data_ptr(),
        data_pointer(features),
        data_pointer(pointers),
        grad.data_ptr(),
        bottom.shape[0],
        count,
        bottom.shape[1],
        of_bottom.data_ptr(),
        data_pointer(of_features),
        data_pointer(to),
        threads,
    )
    return of_bottom, of_features


def _count(features: Tensor | None, pointers: Tensor | None) -> int:
    vectors = features if pointers is None else pointers
    assert vectors is not None
    return vectors.shape[1]
