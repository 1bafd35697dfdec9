"""Layers that several models share: multi-layer perceptrons with reproducible initial weights, a first-order model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as linear_of
from torch.nn.functional import pad

from headrace.models.inputs import InputFeatures, Inputs


class MLP(nn.Sequential):
    """Linear layers with ReLU between them: float32 [B, widths[0]] -> [B, widths[-1]].

    Initial weights are normal with variance 2 / (inputs + outputs), biases with 1 / outputs, as in Naumov et al.
    (2019). They are drawn from `generator`, so ranks with the same seed have the same ones.

    Args:
        widths: widths of inputs, hidden layers and outputs; at least two.
        generator: generator of the initial weights.
        last_relu: whether the last layer is followed by a ReLU too.
        dropout: share of values that are dropped after each ReLU.
    """

    def __init__(
        self, widths: Sequence[int], generator: torch.Generator, *, last_relu: bool = False, dropout: float = 0.0
    ) -> None:
        layers: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(pairwise(widths)):
            layers.append(linear(inputs, outputs, generator))
            if last_relu or i < len(widths) - 2:
                layers.append(nn.ReLU(inplace=True))  # backward of a linear layer does not need its output
                if dropout:
                    layers.append(nn.Dropout(dropout))
        super().__init__(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers. Columns of `x` after the inputs must be zeros: kernels prefer widths of even numbers."""
        first, *rest = self
        assert isinstance(first, nn.Linear)
        extra = x.shape[1] - first.in_features
        if not extra:
            out: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
            return out
        x = linear_of(x, pad(first.weight, (0, extra)), first.bias)
        for layer in rest:
            x = layer(x)
        return x


def linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """Create a linear layer that draws nothing from torch's global generator."""
    layer = nn.Linear(inputs, outputs, device="meta")
    # torch's to_empty would import a symbolic algebra system, which takes a second.
    layer.weight, layer.bias = nn.Parameter(torch.empty(outputs, inputs)), nn.Parameter(torch.empty(outputs))
    with torch.no_grad():
        layer.weight.normal_(0.0, math.sqrt(2.0 / (inputs + outputs)), generator=generator)
        layer.bias.normal_(0.0, math.sqrt(1.0 / outputs), generator=generator)
    return layer


def pairwise_dots(x: Tensor) -> Tensor:
    """Return the dot products of all pairs of vectors: float32 [B, N, D] -> [B, N (N - 1) / 2], pairs (i, j), j < i, by
    i.
    """
    n = x.shape[1]
    products = torch.bmm(x, x.transpose(1, 2))
    rows, columns = torch.tril_indices(n, n, offset=-1, device=x.device)
    return products.flatten(1).index_select(1, rows * n + columns)


def hidden_layers(inputs: int, widths: Sequence[int], dropout: float = 0.0, *, outputs: int | None = None) -> nn.Module:
    """Create ReLU layers float32 [B, inputs] -> [B, widths[-1]], followed by a linear one to `outputs` if given.

    Initial weights are drawn from torch's global generator. Without widths and outputs it is the identity.
    """
    if outputs is None and not widths:
        return nn.Identity()
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    ends = () if outputs is None else (outputs,)
    return MLP((inputs, *widths, *ends), generator, last_relu=outputs is None, dropout=dropout)


class FirstOrder(nn.Module):
    """A linear model: the sum of a weight for each id, a weight times each continuous column, and a bias, [B].

    An id's weight is the first value of its vector, which saves a second lookup; second-order terms read the other
    values (`rest`).
    """

    def __init__(self, features: InputFeatures) -> None:
        super().__init__()
        self.continuous = nn.Linear(features.continuous_columns, 1) if features.continuous_columns else None
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Inputs) -> Tensor:
        total = inputs.vectors[:, :, 0].sum(dim=1) + self.bias
        return total if self.continuous is None else total + self.continuous(inputs.continuous).squeeze(1)

    @staticmethod
    def rest(inputs: Inputs) -> Tensor:
        """Return the vectors without their first values, [B, F, D - 1]."""
        return inputs.vectors[:, :, 1:]
