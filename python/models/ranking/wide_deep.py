"""Wide & Deep: Cheng et al., "Wide & Deep Learning for Recommender Systems" (DLRS 2016)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headrace.config.model_args import WideDeepArgs
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.ranking.layers import FirstOrder, hidden_layers


class WideDeep(nn.Module):
    """A linear model of ids and numbers (wide) and an MLP over their embeddings and the numbers (deep), summed.

    The paper's cross products of columns are features: the operator `hash_cross` makes them. An id's weight in the wide
    part is the first value of its vector, the deep part sees the others: `embedding_dim` is the deep width plus 1.
    """

    Args = WideDeepArgs

    def __init__(self, features: InputFeatures, args: WideDeepArgs) -> None:
        super().__init__()
        self.wide = FirstOrder(features)
        deep = features.flat_columns - len(features.categorical)
        self.deep = hidden_layers(deep, args.deep_mlp, args.dropout, outputs=1)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """`logits` float32 [B]."""
        deep = torch.cat([inputs.continuous, FirstOrder.rest(inputs).flatten(1)], dim=1)
        return {"logits": self.wide(inputs) + self.deep(deep).squeeze(1)}
