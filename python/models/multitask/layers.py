"""Layers that several multi-task models share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headrace.models.inputs import InputFeatures
from headrace.models.ranking.layers import hidden_layers


class Towers(nn.Module):
    """An MLP for each task: representations float32 [B, width] of the tasks, in their order -> outputs by name, [B].

    `logits` is the output of the first task.
    """

    def __init__(self, features: InputFeatures, width: int, widths: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.tasks = features.tasks
        # A list: a task may be named as an attribute of a torch module is.
        self.towers = nn.ModuleList(hidden_layers(width, widths, dropout, outputs=1) for _ in features.tasks)

    def forward(self, representations: Sequence[Tensor]) -> dict[str, Tensor]:
        found = {
            task: tower(x).squeeze(1) for task, tower, x in zip(self.tasks, self.towers, representations, strict=True)
        }
        return {"logits": found[self.tasks[0]], **found}


class Experts(nn.Module):
    """MLPs side by side over the same inputs: float32 [B, inputs] -> [B, experts, widths[-1]]."""

    def __init__(self, experts: int, inputs: int, widths: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.experts = nn.ModuleList(hidden_layers(inputs, widths, dropout) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.experts], dim=1)


class Gate(nn.Module):
    """A mean of experts whose weights, a softmax, are a linear function of the inputs.

    Inputs float32 [B, inputs] and experts' outputs [B, experts, D] -> [B, D].
    """

    def __init__(self, inputs: int, experts: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, experts, bias=False)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        shares = self.linear(x).softmax(dim=1)
        return torch.einsum("be,bed->bd", shares, experts)
