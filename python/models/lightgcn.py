"""LightGCN: He et al., "LightGCN: Simplifying and Powering Graph Convolution Network for Recommendation" (2020)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from headrace.config.model_args import LightGCNArgs
from headrace.models.collaborative import cardinality_of, dots, dots_with_negatives, loss_of, unit
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.lookups import EmbeddingLookup


class LightGCN(nn.Module):
    """Vectors of users and items, propagated over the graph of their positive rows; the logit is a dot product.

    Layer k + 1 is D^-1/2 A D^-1/2 times layer k, where A is the adjacency of both sides and D has its degrees. A vector
    is the mean of layers 0 to `layers`. Each step propagates both tables completely, so they and the graph must fit on
    each rank.

    The graph has the training rows with a positive label (`observe`) and is saved with the model. The codes of null and
    of values outside the vocabulary are nodes like others. A code without an edge has its own vector over `layers` + 1.
    """

    Args = LightGCNArgs
    #: Buffers that `observe` creates; their shapes depend on the data.
    observed = ("graph_users", "graph_items")

    def __init__(self, features: InputFeatures, args: LightGCNArgs) -> None:
        super().__init__()
        self.args, self.item, self._cosine = args, args.item, args.similarity == "cosine"
        self._sizes = cardinality_of(features, args.user), cardinality_of(features, args.item)
        width = features.embedding_dim
        self.lookups = [
            EmbeddingLookup("all_users", args.user, width, ids="all"),
            EmbeddingLookup("all_items", args.item, width, ids="all"),
        ]
        #: The edges: distinct pairs of codes in the order of users, int64 [E] each.
        self.graph_users: Tensor
        self.graph_items: Tensor
        for name in self.observed:
            self.register_buffer(name, torch.empty(0, dtype=torch.int64))
        self._adjacency: _Adjacency | None = None
        self._propagated: tuple[Tensor, Tensor] | None = None

    def observe(self, rows: Iterable[Inputs]) -> None:
        """Build the graph from the rows of the split `train`."""
        items = self._sizes[1]
        keys = []
        for batch in rows:
            user, item = _codes(batch, self.args.user), _codes(batch, self.item)
            keys.append(torch.unique((user * items + item)[batch.labels > 0]))
        pairs = torch.unique(torch.cat(keys)) if keys else self.graph_users
        device = self.graph_users.device
        self.graph_users, self.graph_items = (pairs // items).to(device), (pairs % items).to(device)
        self._adjacency = None

    def train(self, mode: bool = True) -> LightGCN:
        """Switch between training and evaluation; drop the propagated vectors."""
        self._propagated = None
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> LightGCN:
        self._adjacency = self._propagated = None  # these are still on the previous device
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._adjacency = self._propagated = None

    def _vectors(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the vectors of all users and all items, [cardinality, D] each; in evaluation computed once."""
        if self._propagated is not None:
            inputs.drop_embeddings()
            return self._propagated
        if self._adjacency is None:
            self._adjacency = _Adjacency(self.graph_users, self.graph_items, *self._sizes)
        users, items = inputs.embedding("all_users").float(), inputs.embedding("all_items").float()
        all_users, all_items = users, items
        for _ in range(self.args.layers):
            users, items = self._adjacency.to_users(items), self._adjacency.to_items(users)
            all_users, all_items = all_users + users, all_items + items
        vectors = all_users / (self.args.layers + 1), all_items / (self.args.layers + 1)
        if self._cosine:
            vectors = unit(vectors[0]), unit(vectors[1])
        if not self.training and not torch.is_grad_enabled():
            self._propagated = vectors
        return vectors

    def queries(self, inputs: Inputs) -> Tensor:
        """Return vectors of the rows' users, float32 [B, D]."""
        return self._vectors(inputs)[0][_codes(inputs, self.args.user)] / self.args.temperature

    def items(self, inputs: Inputs) -> Tensor:
        """Return vectors of the rows' items, float32 [B, D]."""
        return self._vectors(inputs)[1][_codes(inputs, self.item)]

    def all_items(self, inputs: Inputs) -> Tensor:
        """Return the vectors of all codes, [cardinality, D]."""
        return self._vectors(inputs)[1]

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return `logits` float32 [B]; in training `negatives` [B, n] besides, where the loss uses them."""
        users, items = self._vectors(inputs)
        queries = users[_codes(inputs, self.args.user)] / self.args.temperature
        outputs = {"logits": dots(queries, items[_codes(inputs, self.item)])}
        if self.training and self.args.loss != "bce":
            outputs["negatives"] = dots_with_negatives(queries, items[inputs.negatives])
        return outputs

    def loss(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        """Return the sum over the rows, []."""
        return loss_of(self.args.loss, outputs, inputs, self.item)

    def frozen(self, inputs: Inputs) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return an equivalent network without the graph, and its tables, by lookup: float32 [cardinality, D].

        Args:
            inputs: inputs of any rows, in evaluation mode.
        """
        with torch.no_grad():
            users, items = self._vectors(inputs)
            width = users.shape[1]
            return PropagatedVectors(self.args.user, self.item, width), {
                "user": users / self.args.temperature,
                "item": items,
            }


class PropagatedVectors(nn.Module):
    """Propagated LightGCN: a vector of each user and each item; the logit is their dot product."""

    def __init__(self, user: str, item: str, width: int) -> None:
        super().__init__()
        self.item = item
        self.lookups = [
            EmbeddingLookup("user", user, width, table="propagated_users"),
            EmbeddingLookup("item", item, width, table="propagated_items"),
        ]

    def queries(self, inputs: Inputs) -> Tensor:
        """Return vectors of the rows' users, float32 [B, D]."""
        return inputs.embedding("user")

    def items(self, inputs: Inputs) -> Tensor:
        """Return vectors of the rows' items, float32 [B, D]."""
        return inputs.embedding("item")

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return `logits` float32 [B]."""
        return {"logits": dots(self.queries(inputs), self.items(inputs))}


def _codes(inputs: Inputs, feature: str) -> Tensor:
    codes = inputs.ids(feature)
    assert isinstance(codes, Tensor)
    return codes


class _Adjacency:
    """The normalised graph, for propagation to either side.

    Args:
        users: codes of the edges' users, int64 [E], ascending.
        items: codes of the edges' items, int64 [E]; pairs are distinct.
        user_codes: number of users' codes.
        item_codes: number of items' codes.
    """

    def __init__(self, users: Tensor, items: Tensor, user_codes: int, item_codes: int) -> None:
        user_degrees, item_degrees = users.bincount(minlength=user_codes), items.bincount(minlength=item_codes)
        weights = 1 / (user_degrees[users] * item_degrees[items]).float().sqrt()
        order = torch.argsort(items, stable=True)
        self._of_users = _Neighbours(items, _starts(user_degrees), weights)
        self._of_items = _Neighbours(users[order], _starts(item_degrees), weights[order])

    def to_users(self, items: Tensor) -> Tensor:
        """Propagate [item codes, D] -> [user codes, D]."""
        return _Propagation.apply(items, self._of_users, self._of_items)  # type: ignore[no-any-return,no-untyped-call]

    def to_items(self, users: Tensor) -> Tensor:
        """Propagate [user codes, D] -> [item codes, D]."""
        return _Propagation.apply(users, self._of_items, self._of_users)  # type: ignore[no-any-return,no-untyped-call]


@dataclass(frozen=True)
class _Neighbours:
    """Edges by node: codes of the other side int64 [E], the offset of each node's edges, and weights float32 [E]."""

    codes: Tensor
    starts: Tensor
    weights: Tensor

    def sum(self, x: Tensor) -> Tensor:
        """Return the weighted sum of each node's neighbours' rows."""
        return embedding_bag(self.codes, x.contiguous(), self.starts, mode="sum", per_sample_weights=self.weights)


class _Propagation(torch.autograd.Function):
    """Propagation along edges; its gradient propagates along the transpose, without scattered writes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, neighbours: _Neighbours, reverse: _Neighbours) -> Tensor:
        ctx.back = reverse
        return neighbours.sum(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back.sum(gradients[0]), None, None


def _starts(degrees: Tensor) -> Tensor:
    return degrees.cumsum(0) - degrees
