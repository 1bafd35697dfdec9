"""DLRM: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headrace import config
from headrace.models.feature_interaction import dot_interaction
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.mlp import MLP


class DLRM(nn.Module):
    """The bottom MLP turns the continuous columns into one vector of the embeddings' width; the dot products of all
    pairs of that vector and the features' embeddings, beside the vector itself, go through the top MLP.

    Without continuous features the vector is a learned constant, which is what a linear layer of no inputs is: its
    products with the embeddings are the first-order terms of a factorisation machine (an item's popularity). Without
    categorical features the top MLP sees the vector alone.
    """

    #: The interaction reads embeddings where they are (headrace.embeddings.lookup.zero_copy).
    reads_in_place = True

    def __init__(self, features: InputFeatures, model: config.Model) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(torch.initial_seed())
        columns, width = features.continuous_columns, features.embedding_dim
        self.bottom: MLP | None = None
        self.constant: nn.Parameter | None = None
        if columns:
            widths = (columns, *model.bottom_mlp, width)
            self.bottom = MLP(widths, generator, last_relu=True, dropout=model.dropout)
        else:
            self.constant = nn.Parameter(torch.empty(width).normal_(0.0, width**-0.5, generator=generator))
        vectors = 1 + len(features.categorical)
        inputs = width + vectors * (vectors - 1) // 2
        self.top = MLP((inputs, *model.top_mlp, 1), generator, dropout=model.dropout)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """`logits` [B]."""
        if self.bottom is not None:
            bottom: Tensor = self.bottom(inputs.continuous)  # [B, D], while the embeddings travel
        else:
            assert self.constant is not None
            bottom = self.constant.expand(inputs.rows, -1)
        x = bottom
        if inputs.features.categorical:
            x = inputs.watch(dot_interaction(bottom, inputs.vectors_in_place(bottom.dtype)))
        logits: Tensor = self.top(x).squeeze(1)
        return {"logits": logits}
