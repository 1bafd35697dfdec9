"""What a model asks of embedding tables: which features it sees, how wide, pooled or as sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.embeddings.sharding.plan import Pooling


@dataclass(frozen=True)
class EmbeddingLookup:
    """One lookup of a batch: a model's attribute `lookups` is a sequence of them.

    A model without that attribute has one of each categorical feature, `embedding_dim` wide and pooled as the spec
    says: `Inputs.vectors`. A model with it has what it asks for, `Inputs.embedding(name)`, and nothing else.

        EmbeddingLookup("item", "item_id", dim=64)                              # [B, 64]
        EmbeddingLookup("history", "viewed_items", dim=64, pooling="none")      # a JaggedTensor, values [N, 64]
        EmbeddingLookup("negatives", "item_id", dim=64, ids="negatives")        # [B, n, 64]
        EmbeddingLookup("mlp_item", "item_id", dim=32, table="mlp")             # a table of its own, item_id.mlp

    Attributes:
        name: by which `Inputs.embedding` finds what was looked up.
        feature: a categorical feature of the dataset.
        dim: width D of the vectors.
        pooling: of a list: how its vectors become one; `none`: a sequence. Nulls are in neither.
        table: features of one vocabulary share a table; this names another one over the same vocabulary, in
            `train.embeddings.tables` and `train.sharding.tables` `<vocabulary>.<table>`. Lookups of one table have one
            `dim`.
        ids: `batch`, the feature's own of each row: float32 [B, D], or of a sequence a JaggedTensor of [N, D] with
            `Inputs.ids(feature)` beside it; `negatives`, those that are drawn for the batch (`train.negatives`):
            [B, n, D]; `all`, every code of the feature's vocabulary, by code: [cardinality, D], on each rank.
        init_bound: rows start uniform in +- this, which follows from seed, table, row and column alone; None: the
            tables' own, 0.05. A normal start of deviation s has the variance of +- sqrt(3) s.
    """

    name: str
    feature: str
    dim: int
    pooling: Pooling = "sum"
    table: str | None = None
    ids: Literal["batch", "negatives", "all"] = "batch"
    init_bound: float | None = None
