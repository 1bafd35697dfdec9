"""DLRM: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (2019)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from headrace import config
from headrace.embeddings.collective import Collective
from headrace.embeddings.plan import Lookup, Plan, Table, row_wise, tables_of
from headrace.embeddings.sharded import Prepared, ShardedEmbeddings
from headrace.errors import UserError
from headrace.models.mlp import MLP, pairwise_dots
from headrace.schema import DatasetSchema, Kind

#: (tables, lookups, ranks) -> where everything lives.
MakePlan = Callable[[Sequence[Table], Sequence[Lookup], int], Plan]


class DLRM(nn.Module):
    """Click logits of a batch: (continuous float32 [B, C], codes int64 [B, S]) -> float32 [B].

    The bottom MLP turns the continuous columns into one vector of the embeddings' width; the dot products of all pairs
    of that vector and the features' embeddings, beside the vector itself, go through the top MLP.

    Without continuous features the vector is a learned constant, which is what a linear layer of no inputs is: its
    products with the embeddings are the first-order terms of a factorisation machine (an item's popularity). Without
    categorical features the top MLP sees the vector alone.

    The dense part is the same on all ranks (same seed, same start) and is what `state_dict` holds. The embeddings are
    sharded over `collective`; B may be 0 on a rank, but all ranks call forward and backward alike.

        model = DLRM(schema, spec.model, LocalCollective(), seed=1)
        logits = model(torch.zeros(8, 3), torch.zeros(8, 5, dtype=torch.int64))   # [8]

    Raises:
        UserError: the schema has neither continuous nor categorical features.
    """

    def __init__(
        self,
        schema: DatasetSchema,
        model: config.Model,
        collective: Collective,
        seed: int,
        make_plan: MakePlan = row_wise,
    ) -> None:
        super().__init__()
        continuous = sum(f.length for f in schema.of(Kind.CONTINUOUS))
        tables, lookups = tables_of(schema, model.embedding_dim, pooling=model.pooling)
        if not continuous and not lookups:
            raise UserError("the dataset has no features: tag at least one column of features.workflow as an input")
        self.schema = schema
        self.config = model
        self.seed = seed
        self.embeddings = ShardedEmbeddings(make_plan(tables, lookups, collective.world.size), collective, seed)
        generator = torch.Generator().manual_seed(seed)
        width = model.embedding_dim
        self.bottom: MLP | None = None
        self.constant: nn.Parameter | None = None
        if continuous:
            widths = (continuous, *model.bottom_mlp, width)
            self.bottom = MLP(widths, generator, last_relu=True, dropout=model.dropout)
        else:
            self.constant = nn.Parameter(torch.empty(width).normal_(0.0, width**-0.5, generator=generator))
        vectors = 1 + len(lookups)
        inputs = width + vectors * (vectors - 1) // 2
        self.top = MLP((inputs, *model.top_mlp, 1), generator, dropout=model.dropout)

    def forward(self, continuous: Tensor, codes: Tensor | Prepared) -> Tensor:
        if isinstance(codes, Prepared):
            codes.start()  # rows travel while the bottom MLP works
        if self.bottom is not None:
            bottom = self.bottom(continuous)  # [B, D]
        else:
            assert self.constant is not None
            samples = codes.samples if isinstance(codes, Prepared) else codes.shape[0]
            bottom = self.constant.expand(samples, -1)
        if not self.embeddings.plan.lookups:
            top_input = bottom
        else:
            vectors = torch.cat([bottom.unsqueeze(1), self.embeddings(codes)], dim=1)  # [B, 1 + F, D]
            top_input = torch.cat([bottom, pairwise_dots(vectors)], dim=1)
        logits: Tensor = self.top(top_input).squeeze(1)
        return logits

    def dense_parameters(self) -> list[nn.Parameter]:
        """What every rank holds alike, in a fixed order. (Embeddings are no parameters.)"""
        return list(self.parameters())
