"""Layers that several ranking models share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.mlp import MLP


def hidden_layers(inputs: int, widths: Sequence[int], dropout: float = 0.0, *, outputs: int | None = None) -> nn.Module:
    """ReLU layers float32 [B, inputs] -> [B, widths[-1]], and a linear one to `outputs` behind them where it is given.

    Starts are drawn from torch's global generator. Without widths and outputs it is the identity.
    """
    if outputs is None and not widths:
        return nn.Identity()
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    ends = () if outputs is None else (outputs,)
    return MLP((inputs, *widths, *ends), generator, last_relu=outputs is None, dropout=dropout)


class FirstOrder(nn.Module):
    """A linear model over everything: sum of one weight an id and one a continuous column, and a bias, [B].

    An id's weight is the first value of its vector, so that no second lookup is needed; what is of second order reads
    the others (`rest`).
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
        """The vectors without their first values, [B, F, D - 1]."""
        return inputs.vectors[:, :, 1:]
