"""HSTU: Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
Recommendations" (ICML 2024, arXiv:2402.17152)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from headrace.config.model_args import HSTUArgs
from headrace.embeddings.input.jagged import JaggedTensor
from headrace.errors import UserError
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.sequence.next_item import NextItemModel, PositionEmbedding
from headrace.models.sequence.ragged import LengthGroups, newest_of

#: Widths of a step in the logarithm of a distance in time: that of the authors' code.
_TIME_STEP = 0.301


class HSTU(NextItemModel):
    """Layers of pointwise aggregated attention, gated by what is attended from (section 3.2 of the paper).

    Weights are SiLU(q k + bias) / `length` in place of a softmax: they need not sum to 1, so that how often something
    happened is not lost. The bias is learned by distance in places and, with `times`, in time.

    Raises:
        UserError: `times` is no feature of numbers.
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
        """States float32 [N, D]."""
        x = self.positions(items)
        groups = LengthGroups.of_sequence(items, self.length)
        times = None if self.times is None else groups.padded(self._times(self.times, inputs))
        for layer in self.layers:
            x = layer(x, groups, times)
        out: Tensor = self.norm(x)
        return out

    def _times(self, name: str, inputs: Inputs) -> Tensor:
        """Those of the items that are looked at: packed [N]."""
        padded, offsets = inputs[name], inputs.sequence("history").offsets
        if torch.compiler.is_exporting():
            history = inputs.sequence("history")
            # Of a row with too few times the place is behind the last one, an error of the runtime.
            each = JaggedTensor(padded[history.owners, history.places], offsets)
            return newest_of(each, self.length, newest_first=self.newest_first).values
        lengths = offsets.diff()
        if len(lengths) and int(lengths.max()) > padded.shape[1]:
            raise UserError(
                f"model.args.times: '{name}' has {padded.shape[1]} times a row, but a history has {int(lengths.max())} "
                f"items: pad both to one length"
            )
        there = torch.arange(padded.shape[1], device=offsets.device) < lengths.unsqueeze(1)
        times = JaggedTensor.of_lengths(padded[there], lengths)
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
        made = silu(self.gate_value_query_key(self.norm(x)))
        gate, attended = torch.split(made, [self.heads * self.widths[0], self.heads * sum(self.widths[1:])], dim=1)
        found = [
            self._attention(group, None if times is None else times[i])
            for i, group in enumerate(groups.padded(attended.reshape(x.shape[0], self.heads, sum(self.widths[1:]))))
        ]
        values = groups.packed(found) if found else attended[:, : gate.shape[1]]
        out: Tensor = x + self.out(self.dropout(self.attention_norm(values) * gate))
        return out

    def _attention(self, group: Tensor, times: Tensor | None) -> Tensor:
        """[rows, places, heads, widths of v, q and k] -> [rows, places, heads * width of v]."""
        v, q, k = torch.split(group.transpose(1, 2), self.widths[1:], dim=-1)
        scores = q @ k.transpose(2, 3) + self.bias(group.shape[1], times)
        weights = (silu(scores) / self.bias.length).tril()
        return (weights @ v).transpose(1, 2).flatten(2)


class RelativeBias(nn.Module):
    """What is added to the scores of two places, by how far apart they are; the same for all heads."""

    def __init__(self, length: int, time_buckets: int | None) -> None:
        super().__init__()
        self.length = length
        self.by_place = nn.Parameter(torch.empty(length).normal_(0, 0.02))
        self.by_time = None if time_buckets is None else nn.Parameter(torch.empty(time_buckets).normal_(0, 0.02))

    def forward(self, places: int, times: Tensor | None) -> Tensor:
        """[places, places], or with times [rows, places] of each: [rows, 1, places, places]."""
        place = torch.arange(places, device=self.by_place.device)
        bias = self.by_place[(place.unsqueeze(1) - place).clamp(0, self.length - 1)]
        if self.by_time is None or times is None:
            return bias
        apart = (times.unsqueeze(2) - times.unsqueeze(1)).abs().clamp(min=1)
        bucket = (apart.log() / _TIME_STEP).long().clamp(max=len(self.by_time) - 1)
        return (bias + self.by_time[bucket]).unsqueeze(1)
