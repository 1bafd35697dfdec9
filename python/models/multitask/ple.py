"""PLE: Tang et al., "Progressive Layered Extraction (PLE)" (RecSys 2020)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headrace.config.model_args import PLEArgs
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.multitask.layers import Experts, Gate, Towers


class PLE(nn.Module):
    """Levels of experts, some shared and some of one task; each task sees its own and the shared ones."""

    Args = PLEArgs

    def __init__(self, features: InputFeatures, args: PLEArgs) -> None:
        super().__init__()
        widths = [features.flat_columns, *[args.expert_mlp[-1]] * (args.levels - 1)]
        self.levels = nn.ModuleList(
            ExtractionLevel(len(features.tasks), width, args, is_last=i + 1 == args.levels)
            for i, width in enumerate(widths)
        )
        self.towers = Towers(features, args.expert_mlp[-1], args.tower_mlp, args.dropout)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """The output of each task by its name, and the first one's as `logits`, float32 [B]."""
        of_tasks: Sequence[Tensor] = [inputs.flat] * len(inputs.features.tasks)
        shared = inputs.flat
        for level in self.levels:
            of_tasks, shared = level(of_tasks, shared)
        return self.towers(of_tasks)  # type: ignore[no-any-return]


class ExtractionLevel(nn.Module):
    """Customized gate control: gates of the tasks over their own and the shared experts, and one gate over all.

    Of the tasks' inputs, float32 [B, inputs] each, and the shared ones, [B, inputs], to the same with [B, widths[-1]].
    The last level has no shared gate: nothing looks at it.
    """

    def __init__(self, tasks: int, inputs: int, args: PLEArgs, *, is_last: bool) -> None:
        super().__init__()
        own, shared = args.task_experts, args.shared_experts

        def experts(n: int) -> Experts:
            return Experts(n, inputs, args.expert_mlp, args.dropout)

        self.own = nn.ModuleList(experts(own) for _ in range(tasks))
        self.shared = experts(shared)
        self.gates = nn.ModuleList(Gate(inputs, own + shared) for _ in range(tasks))
        self.shared_gate = None if is_last else Gate(inputs, tasks * own + shared)

    def forward(self, of_tasks: Sequence[Tensor], shared: Tensor) -> tuple[list[Tensor], Tensor]:
        own = [experts(x) for experts, x in zip(self.own, of_tasks, strict=True)]
        common = self.shared(shared)
        found = [
            gate(x, torch.cat([mine, common], dim=1)) for gate, x, mine in zip(self.gates, of_tasks, own, strict=True)
        ]
        return found, shared if self.shared_gate is None else self.shared_gate(shared, torch.cat([*own, common], dim=1))
