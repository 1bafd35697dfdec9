"""The dense parts: MLPerf's DLRM (Naumov et al., 2019) and its DCNv2 variant (Wang et al., 2021)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from bench.gpu.data import DENSE, DIM
from headrace.models.feature_interaction_triton import interact, interaction_width


def mlp(widths: list[int], last: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(a, b))
        if last or i < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class Dlrm(nn.Module):
    """Dense float32 [B, 13] and vectors [B, F, D] -> logits [B, 1]: dot products of all pairs."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.bottom = mlp([DENSE, 512, 256, DIM])
        pairs = torch.tril_indices(features + 1, features + 1, -1)
        self.register_buffer("pairs", pairs[0] * (features + 1) + pairs[1])
        self.top = mlp([DIM + pairs.shape[1], 1024, 1024, 512, 256, 1], last=False)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        x = self.bottom(dense)
        stacked = torch.cat([x.unsqueeze(1), vectors.to(x.dtype)], 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        assert isinstance(self.pairs, Tensor)
        return self.top(torch.cat([x, products.index_select(1, self.pairs)], 1))  # type: ignore[no-any-return]


class FusedDlrm(nn.Module):
    """The same by headrace's kernel for the products, whose zeros behind them feed weights that learn nothing."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.bottom = mlp([DENSE, 512, 256, DIM])
        self.top = mlp([interaction_width(features, DIM), 1024, 1024, 512, 256, 1], last=False)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        return self.top(interact(self.bottom(dense), vectors))  # type: ignore[no-any-return]


class Dcn(nn.Module):
    """The same with three low-rank cross layers (rank 512) in place of the products."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.bottom = mlp([DENSE, 512, 256, DIM])
        width = (features + 1) * DIM
        self.down = nn.ModuleList(nn.Linear(width, 512, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(512, width) for _ in range(3))
        self.top = mlp([width, 1024, 1024, 512, 256, 1], last=False)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        x = self.bottom(dense)
        first = torch.cat([x.unsqueeze(1), vectors.to(x.dtype)], 1).flatten(1)
        crossed = first
        for down, up in zip(self.down, self.up, strict=True):
            crossed = first * up(down(crossed)) + crossed
        return self.top(crossed)  # type: ignore[no-any-return]


MODELS: dict[str, type[nn.Module]] = {"dlrm": FusedDlrm, "plain dlrm": Dlrm, "dcn": Dcn}
