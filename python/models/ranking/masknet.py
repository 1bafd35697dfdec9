"""MaskNet: Wang, She and Zhang, "MaskNet: Introducing Feature-Wise Multiplication to CTR Ranking Models by
Instance-Guided Mask" (DLP-KDD 2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headrace.config.model_args import MaskNetArgs
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.ranking.layers import hidden_layers


class MaskNet(nn.Module):
    """Blocks that multiply a layer's inputs by a mask that an MLP makes of all embeddings of the row."""

    Args = MaskNetArgs

    def __init__(self, features: InputFeatures, args: MaskNetArgs) -> None:
        super().__init__()
        guide = width = features.flat_columns
        self.is_serial = args.structure == "serial"
        #: One a feature, so that each is normalised by itself.
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
        """`logits` float32 [B]."""
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
