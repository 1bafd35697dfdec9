"""DCN-v2: Wang et al., "DCN V2: Improved Deep & Cross Network" (WWW 2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headrace.config.model_args import DCNv2Args
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.ranking.layers import hidden_layers


class DCNv2(nn.Module):
    """Cross layers x' = x0 * (W x + b) + x over embeddings and numbers, with an MLP behind or beside them."""

    Args = DCNv2Args

    def __init__(self, features: InputFeatures, args: DCNv2Args) -> None:
        super().__init__()
        width, self.is_stacked = features.flat_columns, args.structure == "stacked"
        self.cross = nn.ModuleList(
            CrossLayer(width) if args.low_rank is None else LowRankCrossLayer(width, args.low_rank, args.experts)
            for _ in range(args.layers)
        )
        self.deep = hidden_layers(width, args.deep_mlp, args.dropout)
        last = args.deep_mlp[-1] if args.deep_mlp else width
        self.head = nn.Linear(last if self.is_stacked else width + last, 1)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """`logits` float32 [B]."""
        x0 = x = inputs.flat
        for layer in self.cross:
            x = layer(x0, x)
        x = self.deep(x) if self.is_stacked else torch.cat([x, self.deep(x0)], dim=1)
        return {"logits": self.head(x).squeeze(1)}


class CrossLayer(nn.Module):
    """x0 * (W x + b) + x, float32 [B, N]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        crossed: Tensor = x0 * self.linear(x) + x
        return crossed


class LowRankCrossLayer(nn.Module):
    """A mixture of low-rank cross layers: x + sum over experts e of g_e(x) x0 * (U_e tanh(C_e tanh(V_e x)) + b).

    g is the softmax of a linear layer of x; one expert has no gate.
    """

    def __init__(self, width: int, rank: int, experts: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(experts, rank, width) / width**0.5)
        self.middle = nn.Parameter(torch.randn(experts, rank, rank) / rank**0.5)
        self.up = nn.Parameter(torch.randn(experts, width, rank) / rank**0.5)
        self.bias = nn.Parameter(torch.zeros(width))
        self.gate = nn.Linear(width, experts, bias=False) if experts > 1 else None

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        low = torch.einsum("erw,bw->ber", self.down, x).tanh()
        low = torch.einsum("esr,ber->bes", self.middle, low).tanh()
        crossed = x0.unsqueeze(1) * (torch.einsum("ewr,ber->bew", self.up, low) + self.bias)
        if self.gate is None:
            return x + crossed.squeeze(1)
        shares: Tensor = self.gate(x).softmax(dim=1)
        return x + (shares.unsqueeze(2) * crossed).sum(dim=1)
