"""Two towers: Covington, Adams and Sargin, "Deep Neural Networks for YouTube Recommendations" (RecSys 2016); Yi et al.,
"Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations" (RecSys 2019)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from headrace.config.model_args import TwoTowerArgs
from headrace.errors import UserError, nearest
from headrace.models.collaborative import dots_with_negatives
from headrace.models.inputs import InputFeatures, Inputs, check_feature
from headrace.models.layers import hidden_layers
from headrace.models.lookups import EmbeddingLookup
from headrace.models.losses import sampled_softmax

_DRAWN = "drawn items"


class TwoTower(nn.Module):
    """An MLP over a user's features and one over an item's; the logit is the dot product of their outputs.

    The loss is the softmax of a positive row's item among the items of all positive rows of the step, on all ranks, and
    among drawn items (mixed negatives: Yang et al., "Mixed Negative Sampling for Learning Two-tower Neural Networks in
    Recommendations", 2020). Optionally only the hardest drawn items count (dynamic negatives: Zhang et al., "Optimizing
    Top-N Collaborative Filtering via Dynamic Negative Item Sampling", 2013).

    The logarithm of an item's expected number of occurrences in that comparison is subtracted from its logit. Other
    occurrences of the row's own item are left out. With `train.accumulate` each micro-batch is compared within itself.
    """

    Args = TwoTowerArgs

    def __init__(self, features: InputFeatures, args: TwoTowerArgs) -> None:
        super().__init__()
        self.args, self.item = args, args.item
        users = args.user_features or features.tagged("user")
        #: Features from which an item's vector is computed.
        self.item_features = tuple(dict.fromkeys((args.item, *(args.item_features or features.tagged("item")))))
        if not users:
            raise UserError(
                "two_tower: no feature is a user's; tag them (`tags: [user]` in features.workflow), or name them in "
                "model.args.user_features"
            )
        if args.drawn and len(self.item_features) > 1:
            raise UserError(
                f"two_tower: drawn items are known by their code alone, and items here have "
                f"{', '.join(self.item_features[1:])} too: leave model.args.drawn out, or these features"
            )
        check_feature(features, "model.args.item", args.item, is_list=False)
        width = args.dim or features.embedding_dim
        self.user_tower = Tower(features, users, args.user_mlp, width, args)
        self.item_tower = Tower(features, self.item_features, args.item_mlp, width, args)
        self.lookups = [
            EmbeddingLookup(name, name, features.embedding_dim, pooling="mean" if name in features.lists else "sum")
            for name in dict.fromkeys([*self.user_tower.categorical, *self.item_tower.categorical])
        ]
        if args.drawn:
            self.lookups.append(EmbeddingLookup(_DRAWN, args.item, features.embedding_dim, ids="negatives"))

    def queries(self, inputs: Inputs) -> Tensor:
        """Return vectors of the rows' users: float32 [B, D]."""
        out: Tensor = self.user_tower(inputs) / self.args.temperature
        return out

    def items(self, inputs: Inputs) -> Tensor:
        """Return vectors of the rows' items: float32 [B, D]."""
        out: Tensor = self.item_tower(inputs)
        return out

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return `logits` float32 [B]; in training `queries` and `items` [B, D] besides, `drawn` [n, D] or [B, n,
        D].
        """
        queries, items = self.queries(inputs), self.items(inputs)
        outputs = {"logits": (queries * items).sum(dim=1)}
        if self.training:
            outputs |= {"queries": queries, "items": items}
            if self.args.drawn:
                outputs["drawn"] = self.item_tower.encode(inputs.embedding(_DRAWN))
        return outputs

    def loss(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        """Return the sum over the positive rows, []. Collective."""
        positive = inputs.labels > 0
        queries, item_ids = outputs["queries"][positive], self._ids(inputs)[positive]
        items = outputs["items"][positive]
        target = (queries * items).sum(dim=1)
        met = inputs.all_gather(item_ids) if self.args.in_batch else item_ids[:0]
        draws = inputs.negatives.shape[-1] if self.args.drawn else 0

        def log_expected(ids: Tensor) -> Tensor:
            """Return the log of the expected number of occurrences of items beside a row; of the shape of `ids`."""
            if not self.args.log_q:
                return torch.zeros(ids.shape, device=ids.device)
            parts = []
            if self.args.in_batch:
                parts.append(inputs.log_q(self.item, ids, "positives") + math.log(max(len(met), 1)))
            if draws:
                parts.append(inputs.log_q(self.item, ids, "negatives") + math.log(draws))
            return parts[0] if len(parts) == 1 else torch.logaddexp(*parts)

        compared, log_q, hits = [], [], []
        if self.args.in_batch:
            compared.append(queries @ inputs.all_gather(items).T)
            log_q.append(log_expected(met).expand_as(compared[-1]))
            hits.append(item_ids.unsqueeze(1) == met)
        if draws:
            drawn, ids = outputs["drawn"], inputs.negatives
            if drawn.ndim == 3:
                drawn, ids = drawn[positive], ids[positive]
            logits = dots_with_negatives(queries, drawn)
            expected, is_own = log_expected(ids).expand_as(logits), (item_ids.unsqueeze(1) == ids).expand_as(logits)
            if self.args.hard is not None:
                corrected = (logits.detach() - expected).masked_fill(is_own, -torch.inf)
                hardest = corrected.topk(min(self.args.hard, draws)).indices
                logits, expected, is_own = (x.gather(1, hardest) for x in (logits, expected, is_own))
            compared.append(logits)
            log_q.append(expected)
            hits.append(is_own)
        return sampled_softmax(
            target,
            torch.cat(compared, dim=1),
            None if inputs.weights is None else inputs.weights[positive],
            log_q=(log_expected(item_ids), torch.cat(log_q, dim=1)),
            hits=torch.cat(hits, dim=1),
        )

    def _ids(self, inputs: Inputs) -> Tensor:
        ids = inputs.ids(self.item)
        assert isinstance(ids, Tensor)
        return ids


class Tower(nn.Module):
    """ReLU layers over features side by side, and a linear layer: float32 [B, width], optionally of length 1.

    Args:
        features: the dataset's features.
        names: the features that the tower reads.
        hidden: widths of the ReLU layers.
        width: width of the vectors.
        args: dropout and normalisation.

    Raises:
        UserError: the dataset lacks a feature.
    """

    def __init__(
        self, features: InputFeatures, names: Sequence[str], hidden: Sequence[int], width: int, args: TwoTowerArgs
    ) -> None:
        super().__init__()
        known = [*features.continuous, *features.categorical]
        for name in names:
            if name not in known:
                raise UserError(
                    f"two_tower: the dataset has no feature '{name}'{nearest(name, known)}; it has: {', '.join(known)}"
                )
        self.continuous = [name for name in names if name in features.continuous]
        self.categorical = [name for name in names if name in features.categorical]
        inputs = sum(features.continuous[name] for name in self.continuous)
        inputs += len(self.categorical) * features.embedding_dim
        self.layers = hidden_layers(inputs, hidden, args.dropout, outputs=width)
        self._normalizes = args.normalize

    def forward(self, inputs: Inputs) -> Tensor:
        return self.encode(
            *[inputs[name] for name in self.continuous], *[inputs.embedding(n) for n in self.categorical]
        )

    def encode(self, *vectors: Tensor) -> Tensor:
        """Encode vectors of the features: float32 [..., columns] each."""
        side_by_side = torch.cat(vectors, dim=-1)
        vector: Tensor = self.layers(side_by_side.flatten(0, -2)).unflatten(0, side_by_side.shape[:-1])
        return normalize(vector, dim=-1) if self._normalizes else vector
