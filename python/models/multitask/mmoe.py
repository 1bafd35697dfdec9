"""MMoE: Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts" (2018)."""

from __future__ import annotations

from torch import Tensor, nn

from headrace.config.model_args import MMoEArgs
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.multitask.layers import Experts, Gate, Towers


class MMoE(nn.Module):
    """Experts that all tasks share, a gate over them and an MLP behind it for each task."""

    Args = MMoEArgs

    def __init__(self, features: InputFeatures, args: MMoEArgs) -> None:
        super().__init__()
        width = features.flat_columns
        self.experts = Experts(args.experts, width, args.expert_mlp, args.dropout)
        self.gates = nn.ModuleList(Gate(width, args.experts) for _ in features.tasks)
        self.towers = Towers(features, args.expert_mlp[-1], args.tower_mlp, args.dropout)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """The output of each task by its name, and the first one's as `logits`, float32 [B]."""
        x = inputs.flat
        experts = self.experts(x)
        return self.towers([gate(x, experts) for gate in self.gates])  # type: ignore[no-any-return]
