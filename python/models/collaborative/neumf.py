"""NeuMF: He et al., "Neural Collaborative Filtering" (WWW 2017)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headrace.config.model_args import NeuMFArgs
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.lookups import EmbeddingLookup
from headrace.models.ranking.layers import hidden_layers


class NeuMF(nn.Module):
    """A generalised matrix factorisation (GMF) and an MLP over users and items, fused by one linear layer.

    GMF multiplies the vectors of a user and an item element by element, the MLP sees them side by side; each part has
    tables of its own, `gmf` and `mlp`. With `part: gmf` or `part: mlp` the model is that part alone, and what it
    learned is what the fused model may start from (section 3.4.1 of the paper): `start_from`.
    """

    Args = NeuMFArgs

    def __init__(self, features: InputFeatures, args: NeuMFArgs) -> None:
        super().__init__()
        self.args = args
        self.lookups: list[EmbeddingLookup] = []
        width = 0
        if args.part != "mlp":
            self._add_lookups("gmf", features.embedding_dim)
            width += features.embedding_dim
        if args.part != "gmf":
            dim = args.mlp_dim or features.embedding_dim
            self._add_lookups("mlp", dim)
            self.mlp = hidden_layers(2 * dim, args.mlp, args.dropout)
            width += args.mlp[-1] if args.mlp else 2 * dim
        self.dropout = nn.Dropout(args.embedding_dropout)
        self.head = nn.Linear(width, 1)

    def _add_lookups(self, part: str, dim: int) -> None:
        for side, feature in (("user", self.args.user), ("item", self.args.item)):
            self.lookups.append(EmbeddingLookup(f"{part}_{side}", feature, dim, table=part))

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """`logits` float32 [B]."""
        parts = []
        if self.args.part != "mlp":
            parts.append(self.dropout(inputs.embedding("gmf_user") * inputs.embedding("gmf_item")))
        if self.args.part != "gmf":
            sides = torch.cat([inputs.embedding("mlp_user"), inputs.embedding("mlp_item")], dim=1)
            parts.append(self.mlp(self.dropout(sides)))
        return {"logits": self.head(torch.cat(parts, dim=1)).squeeze(1)}

    def start_from(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over the dense parts of two trained models, `gmf` and `mlp`: their state dicts.

        The head is alpha times the GMF's beside 1 - alpha times the MLP's.

        Raises:
            KeyError, RuntimeError: a state of another shape.
        """
        gmf, mlp = states["gmf"], states["mlp"]
        inner = {k.removeprefix("mlp."): v for k, v in mlp.items() if k.startswith("mlp.")}
        self.mlp.load_state_dict(inner)
        alpha = self.args.alpha
        with torch.no_grad():
            self.head.weight.copy_(torch.cat([alpha * gmf["head.weight"], (1 - alpha) * mlp["head.weight"]], dim=1))
            self.head.bias.copy_(alpha * gmf["head.bias"] + (1 - alpha) * mlp["head.bias"])
