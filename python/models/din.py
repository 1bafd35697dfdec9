"""DIN: Zhou et al., "Deep Interest Network for Click-Through Rate Prediction" (KDD 2018, arXiv:1706.06978)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from headrace.config.model_args import DINArgs
from headrace.embeddings.jagged import JaggedTensor
from headrace.models.inputs import InputFeatures, Inputs, check_feature
from headrace.models.lookups import EmbeddingLookup


class DIN(nn.Module):
    """An MLP over all features, in which the items of histories are weighted by attention to the row's item.

    Each pair of `histories` (an item's feature and a list of such items) has an attention of its own. Histories are
    never padded: the MLP that weights an item reads the items of all rows, one after the other. Other list features are
    summed.

    Raises:
        UserError: a history is not a list, or its item's feature does not have one id a row.
    """

    Args = DINArgs

    def __init__(self, features: InputFeatures, args: DINArgs) -> None:
        super().__init__()
        for target, history in args.histories.items():
            check_feature(features, "model.args.histories", target, is_list=False)
            check_feature(features, "model.args.histories", history, is_list=True)
        # Sorted, so that saved weights fit for any order of the spec's keys.
        self.histories = dict(sorted(args.histories.items()))
        lists, dim = set(self.histories.values()), features.embedding_dim
        self.pooled = [f for f in features.categorical if f not in lists]
        self.lookups = [
            EmbeddingLookup(f, f, dim, pooling="none" if f in lists else "sum") for f in features.categorical
        ]
        self.softmax = args.softmax
        # A list and no dict, since a feature may have the name of an attribute of torch modules.
        self.attention = nn.ModuleList(
            ActivatedMLP((4 * dim, *args.attention_mlp, 1), args.activation, 0.0) for _ in self.histories
        )
        width = features.continuous_columns + (len(self.pooled) + len(self.histories)) * dim
        self.mlp = ActivatedMLP((width, *args.mlp, 1), args.activation, args.dropout)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return `logits` float32 [B]."""
        parts = [inputs.continuous, *(inputs.embedding(f) for f in self.pooled)]
        for (target, history), attention in zip(self.histories.items(), self.attention, strict=True):
            parts.append(self._interest(attention, inputs.embedding(target), inputs.sequence(history), inputs))
        return {"logits": self.mlp(torch.cat(parts, dim=1), inputs).squeeze(1)}

    def _interest(self, attention: nn.Module, target: Tensor, history: JaggedTensor, inputs: Inputs) -> Tensor:
        """Return the histories' sums weighted by attention to the rows' items [B, D]: [B, D]."""
        history = history.flat()
        row = history.owners
        items, target_items = history.values, target.index_select(0, row)
        weights = attention(torch.cat([items, target_items, items - target_items, items * target_items], 1), inputs)
        if self.softmax:
            weights = _softmax_of_rows(JaggedTensor(weights, history.offsets), row)
        return JaggedTensor(items * weights, history.offsets).pooled("sum")


def _softmax_of_rows(weights: JaggedTensor, row: Tensor) -> Tensor:
    """Return the softmax [N, 1] over each row's weights."""
    with torch.no_grad():
        most = weights.pooled("max") if torch.compiler.is_exporting() else _most_of_rows(weights)
    powers = (weights.values - most.index_select(0, row)).exp()
    return powers / JaggedTensor(powers, weights.offsets).pooled("sum").index_select(0, row)


def _most_of_rows(weights: JaggedTensor) -> Tensor:
    return torch.segment_reduce(weights.values, "max", offsets=weights.offsets, initial=-torch.inf)


class ActivatedMLP(nn.Module):
    """Linear layers with Dice or PReLU between them: [N, widths[0]] -> [N, widths[-1]]."""

    def __init__(self, widths: Sequence[int], activation: str, dropout: float) -> None:
        super().__init__()
        self.linear = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths))
        self.activations = nn.ModuleList(Dice(w) if activation == "dice" else nn.PReLU(w) for w in widths[1:-1])
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, inputs: Inputs) -> Tensor:
        for linear, activation in zip(self.linear, self.activations, strict=False):
            x = linear(x)
            x = self.dropout(activation(x, inputs) if isinstance(activation, Dice) else activation(x))
        out: Tensor = self.linear[-1](x)
        return out


class Dice(nn.Module):
    """p x + (1 - p) alpha x, p = sigmoid((x - mean) / sqrt(variance + eps)) (section 5.3 of the paper): [N, W].

    In training, mean and variance are those of the step's values on all ranks, so the result does not depend on the
    number of ranks. In evaluation they are moving averages.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, width: int, eps: float = 1e-8, momentum: float = 0.1) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(width))
        self.eps, self.momentum = eps, momentum
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))

    def forward(self, x: Tensor, inputs: Inputs) -> Tensor:
        mean, variance = self._statistics(x, inputs) if self.training else (self.mean, self.variance)
        p = torch.sigmoid((x - mean) / (variance + self.eps).sqrt())
        return p * x + (1 - p) * self.alpha * x

    def _statistics(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return mean and variance [W] over all ranks, float32, with gradients. Collective, two messages."""
        x = x.to(self.mean.dtype)  # bfloat16 (train.precision) has too few digits for a sum, or a number of rows
        sums = inputs.all_gather(torch.cat([x.sum(0), x.new_tensor([len(x)])]).unsqueeze(0)).sum(0)
        count = sums[-1].detach().clamp(min=1)
        mean = sums[:-1] / count
        # Squares of the differences from the mean; the difference of sums of squares would lose digits.
        variance = inputs.all_gather((x - mean).square().sum(0, keepdim=True)).sum(0) / count
        with torch.no_grad():
            self.mean.lerp_(mean, self.momentum)
            self.variance.lerp_(variance, self.momentum)
        return mean, variance
