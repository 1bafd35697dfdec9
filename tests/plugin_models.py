"""A model as a user would write it, in a module of their own: named `tests.plugin_models:Class`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.lookups import EmbeddingLookup
from headrace.models.losses import sampled_softmax


class Factors(nn.Module):
    """A factorisation of users and items with a bias of their own kind of loss: squared error of the probability."""

    def __init__(self, features: InputFeatures, left: str, right: str, hidden: int = 4) -> None:
        super().__init__()
        self.left, self.right = left, right
        self.numbers = nn.Linear(features.continuous_columns, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        dots = (inputs[self.left] * inputs[self.right]).sum(dim=1)
        return {"logits": dots + self.out(torch.tanh(self.numbers(inputs.continuous))).squeeze(1)}

    def loss(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        return (outputs["logits"].sigmoid() - inputs.labels).square().sum()


class Towers(nn.Module):
    """Model in retrieval form: a user is a vector and an age, an item a vector, its tags and a price."""

    item = "item"
    item_features = ("item", "tags", "price")

    def __init__(self, features: InputFeatures, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.ones(2))

    def queries(self, inputs: Inputs) -> Tensor:
        return torch.cat([self.scale * inputs["user"], self.weight[0] * inputs["age"]], dim=1)

    def items(self, inputs: Inputs) -> Tensor:
        return torch.cat([inputs["item"] + inputs["tags"], self.weight[1] * inputs["price"]], dim=1)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        return {"logits": (self.queries(inputs) * self.items(inputs)).sum(dim=1)}


class Settled(nn.Module):
    """Its settings in a pydantic model."""

    class Args(BaseModel):
        scale: float = 1.0

    def __init__(self, features: InputFeatures, args: Args) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((features.flat_columns,), args.scale))

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        return {"logits": inputs.flat @ self.weight}


class Interests(nn.Module):
    """Lookups of every form: tables of its own, a sequence, a whole table; a softmax over all ranks' items."""

    def __init__(self, features: InputFeatures, dim: int = 4, shares: float = 0.1) -> None:
        super().__init__()
        self.shares = shares
        self.lookups = (
            EmbeddingLookup("user", "user", dim),
            EmbeddingLookup("tags", "tags", dim, pooling="none"),
            EmbeddingLookup("item", "item", dim, init_bound=0.2),
            EmbeddingLookup("bias", "item", 1, table="bias"),
            EmbeddingLookup("mean_tags", "tags", dim, pooling="mean"),
            EmbeddingLookup("items", "item", dim, ids="all"),
        )
        self.query = nn.Linear(dim, dim)
        self.numbers = nn.Linear(features.continuous_columns, 1)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        tags, item = inputs.sequence("tags"), inputs.embedding("item")
        row = tags.owners
        weight = (tags.values * item[row]).sum(dim=1, keepdim=True)
        seen = torch.zeros_like(item).index_add(0, row, weight * tags.values)
        query = self.query(inputs.embedding("user") + inputs.embedding("mean_tags")) + seen
        logits = (query * item).sum(dim=1) + inputs.embedding("bias")[:, 0] + self.numbers(inputs.continuous)[:, 0]
        return {"logits": logits, "queries": query}

    def loss(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        clicks = binary_cross_entropy_with_logits(outputs["logits"], inputs.labels, reduction="sum")
        item = inputs.ids("item")
        assert isinstance(item, Tensor)
        of_all = cross_entropy(outputs["queries"] @ inputs.embedding("items").T, item, reduction="sum")
        all_items = inputs.all_gather(inputs.embedding("item"))
        return clicks + self.shares * (of_all + (outputs["queries"] @ all_items.T).square().sum() / len(all_items))


class Drawn(nn.Module):
    """A factorisation that scores drawn items, too."""

    item = "item"

    def __init__(self, features: InputFeatures, dim: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.lookups = (
            EmbeddingLookup("user", "user", dim, init_bound=0.5),
            EmbeddingLookup("item", "item", dim, init_bound=0.5),
            EmbeddingLookup("drawn", "item", dim, ids="negatives"),
        )

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        user, drawn = self.scale * inputs.embedding("user"), inputs.embedding("drawn")
        negatives = user @ drawn.T if drawn.ndim == 2 else (drawn @ user.unsqueeze(2)).squeeze(2)
        return {"logits": (user * inputs.embedding("item")).sum(dim=1), "negatives": negatives}


class Compared(Drawn):
    """Its loss compares a row's item with drawn ones, by how likely these are drawn."""

    def loss(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        item = inputs.ids("item")
        assert isinstance(item, Tensor)
        hits = inputs.negatives == item.unsqueeze(1)
        log_q = inputs.log_q("item", item, "negatives"), inputs.log_q("item", inputs.negatives, "negatives")
        return sampled_softmax(outputs["logits"], outputs["negatives"], inputs.labels, log_q=log_q, hits=hits)


class NoModule:
    """Not a torch module."""
