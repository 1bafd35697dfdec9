"""Multi-layer perceptrons with reproducible starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as linear_of
from torch.nn.functional import pad


class MLP(nn.Sequential):
    """Linear layers with ReLU between them: float32 [B, widths[0]] -> [B, widths[-1]].

    Weights start normal with variance 2 / (inputs + outputs), biases with 1 / outputs, as in Naumov et al. (2019),
    drawn from `generator`, so every rank that is given the same seed starts alike.

    Args:
        widths: inputs, hidden layers, outputs; at least two.
        generator: where the starts are drawn from.
        last_relu: whether the last layer is followed by a ReLU too.
        dropout: after each ReLU.
    """

    def __init__(
        self, widths: Sequence[int], generator: torch.Generator, *, last_relu: bool = False, dropout: float = 0.0
    ) -> None:
        layers: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(pairwise(widths)):
            layers.append(linear(inputs, outputs, generator))
            if last_relu or i < len(widths) - 2:
                layers.append(nn.ReLU(inplace=True))  # a linear layer does not look at its output again
                if dropout:
                    layers.append(nn.Dropout(dropout))
        super().__init__(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Columns of `x` behind the inputs must be zeros: kernels like widths of even numbers."""
        first, *others = self
        assert isinstance(first, nn.Linear)
        extra = x.shape[1] - first.in_features
        if not extra:
            out: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
            return out
        x = linear_of(x, pad(first.weight, (0, extra)), first.bias)
        for layer in others:
            x = layer(x)
        return x


def linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """A linear layer that draws nothing from torch's global generator."""
    layer = nn.Linear(inputs, outputs, device="meta")
    # Not `to_empty`: it imports a symbolic algebra system, which takes a second.
    layer.weight, layer.bias = nn.Parameter(torch.empty(outputs, inputs)), nn.Parameter(torch.empty(outputs))
    with torch.no_grad():
        layer.weight.normal_(0.0, math.sqrt(2.0 / (inputs + outputs)), generator=generator)
        layer.bias.normal_(0.0, math.sqrt(1.0 / outputs), generator=generator)
    return layer


def pairwise_dots(x: Tensor) -> Tensor:
    """The dot products of all pairs of vectors: float32 [B, N, D] -> [B, N (N - 1) / 2], pairs (i, j), j < i, by i."""
    n = x.shape[1]
    products = torch.bmm(x, x.transpose(1, 2))
    rows, columns = torch.tril_indices(n, n, offset=-1, device=x.device)
    return products.flatten(1).index_select(1, rows * n + columns)
