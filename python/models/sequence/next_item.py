"""What models of the next item have in common: a history's states, an item table, losses over all of its places."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, softplus

from headrace.config.sequence_args import NextItemArgs
from headrace.embeddings.input.jagged import JaggedTensor
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.lookups import EmbeddingLookup
from headrace.models.losses.pointwise import binary_cross_entropy
from headrace.models.losses.reduction import weighted_sum
from headrace.models.losses.softmax import sampled_softmax
from headrace.models.sequence.features import check_feature
from headrace.models.sequence.ragged import newest_of, places_of


class NextItemModel(nn.Module):
    """A model that says after each item of a history which one comes next.

    A row is a history h1 .. hn (a list, its items before the row's event) and the item of the row. One pass over the
    history gives a state after each of its items: the state after hn is the row's query, whose dot product with the
    row's item is its logit. In training with `positions: all` the state after h_k is to find h_{k+1} as well, so a row
    that holds a user's whole sequence learns all of it; with `positions: last` the query alone learns, for datasets
    that have a row an event. A row's item counts as much as its label says, items of a history count 1, and what the
    vocabulary lacks is nobody's target.

    A state looks at the items up to its own: those behind it, and other rows, change nothing.

    Subclasses make states of vectors (`encode`). History and item share a table: name both in one `categorify`.

    Raises:
        UserError: `history` is no list feature, or `item` none of one id a row.
    """

    def __init__(self, features: InputFeatures, args: NextItemArgs) -> None:
        super().__init__()
        check_feature(features, "model.args.history", args.history, is_list=True)
        check_feature(features, "model.args.item", args.item, is_list=False)
        self.args = args
        self.item = args.item
        self.dim = features.embedding_dim
        self._first_code = features.first_code.get(args.item, 0)
        self.lookups = [
            EmbeddingLookup("history", args.history, self.dim, pooling="none"),
            EmbeddingLookup("item", args.item, self.dim),
            EmbeddingLookup("all_items", args.item, self.dim, ids="all"),
        ]
        if args.loss != "softmax":
            self.lookups.append(EmbeddingLookup("negatives", args.item, self.dim, ids="negatives"))
        #: The query of a row without a history.
        self.start = nn.Parameter(torch.zeros(self.dim))

    @abstractmethod
    def encode(self, items: JaggedTensor, inputs: Inputs) -> Tensor:
        """States float32 [N, D] after each item of the rows' histories.

        Args:
            items: vectors [N, D], the oldest first, at most `length` a row; offsets begin at 0.
            inputs: the batch.
        """

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """`logits` float32 [B]; for the loss `queries` [B, D] and `states` [N, D]."""
        states = self._states(inputs)
        queries = self._queries(states)
        return {"logits": (queries * self.items(inputs)).sum(1), "queries": queries, "states": states.values}

    def queries(self, inputs: Inputs) -> Tensor:
        """What each row looks for: float32 [B, D]."""
        return self._queries(self._states(inputs))

    def items(self, inputs: Inputs) -> Tensor:
        """The rows' items: float32 [B, D]."""
        return self._scored(inputs.embedding("item"))

    def all_items(self, inputs: Inputs) -> Tensor:
        """All items by code: float32 [cardinality, D]. Collective."""
        return self._scored(inputs.embedding("all_items"))

    def loss(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        """The sum over the rows of what `args.loss` finds at each of their places, []."""
        queries, targets, vectors, rows, places = self._targets(outputs, inputs)
        weights = (targets >= self._first_code).to(inputs.labels.dtype)
        weights[: inputs.rows] *= inputs.labels
        if inputs.weights is not None:
            weights = weights * inputs.weights[rows]
        if self.args.loss == "softmax":
            known = self.all_items(inputs)[self._first_code :]
            logits, chosen = queries @ known.T, (targets - self._first_code).clamp(min=0)
            return weighted_sum(logits.logsumexp(1) - logits.gather(1, chosen.unsqueeze(1)).squeeze(1), weights)
        positives = (queries * vectors).sum(1)
        negatives, hits = self._negatives(queries, targets, rows, places, inputs)
        if self.args.loss == "sampled_softmax":
            return sampled_softmax(positives, negatives, weights, hits=hits)
        negatives = negatives.masked_fill(hits, -torch.inf)
        ones = torch.ones_like(positives)
        return binary_cross_entropy(positives, ones, weights) + weighted_sum(softplus(negatives).sum(1), weights)

    def _states(self, inputs: Inputs) -> JaggedTensor:
        items = newest_of(inputs.sequence("history"), self.args.length, newest_first=self.args.newest == "first")
        states = self.encode(items, inputs)
        if self.args.temperature is not None:
            states = normalize(states, dim=1) / self.args.temperature
        return JaggedTensor(states, items.offsets)

    def _queries(self, states: JaggedTensor) -> Tensor:
        """The last state of each row [B, D], and `start` where there is none."""
        last = states.offsets[1:] - 1
        if not len(states.values):  # the sum of nothing, so that every weight has a gradient
            return self.start.expand(len(last), -1) + states.values.sum()
        found = states.values.index_select(0, last.clamp(min=0))
        return torch.where((states.lengths > 0).unsqueeze(1), found, self.start)

    def _scored(self, items: Tensor) -> Tensor:
        return items if self.args.temperature is None else normalize(items, dim=-1)

    def _targets(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Of each target: query [P, D], id, vector [P, D], row and place in the row; the rows' own items come first."""
        ids, history = inputs.ids(self.item), inputs.ids(self.args.history)
        assert isinstance(ids, Tensor)
        assert isinstance(history, JaggedTensor)
        newest_first = self.args.newest == "first"
        history = newest_of(history, self.args.length, newest_first=newest_first)
        rows = torch.arange(inputs.rows, device=ids.device)
        own = outputs["queries"], ids, self.items(inputs), rows, history.lengths
        if self.args.positions == "last":
            return own
        places = places_of(history.offsets)
        later = (places > 0).nonzero().squeeze(1)
        vectors = newest_of(inputs.sequence("history"), self.args.length, newest_first=newest_first).values
        inner = (
            outputs["states"].index_select(0, later - 1),
            history.values[later],
            self._scored(vectors.index_select(0, later)),
            torch.repeat_interleave(rows, history.lengths)[later],
            places[later],
        )
        query, target, vector, row, place = (torch.cat(pair) for pair in zip(own, inner, strict=True))
        return query, target, vector, row, place

    def _negatives(
        self, queries: Tensor, targets: Tensor, rows: Tensor, places: Tensor, inputs: Inputs
    ) -> tuple[Tensor, Tensor]:
        """Logits of each target's negatives, and which of them are the target itself: [P, n] each."""
        ids, vectors = inputs.negatives, self._scored(inputs.embedding("negatives"))
        if self.args.negatives == "batch":
            ids, vectors = inputs.all_gather(ids.flatten()), inputs.all_gather(vectors.flatten(0, 1))
            return queries @ vectors.T, targets.unsqueeze(1) == ids
        if self.args.negatives == "position":
            drawn = (rows, places % ids.shape[1])
            ids, vectors = ids[drawn].unsqueeze(1), vectors[drawn].unsqueeze(1)
        else:
            ids, vectors = ids[rows], vectors[rows]
        return (vectors @ queries.unsqueeze(2)).squeeze(2), targets.unsqueeze(1) == ids


class PositionEmbedding(nn.Module):
    """Vectors of places, added to the items' vectors times sqrt(D): packed [N, D] -> [N, D].

    Places count from the oldest item that is kept, so that a later event changes no state before it.
    """

    def __init__(self, length: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, dim).normal_(0, 0.02))
        self.dropout = nn.Dropout(dropout)
        self.scale = dim**0.5

    def forward(self, items: JaggedTensor) -> Tensor:
        out: Tensor = self.dropout(items.values * self.scale + self.weight[places_of(items.offsets)])
        return out
