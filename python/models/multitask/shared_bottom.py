"""Shared bottom: Caruana, "Multitask Learning" (Machine Learning 1997)."""

from __future__ import annotations

from torch import Tensor, nn

from headrace.config.model_args import SharedBottomArgs
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.multitask.layers import Towers
from headrace.models.ranking.layers import hidden_layers


class SharedBottom(nn.Module):
    """One MLP that all tasks share, and an MLP behind it for each."""

    Args = SharedBottomArgs

    def __init__(self, features: InputFeatures, args: SharedBottomArgs) -> None:
        super().__init__()
        self.bottom = hidden_layers(features.flat_columns, args.bottom_mlp, args.dropout)
        self.towers = Towers(features, args.bottom_mlp[-1], args.tower_mlp, args.dropout)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """The output of each task by its name, and the first one's as `logits`, float32 [B]."""
        x = self.bottom(inputs.flat)
        return self.towers([x] * len(inputs.features.tasks))  # type: ignore[no-any-return]
