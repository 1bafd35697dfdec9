"""SASRec: Kang and McAuley, "Self-Attentive Sequential Recommendation" (ICDM 2018, arXiv:1808.09781)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from headrace.config.model_args import SASRecArgs
from headrace.embeddings.input.jagged import JaggedTensor
from headrace.errors import UserError
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.sequence.next_item import NextItemModel, PositionEmbedding
from headrace.models.sequence.ragged import LengthGroups


class SASRec(NextItemModel):
    """Blocks of causal self-attention over the items of a history (section III of the paper).

    With `loss: sampled_softmax` it is that of Klenitskiy and Vasilev, "Turning Dross Into Gold Loss" (RecSys 2023).
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
        """States float32 [N, D]."""
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
        """softmax(Q K^T / sqrt(d)) V over places up to each: [N, 3 D] -> [N, D]."""
        dropout = self.attention_dropout if self.training else 0.0
        found = []
        for group in groups.padded(x.view(x.shape[0], 3, self.heads, x.shape[1] // (3 * self.heads))):
            q, k, v = group.permute(2, 0, 3, 1, 4)  # [rows, heads, places, d] each
            y = scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
            found.append(y.transpose(1, 2).flatten(2))
        return groups.packed(found) if found else x[:, : x.shape[1] // 3]
