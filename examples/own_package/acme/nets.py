"""The model `acme_factors`: factors of users and items, and a weight of each item."""

from __future__ import annotations

import torch
from torch import nn

from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.lookups import EmbeddingLookup


class Factors(nn.Module):
    """Score a pair by the dot product of its factors, the item's weight and the row's numbers."""

    def __init__(self, features: InputFeatures, user: str, item: str, dim: int = 8) -> None:
        super().__init__()
        self.lookups = (
            EmbeddingLookup("user", user, dim),
            EmbeddingLookup("item", item, dim),
            EmbeddingLookup("weight", item, 1, table="weight"),
        )
        self.numbers = nn.Linear(features.continuous_columns, 1)

    def forward(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        numbers = self.numbers(inputs.continuous).squeeze(1)
        dots = (inputs.embedding("user") * inputs.embedding("item")).sum(dim=1)
        return {"logits": numbers + dots + inputs.embedding("weight").squeeze(1)}
