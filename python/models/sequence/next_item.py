"""What models of the next item have in common: a history's states, an item table, losses over all of its places."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad, softplus

from headrace.config.model_args import NextItemArgs
from headrace.embeddings.input.jagged import JaggedTensor
from headrace.errors import UserError
from headrace.models.feature_checks import check_feature
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.lookups import EmbeddingLookup
from headrace.models.losses.pointwise import binary_cross_entropy
from headrace.models.losses.reduction import weighted_sum
from headrace.models.losses.shared_negatives import same_ids, shared_sampled_softmax
from headrace.models.losses.softmax import sampled_softmax
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
        UserError: `history` is no list feature, `item` none of one id a row, or they have different vocabularies.
    """

    def __init__(self, features: InputFeatures, args: NextItemArgs) -> None:
        super().__init__()
        check_feature(features, "model.args.history", args.history, is_list=True)
        check_feature(features, "model.args.item", args.item, is_list=False)
        sizes = features.cardinality.get(args.history), features.cardinality.get(args.item)
        if sizes[0] != sizes[1]:
            raise UserError(
                f"model.args: '{args.history}' has {sizes[0]} codes and '{args.item}' {sizes[1]}: let both be of one "
                f"vocabulary, categorify: {{vocabulary: NAME}}"
            )
        if features.vocabulary.get(args.history) != features.vocabulary.get(args.item):
            raise UserError(
                f"model.args: '{args.history}' and '{args.item}' have vocabularies of their own, whose codes mean "
                f"other items: let both be of one, categorify: {{vocabulary: NAME}}"
            )
        self.args = args
        self.item = args.item
        self.dim = features.embedding_dim
        self._first_code = features.first_code.get(args.item, 0)
        self.lookups = [
            EmbeddingLookup("history", args.history, self.dim, pooling="none"),
            EmbeddingLookup("item", args.item, self.dim),
            EmbeddingLookup("others", args.item, self.dim, ids="all" if args.loss == "softmax" else "negatives"),
        ]
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

    def loss(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        """The sum over the rows of what `args.loss` finds at each of their places, []."""
        queries, targets, vectors, rows, places = self._targets(outputs, inputs)
        weights = (targets >= self._first_code).to(inputs.labels.dtype)
        weights[: inputs.rows] *= inputs.labels
        if inputs.weights is not None:
            weights = weights * inputs.weights[rows]
        if self.args.loss == "softmax":
            known = self._scored(inputs.embedding("others"))[self._first_code :]
            logits, chosen = queries @ known.T, (targets - self._first_code).clamp(min=0)
            return weighted_sum(logits.logsumexp(1) - logits.gather(1, chosen.unsqueeze(1)).squeeze(1), weights)
        positives = (queries * vectors).sum(1)
        of_all = self.args.negatives == "batch" or inputs.negatives.ndim == 1
        if self.args.loss == "sampled_softmax" and of_all:
            ids, drawn = self._drawn_by_all(inputs)
            return shared_sampled_softmax(queries, positives, drawn, weights, hits=same_ids(targets, ids))
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
        if torch.compiler.is_exporting():  # whether there are any is not known: a row of zeros is behind them
            found = pad(states.values, (0, 0, 0, 1)).index_select(0, last.clamp(min=0))
            return torch.where((states.lengths > 0).unsqueeze(1), found, self.start)
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

    def _drawn_by_all(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The drawn items of all rows on all ranks: ids [M] and vectors [M, D]."""
        vectors = self._scored(inputs.embedding("others"))
        if inputs.negatives.ndim == 1:  # drawn once for the step
            return inputs.negatives, vectors
        return inputs.all_gather(inputs.negatives.flatten()), inputs.all_gather(vectors.flatten(0, 1))

    def _negatives(
        self, queries: Tensor, targets: Tensor, rows: Tensor, places: Tensor, inputs: Inputs
    ) -> tuple[Tensor, Tensor]:
        """Logits of each target's negatives, and which of them are the target itself: [P, n] each."""
        if self.args.negatives == "batch" or inputs.negatives.ndim == 1:
            ids, vectors = self._drawn_by_all(inputs)
            return queries @ vectors.T, targets.unsqueeze(1) == ids
        ids, vectors = inputs.negatives, self._scored(inputs.embedding("others"))
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
        places = items.places if torch.compiler.is_exporting() else places_of(items.offsets)
        out: Tensor = self.dropout(items.values * self.scale + self.weight[places])
        return out
