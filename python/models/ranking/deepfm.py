"""DeepFM: Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction" (IJCAI 2017)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headrace.config.model_args import DeepFMArgs
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.ranking.layers import FirstOrder, hidden_layers


class DeepFM(nn.Module):
    """A factorisation machine and an MLP over the same vectors, summed.

    Every feature is a field: a categorical one is its id's vector, a column of numbers a learned vector times the
    number. The first value of an id's vector is its weight of first order; the machine and the MLP see the others.
    """

    Args = DeepFMArgs

    def __init__(self, features: InputFeatures, args: DeepFMArgs) -> None:
        super().__init__()
        width, columns = features.embedding_dim - 1, features.continuous_columns
        self.first_order = FirstOrder(features)
        #: The vectors that numbers are multiplied with, [C, D - 1].
        self.fields = nn.Parameter(torch.randn(columns, width) / max(width, 1) ** 0.5)
        self.deep = hidden_layers((columns + len(features.categorical)) * width, args.deep_mlp, args.dropout, outputs=1)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """`logits` float32 [B]."""
        numbers = inputs.continuous.unsqueeze(2) * self.fields
        fields = torch.cat([numbers, FirstOrder.rest(inputs)], dim=1)
        # Rendle (2010): the sum of all pairs' dot products is half the square of the sum less the sum of the squares.
        second = 0.5 * (fields.sum(dim=1).square() - fields.square().sum(dim=1)).sum(dim=1)
        return {"logits": self.first_order(inputs) + second + self.deep(fields.flatten(1)).squeeze(1)}
