"""Models of the next item of a history: SASRec and HSTU, their losses, and ragged batches.

Histories are ragged: each row has its own number of ids. Layers that work on one place at a time (embeddings, norms,
linear layers, losses) read the places of all rows one after the other, [N, D], without padding. Only attention needs a
row's places side by side: `LengthGroups`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad, scaled_dot_product_attention, silu, softplus

from headrace.config.model_args import HSTUArgs, NextItemArgs, SASRecArgs
from headrace.embeddings.jagged import JaggedTensor
from headrace.errors import UserError
from headrace.models.inputs import InputFeatures, Inputs, check_feature
from headrace.models.lookups import EmbeddingLookup
from headrace.models.losses import binary_cross_entropy, same_ids, sampled_softmax, shared_sampled_softmax, weighted_sum

#: Length of the shortest group: smaller groups would save less padding than they cost in calls.
_SHORTEST = 8


def newest_of(sequence: JaggedTensor, length: int, *, newest_first: bool = False) -> JaggedTensor:
    """Return each row's newest `length` values, the oldest first.

    Args:
        sequence: values [N, ...].
        length: largest number of values of a row.
        newest_first: whether the newest value of a row of `sequence` is the first; else it is the last.

    Returns:
        the values, with offsets from 0 to their number.
    """
    lengths = sequence.lengths
    counts = lengths.clamp(max=length)
    if torch.compiler.is_exporting():
        return _newest_by_mask(sequence, counts, newest_first)
    offsets = torch.zeros_like(sequence.offsets)
    torch.cumsum(counts, 0, out=offsets[1:])
    row = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    place = torch.arange(len(row), device=counts.device) - offsets[row]
    starts = sequence.offsets[:-1]
    first = starts + counts - 1 if newest_first else starts + lengths - counts
    chosen = first[row] - place if newest_first else first[row] + place
    return JaggedTensor(sequence.values.index_select(0, chosen), offsets)


def _newest_by_mask(sequence: JaggedTensor, counts: Tensor, newest_first: bool) -> JaggedTensor:
    """Compute `newest_of` by operators that exported graphs support; counts: values of each row, int64 [B]."""
    place, lengths = sequence.places, sequence.lengths.index_select(0, sequence.owners)
    of_row = counts.index_select(0, sequence.owners)
    chosen = (place < of_row if newest_first else place >= lengths - of_row).nonzero().squeeze(1)
    offsets = pad(counts.cumsum(0), (1, 0))
    newest = JaggedTensor(sequence.values.index_select(0, chosen), offsets)
    if not newest_first:
        return newest
    end = offsets[1:].index_select(0, newest.owners)
    return JaggedTensor(newest.values.index_select(0, end - 1 - newest.places), offsets)


def places_of(offsets: Tensor) -> Tensor:
    """Return the place of each value in its row, from 0: int64 [N]. Offsets begin at 0."""
    return torch.arange(int(offsets[-1]), device=offsets.device) - torch.repeat_interleave(offsets[:-1], offsets.diff())


@dataclass(frozen=True)
class LengthGroups:
    """Rows of a ragged batch in groups that are padded to 8, 16, 32, ... places; at most half of a group is padding.

    A row's group depends only on its length, so its result does not depend on other rows. Padding follows a row's
    values, where causal attention does not read.

    Attributes:
        slots: position of each value in the concatenated groups, int64 [N], without repetition.
        shapes: number of rows and places of each group.
    """

    slots: Tensor
    shapes: Sequence[tuple[int, int]]

    @staticmethod
    def from_offsets(offsets: Tensor) -> LengthGroups:
        """Create from rows offsets[i]:offsets[i + 1]; offsets int64 [B + 1] from 0."""
        lengths = offsets.diff()
        longest = int(lengths.max()) if len(lengths) else 0
        begin = torch.zeros_like(lengths)
        shapes: list[tuple[int, int]] = []
        shorter, size, first = 0, _SHORTEST, 0
        while shorter < longest:
            of_group = ((lengths > shorter) & (lengths <= size)).nonzero().squeeze(1)
            if len(of_group):
                begin[of_group] = first + size * torch.arange(len(of_group), device=lengths.device)
                shapes.append((len(of_group), size))
                first += len(of_group) * size
            shorter, size = size, 2 * size
        slots = torch.repeat_interleave(begin, lengths) + places_of(offsets)
        return LengthGroups(slots, shapes)

    @staticmethod
    def of_sequence(sequence: JaggedTensor, length: int) -> LengthGroups:
        """Create from a sequence's rows, at most `length` each. An exported graph has one group."""
        if not torch.compiler.is_exporting():
            return LengthGroups.from_offsets(sequence.offsets)
        return LengthGroups(sequence.owners * length + sequence.places, [(sequence.samples, length)])

    def padded(self, values: Tensor) -> list[Tensor]:
        """Return values [N, ...] as [rows, places, ...] of each group, zeros after a row's values."""
        padded = values.new_zeros(sum(rows * places for rows, places in self.shapes), *values.shape[1:])
        padded = padded.index_copy(0, self.slots, values)
        parts = torch.split(padded, [rows * places for rows, places in self.shapes])
        return [part.view(shape + values.shape[1:]) for part, shape in zip(parts, self.shapes, strict=True)]

    def packed(self, groups: Sequence[Tensor]) -> Tensor:
        """Return [rows, places, ...] of each group as [N, ...], without padding; there is at least one group."""
        return torch.cat([x.flatten(0, 1) for x in groups]).index_select(0, self.slots)


class NextItemModel(nn.Module):
    """Model that predicts the next item after each item of a history.

    A row is a history h1 .. hn (a list of the items before the row's event) and the row's item. One pass over the
    history computes a state after each of its items. The state after hn is the row's query; its dot product with the
    row's item is the logit.

    In training with `positions: all` the state after h_k must predict h_{k+1} too, so one row with a user's sequence
    trains on all of it. With `positions: last` only the query is trained, for datasets with a row for each event. The
    row's item is weighted by its label, items of a history by 1. Ids outside the vocabulary are no targets.

    A state depends on the items up to its own, not on later ones or on other rows.

    Subclasses compute states from vectors (`encode`). History and item share a table: name both in one `categorify`.

    Raises:
        UserError: `history` is not a list feature, `item` does not have one id a row, or their vocabularies differ.
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
        """Return states float32 [N, D] after each item of the rows' histories.

        Args:
            items: vectors [N, D], the oldest first, at most `length` a row; offsets begin at 0.
            inputs: the batch.
        """

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return `logits` float32 [B]; for the loss `queries` [B, D] and `states` [N, D]."""
        states = self._states(inputs)
        queries = self._queries(states)
        return {"logits": (queries * self.items(inputs)).sum(1), "queries": queries, "states": states.values}

    def queries(self, inputs: Inputs) -> Tensor:
        """Return each row's query: float32 [B, D]."""
        return self._queries(self._states(inputs))

    def items(self, inputs: Inputs) -> Tensor:
        """Return the rows' items: float32 [B, D]."""
        return self._scored(inputs.embedding("item"))

    def loss(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        """Return the sum of `args.loss` over the places of the rows, []."""
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
        """Return the last state of each row [B, D], and `start` where there is none."""
        last = states.offsets[1:] - 1
        if torch.compiler.is_exporting():  # the graph must work without values: append a row of zeros
            last_states = pad(states.values, (0, 0, 0, 1)).index_select(0, last.clamp(min=0))
            return torch.where((states.lengths > 0).unsqueeze(1), last_states, self.start)
        if not len(states.values):  # add an empty sum, so that every weight has a gradient
            return self.start.expand(len(last), -1) + states.values.sum()
        last_states = states.values.index_select(0, last.clamp(min=0))
        return torch.where((states.lengths > 0).unsqueeze(1), last_states, self.start)

    def _scored(self, items: Tensor) -> Tensor:
        return items if self.args.temperature is None else normalize(items, dim=-1)

    def _targets(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return query [P, D], id, vector [P, D], row and place of each target; the rows' own items come first."""
        ids, history = inputs.ids(self.item), inputs.ids(self.args.history)
        assert isinstance(ids, Tensor)
        assert isinstance(history, JaggedTensor)
        newest_first = self.args.newest == "first"
        history = newest_of(history, self.args.length, newest_first=newest_first)
        rows = torch.arange(inputs.rows, device=ids.device)
        row_targets = outputs["queries"], ids, self.items(inputs), rows, history.lengths
        if self.args.positions == "last":
            return row_targets
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
        query, target, vector, row, place = (torch.cat(pair) for pair in zip(row_targets, inner, strict=True))
        return query, target, vector, row, place

    def _drawn_by_all(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the drawn items of all rows on all ranks: ids [M] and vectors [M, D]."""
        vectors = self._scored(inputs.embedding("others"))
        if inputs.negatives.ndim == 1:  # drawn once for the step
            return inputs.negatives, vectors
        return inputs.all_gather(inputs.negatives.flatten()), inputs.all_gather(vectors.flatten(0, 1))

    def _negatives(
        self, queries: Tensor, targets: Tensor, rows: Tensor, places: Tensor, inputs: Inputs
    ) -> tuple[Tensor, Tensor]:
        """Return logits of each target's negatives, and True where they are the target itself: [P, n] each."""
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

    Places count from the oldest retained item, so a later event does not change earlier states.
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


class SASRec(NextItemModel):
    """Blocks of causal self-attention over the items of a history (section III of the paper).

    Kang and McAuley, "Self-Attentive Sequential Recommendation" (ICDM 2018, arXiv:1808.09781).

    `loss: sampled_softmax` follows Klenitskiy and Vasilev, "Turning Dross Into Gold Loss" (RecSys 2023).
    """

    Args = SASRecArgs

    def __init__(self, features: InputFeatures, args: SASRecArgs) -> None:
        super().__init__(features, args)
        if self.dim % args.heads:
            raise UserError(f"embedding_dim {self.dim} is no multiple of heads {args.heads}")
        self.positions = PositionEmbedding(args.length, self.dim, args.dropout)
        self.blocks = nn.ModuleList(SASRecBlock(self.dim, args) for _ in range(args.blocks))
        self.norm = nn.LayerNorm(self.dim)

    def encode(self, items: JaggedTensor, inputs: Inputs) -> Tensor:
        """Return states float32 [N, D]."""
        x = self.positions(items)
        groups = LengthGroups.of_sequence(items, self.args.length)
        for block in self.blocks:
            x = block(x, groups)
        out: Tensor = self.norm(x)
        return out


class SASRecBlock(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)): packed [N, D] -> [N, D]."""

    def __init__(self, dim: int, args: SASRecArgs) -> None:
        super().__init__()
        self.heads = args.heads
        self.attention_dropout = args.dropout
        self.attention_norm = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        hidden = args.mlp or dim
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(hidden, dim))
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x: Tensor, groups: LengthGroups) -> Tensor:
        x = x + self.dropout(self.out(self._attention(self.query_key_value(self.attention_norm(x)), groups)))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out

    def _attention(self, x: Tensor, groups: LengthGroups) -> Tensor:
        """Return softmax(Q K^T / sqrt(d)) V over places up to each: [N, 3 D] -> [N, D]."""
        dropout = self.attention_dropout if self.training else 0.0
        group_outputs = []
        for group in groups.padded(x.view(x.shape[0], 3, self.heads, x.shape[1] // (3 * self.heads))):
            q, k, v = group.permute(2, 0, 3, 1, 4)  # [rows, heads, places, d] each
            y = scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
            group_outputs.append(y.transpose(1, 2).flatten(2))
        return groups.packed(group_outputs) if group_outputs else x[:, : x.shape[1] // 3]


#: Width of a bucket of the logarithm of a distance in time, as in the authors' code.
_TIME_STEP = 0.301


class HSTU(NextItemModel):
    """Layers of pointwise aggregated attention, gated by the attending item (section 3.2 of the paper).

    Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
    Recommendations" (ICML 2024, arXiv:2402.17152).

    Weights are SiLU(q k + bias) / `length` in place of a softmax. They need not sum to 1, so the model can see how
    often something happened. The bias is learned by distance in places and, with `times`, in time.

    Raises:
        UserError: `times` is not a feature of numbers.
    """

    Args = HSTUArgs

    def __init__(self, features: InputFeatures, args: HSTUArgs) -> None:
        super().__init__(features, args)
        if args.times is not None and args.times not in features.continuous:
            raise UserError(f"model.args.times: '{args.times}' is no feature of numbers")
        self.times = args.times
        self.newest_first = args.newest == "first"
        self.length = args.length
        self.positions = PositionEmbedding(args.length, self.dim, args.dropout)
        self.layers = nn.ModuleList(HSTULayer(self.dim, args) for _ in range(args.blocks))
        self.norm = nn.LayerNorm(self.dim)

    def encode(self, items: JaggedTensor, inputs: Inputs) -> Tensor:
        """Return states float32 [N, D]."""
        x = self.positions(items)
        groups = LengthGroups.of_sequence(items, self.length)
        times = None if self.times is None else groups.padded(self._times(self.times, inputs))
        for layer in self.layers:
            x = layer(x, groups, times)
        out: Tensor = self.norm(x)
        return out

    def _times(self, name: str, inputs: Inputs) -> Tensor:
        """Return the times of the newest items: packed [N]."""
        padded, offsets = inputs[name], inputs.sequence("history").offsets
        if torch.compiler.is_exporting():
            history = inputs.sequence("history")
            # A row with too few times makes the index exceed the last one, which the runtime refuses.
            each = JaggedTensor(padded[history.owners, history.places], offsets)
            return newest_of(each, self.length, newest_first=self.newest_first).values
        lengths = offsets.diff()
        if len(lengths) and int(lengths.max()) > padded.shape[1]:
            raise UserError(
                f"model.args.times: '{name}' has {padded.shape[1]} times a row, but a history has {int(lengths.max())} "
                f"items: pad both to one length"
            )
        is_time = torch.arange(padded.shape[1], device=offsets.device) < lengths.unsqueeze(1)
        times = JaggedTensor.of_lengths(padded[is_time], lengths)
        return newest_of(times, self.length, newest_first=self.newest_first).values


class HSTULayer(nn.Module):
    """x + W (norm(A V) * U), where U, V, Q, K are SiLU of linear layers of norm(x): packed [N, D] -> [N, D]."""

    def __init__(self, dim: int, args: HSTUArgs) -> None:
        super().__init__()
        self.heads = args.heads
        self.widths = [args.linear_dim or max(1, dim // args.heads)] * 2 + [
            args.attention_dim or max(1, dim // args.heads)
        ] * 2
        self.norm = nn.LayerNorm(dim)
        self.gate_value_query_key = nn.Linear(dim, args.heads * sum(self.widths))
        self.attention_norm = nn.LayerNorm(args.heads * self.widths[0])
        self.out = nn.Linear(args.heads * self.widths[0], dim)
        self.bias = RelativeBias(args.length, args.time_buckets if args.times is not None else None)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x: Tensor, groups: LengthGroups, times: list[Tensor] | None) -> Tensor:
        projected = silu(self.gate_value_query_key(self.norm(x)))
        gate, attended = torch.split(projected, [self.heads * self.widths[0], self.heads * sum(self.widths[1:])], dim=1)
        group_outputs = [
            self._attention(group, None if times is None else times[i])
            for i, group in enumerate(groups.padded(attended.reshape(x.shape[0], self.heads, sum(self.widths[1:]))))
        ]
        values = groups.packed(group_outputs) if group_outputs else attended[:, : gate.shape[1]]
        out: Tensor = x + self.out(self.dropout(self.attention_norm(values) * gate))
        return out

    def _attention(self, group: Tensor, times: Tensor | None) -> Tensor:
        """Attend: [rows, places, heads, widths of v, q and k] -> [rows, places, heads * width of v]."""
        v, q, k = torch.split(group.transpose(1, 2), self.widths[1:], dim=-1)
        scores = q @ k.transpose(2, 3) + self.bias(group.shape[1], times)
        weights = (silu(scores) / self.bias.length).tril()
        return (weights @ v).transpose(1, 2).flatten(2)


class RelativeBias(nn.Module):
    """Bias of the attention score of two places by their distance; the same for all heads."""

    def __init__(self, length: int, time_buckets: int | None) -> None:
        super().__init__()
        self.length = length
        self.by_place = nn.Parameter(torch.empty(length).normal_(0, 0.02))
        self.by_time = None if time_buckets is None else nn.Parameter(torch.empty(time_buckets).normal_(0, 0.02))

    def forward(self, places: int, times: Tensor | None) -> Tensor:
        """Return the bias [places, places], or with times [rows, places]: [rows, 1, places, places]."""
        place = torch.arange(places, device=self.by_place.device)
        bias = self.by_place[(place.unsqueeze(1) - place).clamp(0, self.length - 1)]
        if self.by_time is None or times is None:
            return bias
        apart = (times.unsqueeze(2) - times.unsqueeze(1)).abs().clamp(min=1)
        bucket = (apart.log() / _TIME_STEP).long().clamp(max=len(self.by_time) - 1)
        return (bias + self.by_time[bucket]).unsqueeze(1)
