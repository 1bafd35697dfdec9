"""A model as a user would write it, in a module of their own: named `tests.plugin_models:Class`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from headrace.models.inputs import InputFeatures, Inputs


class Factors(nn.Module):
    """A factorisation of users and items with a bias of their own kind of loss: squared error of the probability."""

    def __init__(self, features: InputFeatures, left: str, right: str, hidden: int = 4) -> None:
        super().__init__()
        self.left, self.right = left, right
        self.numbers = nn.Linear(features.continuous_columns, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        dots = (inputs[self.left] * inputs[self.right]).sum(dim=1)
        return {"logits": dots + self.out(torch.tanh(self.numbers(inputs.continuous))).squeeze(1)}

    def loss(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        return (outputs["logits"].sigmoid() - inputs.labels).square().sum()


class Settled(nn.Module):
    """Its settings in a pydantic model."""

    class Args(BaseModel):
        scale: float = 1.0

    def __init__(self, features: InputFeatures, args: Args) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((features.flat_columns,), args.scale))

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        return {"logits": inputs.flat @ self.weight}


class NoModule:
    """Not a torch module."""
