"""DLRM's interaction in C++ (native/cpp/interaction.cpp): see headrace.models.feature_interaction."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace import native
from headrace.embeddings.kernels.cpu import data_pointer


def interact(bottom: Tensor, features: Tensor | None, pointers: Tensor | None = None) -> Tensor:
    """See headrace.models.feature_interaction: float32 [B, D], [B, F, D], contiguous -> [B, D + F (F + 1) / 2].

    Args:
        bottom: vectors 0.
        features: the others.
        pointers: their addresses in place of themselves, int64 [B, F].
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
    """The gradients of both, from that of the output.

    Args:
        bottom: see `interact`.
        features: see `interact`.
        grad: of the output.
        pointers: see `interact`.
        to: addresses where the features' gradients go, int64 [B, F]; one that is odd, less 1, is stored to, else added
            to, sample by sample: for one thread. None: they are returned.
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
    given = features if pointers is None else pointers
    assert given is not None
    return given.shape[1]
