"""Ranking models of one logit a row, each from its paper: Wide & Deep, DeepFM, DCN-v2, FinalMLP, MaskNet."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headrace.config.model_args import DCNv2Args, DeepFMArgs, FinalMLPArgs, MaskNetArgs, WideDeepArgs
from headrace.errors import UserError
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.layers import FirstOrder, hidden_layers


class WideDeep(nn.Module):
    """The sum of a linear model of ids and numbers (wide) and an MLP over embeddings and numbers (deep).

    Cheng et al., "Wide & Deep Learning for Recommender Systems" (DLRS 2016).

    The operator `hashed_cross` makes the paper's cross products of columns as features. An id's weight in the wide part
    is the first value of its vector, and the deep part reads the others: `embedding_dim` is the deep width plus 1.
    """

    Args = WideDeepArgs

    def __init__(self, features: InputFeatures, args: WideDeepArgs) -> None:
        super().__init__()
        self.wide = FirstOrder(features)
        deep = features.flat_columns - len(features.categorical)
        self.deep = hidden_layers(deep, args.deep_mlp, args.dropout, outputs=1)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return `logits` float32 [B]."""
        deep = torch.cat([inputs.continuous, FirstOrder.rest(inputs).flatten(1)], dim=1)
        return {"logits": self.wide(inputs) + self.deep(deep).squeeze(1)}


class DeepFM(nn.Module):
    """The sum of a factorisation machine and an MLP over the same vectors.

    Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction" (IJCAI 2017).

    Every feature is a field: a categorical feature is its id's vector, a column of numbers is a learned vector times
    the number. The first value of an id's vector is its first-order weight; the machine and the MLP read the others.
    """

    Args = DeepFMArgs

    def __init__(self, features: InputFeatures, args: DeepFMArgs) -> None:
        super().__init__()
        width, columns = features.embedding_dim - 1, features.continuous_columns
        self.first_order = FirstOrder(features)
        #: Vectors by which numbers are multiplied, [C, D - 1].
        self.fields = nn.Parameter(torch.randn(columns, width) / max(width, 1) ** 0.5)
        self.deep = hidden_layers((columns + len(features.categorical)) * width, args.deep_mlp, args.dropout, outputs=1)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return `logits` float32 [B]."""
        numbers = inputs.continuous.unsqueeze(2) * self.fields
        fields = torch.cat([numbers, FirstOrder.rest(inputs)], dim=1)
        # Rendle (2010): the sum of all pairs' dot products is half of (square of the sum - sum of the squares).
        second = 0.5 * (fields.sum(dim=1).square() - fields.square().sum(dim=1)).sum(dim=1)
        return {"logits": self.first_order(inputs) + second + self.deep(fields.flatten(1)).squeeze(1)}


class DCNv2(nn.Module):
    """Cross layers x' = x0 * (W x + b) + x over embeddings and numbers, with an MLP after or in parallel to them.

    Wang et al., "DCN V2: Improved Deep & Cross Network" (WWW 2021).
    """

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
        """Return `logits` float32 [B]."""
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


class FinalMLP(nn.Module):
    """Two MLPs over the same inputs, each after a gate of its own, and a bilinear fusion of both by heads.

    Mao et al., "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction" (AAAI 2023).
    """

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
        self.gates = (
            nn.ModuleList(FeatureGate(features, names, args.gate_mlp) for names, _ in streams) if args.gates else None
        )
        self.streams = nn.ModuleList(hidden_layers(width, widths, args.dropout) for _, widths in streams)
        first, second = args.first_mlp[-1], args.second_mlp[-1]
        self.heads = args.heads
        self.first, self.second = nn.Linear(first, 1), nn.Linear(second, 1)
        #: Bilinear weights of each head, [heads, first / heads, second / heads].
        self.bilinear = nn.Parameter(
            torch.randn(args.heads, first // args.heads, second // args.heads) / (first * second) ** 0.25
        )

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return `logits` float32 [B]."""
        gates = (1.0, 1.0) if self.gates is None else [gate(inputs) for gate in self.gates]
        x, y = (stream(inputs.flat * gate) for stream, gate in zip(self.streams, gates, strict=True))
        heads = (x.unflatten(1, (self.heads, -1)), y.unflatten(1, (self.heads, -1)))
        fused = torch.einsum("bhi,hij,bhj->b", heads[0], self.bilinear, heads[1])
        return {"logits": self.first(x).squeeze(1) + self.second(y).squeeze(1) + fused}


class FeatureGate(nn.Module):
    """Weights 2 sigmoid(MLP(some features)) in (0, 2) of all inputs: [B, C + F D], or one row without features."""

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


class MaskNet(nn.Module):
    """Blocks that multiply a layer's inputs by a mask, computed by an MLP from all embeddings of the row.

    Wang, She and Zhang, "MaskNet: Introducing Feature-Wise Multiplication to CTR Ranking Models by Instance-Guided
    Mask" (DLP-KDD 2021).
    """

    Args = MaskNetArgs

    def __init__(self, features: InputFeatures, args: MaskNetArgs) -> None:
        super().__init__()
        guide = width = features.flat_columns
        self.is_serial = args.structure == "serial"
        #: A norm for each feature, which is normalised by itself.
        self.norms = nn.ModuleList(nn.LayerNorm(features.embedding_dim) for _ in features.categorical)
        blocks = []
        for outputs in args.blocks:
            blocks.append(MaskBlock(guide, width, outputs, args.reduction))
            width = outputs if self.is_serial else width
        self.blocks = nn.ModuleList(blocks)
        if self.is_serial:
            self.head = hidden_layers(width, (), outputs=1)
        else:
            self.head = hidden_layers(sum(args.blocks), args.deep_mlp, args.dropout, outputs=1)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return `logits` float32 [B]."""
        guide = inputs.flat
        normed = [norm(v) for norm, v in zip(self.norms, inputs.vectors.unbind(1), strict=True)]
        x = torch.cat([inputs.continuous, *normed], dim=1)
        if self.is_serial:
            for block in self.blocks:
                x = block(guide, x)
        else:
            x = torch.cat([block(guide, x) for block in self.blocks], dim=1)
        return {"logits": self.head(x).squeeze(1)}


class MaskBlock(nn.Module):
    """ReLU(LayerNorm(W (mask * x))), the mask being a two-layer MLP of the guide: [B, G], [B, N] -> [B, outputs]."""

    def __init__(self, guide: int, inputs: int, outputs: int, reduction: float) -> None:
        super().__init__()
        self.mask = hidden_layers(guide, (max(1, int(inputs * reduction)),), outputs=inputs)
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.norm = nn.LayerNorm(outputs)

    def forward(self, guide: Tensor, x: Tensor) -> Tensor:
        masked: Tensor = self.norm(self.linear(self.mask(guide) * x)).relu()
        return masked
