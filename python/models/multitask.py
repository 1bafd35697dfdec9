"""Models of several labels (`train.tasks`): shared bottom, MMoE, PLE, ESMM, each from its paper."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headrace.config.model_args import ESMMArgs, MMoEArgs, PLEArgs, SharedBottomArgs
from headrace.errors import UserError
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.layers import hidden_layers


class Towers(nn.Module):
    """An MLP for each task, from its representation float32 [B, width] to its output [B]; inputs in order of the tasks.

    `logits` is the output of the first task.
    """

    def __init__(self, features: InputFeatures, width: int, widths: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.tasks = features.tasks
        # A list and no dict, since a task may have the name of an attribute of torch modules.
        self.towers = nn.ModuleList(hidden_layers(width, widths, dropout, outputs=1) for _ in features.tasks)

    def forward(self, representations: Sequence[Tensor]) -> dict[str, Tensor]:
        outputs = {
            task: tower(x).squeeze(1) for task, tower, x in zip(self.tasks, self.towers, representations, strict=True)
        }
        return {"logits": outputs[self.tasks[0]], **outputs}


class Experts(nn.Module):
    """MLPs side by side over the same inputs: float32 [B, inputs] -> [B, experts, widths[-1]]."""

    def __init__(self, experts: int, inputs: int, widths: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.experts = nn.ModuleList(hidden_layers(inputs, widths, dropout) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.experts], dim=1)


class ExpertGate(nn.Module):
    """A mean of experts whose weights, a softmax, are a linear function of the inputs.

    Inputs float32 [B, inputs] and experts' outputs [B, experts, D] -> [B, D].
    """

    def __init__(self, inputs: int, experts: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, experts, bias=False)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        shares = self.linear(x).softmax(dim=1)
        return torch.einsum("be,bed->bd", shares, experts)


class SharedBottom(nn.Module):
    """One MLP that all tasks share, followed by an MLP for each task.

    Caruana, "Multitask Learning" (Machine Learning 1997).
    """

    Args = SharedBottomArgs

    def __init__(self, features: InputFeatures, args: SharedBottomArgs) -> None:
        super().__init__()
        self.bottom = hidden_layers(features.flat_columns, args.bottom_mlp, args.dropout)
        self.towers = Towers(features, args.bottom_mlp[-1], args.tower_mlp, args.dropout)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return the output of each task by its name, and the first one's as `logits`, float32 [B]."""
        x = self.bottom(inputs.flat)
        return self.towers([x] * len(inputs.features.tasks))  # type: ignore[no-any-return]


class MMoE(nn.Module):
    """Experts that all tasks share; for each task a gate over them, followed by an MLP.

    Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts" (2018).
    """

    Args = MMoEArgs

    def __init__(self, features: InputFeatures, args: MMoEArgs) -> None:
        super().__init__()
        width = features.flat_columns
        self.experts = Experts(args.experts, width, args.expert_mlp, args.dropout)
        self.gates = nn.ModuleList(ExpertGate(width, args.experts) for _ in features.tasks)
        self.towers = Towers(features, args.expert_mlp[-1], args.tower_mlp, args.dropout)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return the output of each task by its name, and the first one's as `logits`, float32 [B]."""
        x = inputs.flat
        experts = self.experts(x)
        return self.towers([gate(x, experts) for gate in self.gates])  # type: ignore[no-any-return]


class PLE(nn.Module):
    """Levels of experts, some shared and some of one task; each task reads its own and the shared ones.

    Tang et al., "Progressive Layered Extraction (PLE)" (RecSys 2020).
    """

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
        """Return the output of each task by its name, and the first one's as `logits`, float32 [B]."""
        of_tasks: Sequence[Tensor] = [inputs.flat] * len(inputs.features.tasks)
        shared = inputs.flat
        for level in self.levels:
            of_tasks, shared = level(of_tasks, shared)
        return self.towers(of_tasks)  # type: ignore[no-any-return]


class ExtractionLevel(nn.Module):
    """Customized gate control: gates of the tasks over their own and the shared experts, and one gate over all.

    It maps the inputs of each task and the shared inputs, float32 [B, inputs] each, to [B, widths[-1]] each. The last
    level has no shared gate, since nothing would read its output.
    """

    def __init__(self, tasks: int, inputs: int, args: PLEArgs, *, is_last: bool) -> None:
        super().__init__()
        task_experts, shared = args.task_experts, args.shared_experts

        def experts(n: int) -> Experts:
            return Experts(n, inputs, args.expert_mlp, args.dropout)

        self.own = nn.ModuleList(experts(task_experts) for _ in range(tasks))
        self.shared = experts(shared)
        self.gates = nn.ModuleList(ExpertGate(inputs, task_experts + shared) for _ in range(tasks))
        self.shared_gate = None if is_last else ExpertGate(inputs, tasks * task_experts + shared)

    def forward(self, of_tasks: Sequence[Tensor], shared: Tensor) -> tuple[list[Tensor], Tensor]:
        expert_outputs = [experts(x) for experts, x in zip(self.own, of_tasks, strict=True)]
        common = self.shared(shared)
        outputs = [
            gate(x, torch.cat([task_outputs, common], dim=1))
            for gate, x, task_outputs in zip(self.gates, of_tasks, expert_outputs, strict=True)
        ]
        return outputs, shared if self.shared_gate is None else self.shared_gate(
            shared, torch.cat([*expert_outputs, common], dim=1)
        )


class ESMM(nn.Module):
    """An MLP for each task over the same embeddings; conversions after clicks are learned over all impressions.

    Ma et al., "Entire Space Multi-Task Model" (SIGIR 2018).

    The conversion's output is its probability after a click. It has no loss of its own (weight 0). The loss is on the
    product of both probabilities, over all rows, since the clicked rows would be a biased sample.

        tasks:
          click: {}
          purchase: {label: purchased, where: click, weight: 0}
          click_and_purchase: {product: [click, purchase]}

    Raises:
        UserError: no task is a product.
    """

    Args = ESMMArgs

    def __init__(self, features: InputFeatures, args: ESMMArgs) -> None:
        super().__init__()
        if not features.products:
            raise UserError(
                "model.class 'esmm' learns a conversion from a product of tasks, and train.tasks has none: write "
                "click_and_purchase: {product: [click, purchase]} beside both, and weight: 0 for the purchase"
            )
        self.towers = Towers(features, features.flat_columns, args.tower_mlp, args.dropout)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return the output of each task by its name, and the first one's as `logits`, float32 [B]."""
        return self.towers([inputs.flat] * len(inputs.features.tasks))  # type: ignore[no-any-return]
