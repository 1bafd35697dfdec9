"""FinalMLP: Mao et al., "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction" (AAAI 2023)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headrace.config.model_args import FinalMLPArgs
from headrace.errors import UserError
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.ranking.layers import hidden_layers


class FinalMLP(nn.Module):
    """Two MLPs over the same inputs, each behind a gate of its own, and a bilinear fusion of both, by heads."""

    Args = FinalMLPArgs

    def __init__(self, features: InputFeatures, args: FinalMLPArgs) -> None:
        super().__init__()
        width = features.flat_columns
        streams = ((args.first_gate, args.first_mlp), (args.second_gate, args.second_mlp))
        for _, widths in streams:
            if widths[-1] % args.heads:
                raise UserError(
                    f"model.args: the last width {widths[-1]} of a stream is no multiple of heads {args.heads}"
                )
        self.gates = nn.ModuleList(Gate(features, names, args.gate_mlp) for names, _ in streams) if args.gates else None
        self.streams = nn.ModuleList(hidden_layers(width, widths, args.dropout) for _, widths in streams)
        first, second = args.first_mlp[-1], args.second_mlp[-1]
        self.heads = args.heads
        self.first, self.second = nn.Linear(first, 1), nn.Linear(second, 1)
        #: By head, [heads, first / heads, second / heads].
        self.bilinear = nn.Parameter(
            torch.randn(args.heads, first // args.heads, second // args.heads) / (first * second) ** 0.25
        )

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """`logits` float32 [B]."""
        gates = (1.0, 1.0) if self.gates is None else [gate(inputs) for gate in self.gates]
        x, y = (stream(inputs.flat * gate) for stream, gate in zip(self.streams, gates, strict=True))
        heads = (x.unflatten(1, (self.heads, -1)), y.unflatten(1, (self.heads, -1)))
        fused = torch.einsum("bhi,hij,bhj->b", heads[0], self.bilinear, heads[1])
        return {"logits": self.first(x).squeeze(1) + self.second(y).squeeze(1) + fused}


class Gate(nn.Module):
    """Weights of all inputs, 2 sigmoid(MLP(some features)) in (0, 2), [B, C + F D]; of no features one row for all."""

    def __init__(self, features: InputFeatures, names: tuple[str, ...], widths: tuple[int, ...]) -> None:
        super().__init__()
        known = {**features.continuous, **dict.fromkeys(features.categorical, features.embedding_dim)}
        unknown = [n for n in names if n not in known]
        if unknown:
            raise UserError(
                f"model.args: a gate looks at '{unknown[0]}', which is no feature; there are: {', '.join(known)}"
            )
        self.names = names
        seen = sum(known[n] for n in names) or features.flat_columns
        self.constant = None if names else nn.Parameter(torch.zeros(1, seen))
        self.mlp = hidden_layers(seen, widths, outputs=features.flat_columns)

    def forward(self, inputs: Inputs) -> Tensor:
        seen = self.constant if self.constant is not None else torch.cat([inputs[n] for n in self.names], dim=1)
        weights: Tensor = 2.0 * self.mlp(seen).sigmoid()
        return weights
