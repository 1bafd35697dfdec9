"""The fused interaction against plain torch."""

from __future__ import annotations

import pytest
import torch

from headrace.models.feature_interaction_triton import interact, interaction_width
from headrace.models.layers import pairwise_dots
from tests.gpu.conftest import DEVICE


@pytest.mark.parametrize(("samples", "features", "dim"), [(3, 26, 20), (2, 1, 16), (0, 3, 8)])
def test_products_and_gradients_equal_torch(samples: int, features: int, dim: int) -> None:
    torch.manual_seed(1)
    # On a card float32 would be multiplied as TF32.
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    near = {"rtol": 2e-2, "atol": 5e-2} if DEVICE == "cuda" else {"rtol": 1e-5, "atol": 1e-5}
    x = torch.randn(samples, dim, device=DEVICE, dtype=dtype, requires_grad=True)
    vectors = torch.randn(samples, features, dim, device=DEVICE, dtype=dtype, requires_grad=True)
    out = interact(x, vectors)
    a, b = (t.detach().double().requires_grad_() for t in (x, vectors))
    expected = torch.cat([a, pairwise_dots(torch.cat([a.unsqueeze(1), b], dim=1))], dim=1)
    assert out.shape == (samples, interaction_width(features, dim))
    assert not out[:, expected.shape[1] :].any()
    torch.testing.assert_close(out[:, : expected.shape[1]].double(), expected, **near)
    weight = torch.randn(out.shape, device=DEVICE, dtype=dtype)
    (out * weight).sum().backward()
    (expected * weight[:, : expected.shape[1]].double()).sum().backward()
    assert x.grad is not None
    assert vectors.grad is not None
    torch.testing.assert_close(x.grad.double(), a.grad, **near)
    torch.testing.assert_close(vectors.grad.double(), b.grad, **near)
