"""DLRM: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (2019)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from headrace import config
from headrace.comm.base import Collective
from headrace.embeddings.dynamic.spec import dynamic_specs
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.embeddings.input.jagged import JaggedTensor
from headrace.embeddings.lookup.handle import LookupHandle
from headrace.embeddings.lookup.zero_copy import ZeroCopyVectors
from headrace.embeddings.sharded import ShardedEmbeddings
from headrace.embeddings.sharding.plan import Lookup, Plan, Table, row_wise, tables_of
from headrace.errors import UserError
from headrace.models.categorical import CategoricalBatch
from headrace.models.feature_interaction import dot_interaction
from headrace.models.mlp import MLP
from headrace.schema import NULL_CODE, DatasetSchema, Kind

#: (tables, lookups, ranks) -> where everything lives.
MakePlan = Callable[[Sequence[Table], Sequence[Lookup], int], Plan]


class DLRM(nn.Module):
    """Click logits of a batch: (continuous float32 [B, C], categorical features) -> float32 [B].

    The categorical features are a `CategoricalBatch`, or all side by side, int64 [B, S], lists padded with 0.

    The bottom MLP turns the continuous columns into one vector of the embeddings' width; the dot products of all pairs
    of that vector and the features' embeddings, beside the vector itself, go through the top MLP.

    Features of raw ids are looked up in tables of their own (`dynamic`), the others by the plan (`embeddings`), all in
    one exchange each way. An id without a row has its feature's learned vector `absent` instead, which belongs to the
    dense part; it starts at zero.

    Without continuous features the vector is a learned constant, which is what a linear layer of no inputs is: its
    products with the embeddings are the first-order terms of a factorisation machine (an item's popularity). Without
    categorical features the top MLP sees the vector alone.

    The dense part is the same on all ranks (same seed, same start) and is what `state_dict` holds. The embeddings are
    sharded over `collective`; B may be 0 on a rank, but all ranks call forward and backward alike.

        model = DLRM(schema, spec.model, LocalCollective(), seed=1)
        logits = model(torch.zeros(8, 3), torch.zeros(8, 5, dtype=torch.int64))   # [8]

    Args:
        schema: the dataset's.
        model: widths.
        collective: the ranks.
        seed: of all starts.
        make_plan: where tables of codes live.
        settings: `train.embeddings`, for the tables of raw ids; None: to score.
        device: of the tables and the dense part. Batches may come from the host, codes do.

    Raises:
        UserError: the schema has neither continuous nor categorical features, or the settings do not fit it.
    """

    def __init__(
        self,
        schema: DatasetSchema,
        model: config.Model,
        collective: Collective,
        seed: int,
        make_plan: MakePlan = row_wise,
        settings: config.EmbeddingOptimizer | config.Optimizer | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__()
        self.device = torch.device(device)
        continuous = sum(f.length for f in schema.of(Kind.CONTINUOUS))
        tables, lookups = tables_of(schema, model.embedding_dim, pooling=model.pooling)
        dynamic = dynamic_specs(schema, model.embedding_dim, None if settings is None else _of_embeddings(settings))
        if not continuous and not lookups and not dynamic:
            raise UserError("the dataset has no features: tag at least one column of features.workflow as an input")
        self.schema = schema
        self.config = model
        self.seed = seed
        #: Arithmetic of the MLPs and dot products in training; weights, embeddings, their gradients and loss are fp32.
        self.precision: Literal["fp32", "tf32", "bf16"] = "fp32"
        self.embeddings = ShardedEmbeddings(
            make_plan(tables, lookups, collective.world.size),
            collective,
            seed,
            dynamic=DynamicEmbeddings(dynamic, collective, seed, device=self.device) if dynamic else None,
            device=self.device,
        )
        self._columns = _CodeColumns(schema, model.pooling)
        self._gradient_sum: Tensor | None = None
        generator = torch.Generator().manual_seed(seed)
        width = model.embedding_dim
        self.bottom: MLP | None = None
        self.constant: nn.Parameter | None = None
        if continuous:
            widths = (continuous, *model.bottom_mlp, width)
            self.bottom = MLP(widths, generator, last_relu=True, dropout=model.dropout)
        else:
            self.constant = nn.Parameter(torch.empty(width).normal_(0.0, width**-0.5, generator=generator))
        #: What stands for an id without a row, by feature: [features of raw ids, D].
        self.absent = nn.Parameter(torch.zeros(len(dynamic), width)) if dynamic else None
        vectors = 1 + len(lookups) + len(dynamic)
        inputs = width + vectors * (vectors - 1) // 2
        self.top = MLP((inputs, *model.top_mlp, 1), generator, dropout=model.dropout)
        if self.device.type != "cpu":  # drawn on the host, so that every device starts alike
            self.to(self.device)

    @property
    def dynamic(self) -> DynamicEmbeddings | None:
        """The tables of raw ids."""
        return self.embeddings.dynamic

    def prepare(self, batch: Tensor | CategoricalBatch) -> PendingLookups:
        """Begin the lookups of a batch's categorical features; see ShardedEmbeddings.prepare. Collective."""
        columns = self._columns
        if isinstance(batch, Tensor):
            batch = CategoricalBatch.of_padded(batch, self.schema) if columns.has_lists else CategoricalBatch(batch)
        if self.device.type != "cpu":
            batch = batch.to(self.device)
        samples = batch.samples
        zero_copy = not (self.training and self.precision == "bf16")  # the interaction's C++ is for fp32
        if not columns.has_lists and not columns.dynamic_features:
            return PendingLookups(self.embeddings.prepare(batch.codes, zero_copy=zero_copy), samples)
        by_feature = columns.by_feature(batch)
        planned = [by_feature[i] for i in columns.planned_features]
        raw = [_without_nulls(by_feature[i]) for i in columns.dynamic_features]
        ids = [x.values if isinstance(x, JaggedTensor) else x.contiguous() for x in raw]
        handle = self.embeddings.prepare(planned or batch.codes[:, :0], raw=ids, zero_copy=zero_copy)
        return PendingLookups(handle, samples, [x.offsets if isinstance(x, JaggedTensor) else None for x in raw])

    def forward(self, continuous: Tensor, batch: Tensor | CategoricalBatch | PendingLookups) -> Tensor:
        lookups = batch if isinstance(batch, PendingLookups) else self.prepare(batch)
        lookups.start()  # rows travel while the bottom MLP works
        bottom = self._bottom(continuous.to(self.device), lookups.samples)
        if isinstance(lookups.planned, LookupHandle):
            lookups.planned.zero_copy &= bottom.dtype is torch.float32
        return self._top(bottom, self.vectors(lookups) if self.features else None)

    def dense(self, continuous: Tensor, vectors: Tensor) -> Tensor:
        """The logits float32 [B] of continuous float32 [B, C] and the features' vectors [B, F, D], on the device.

        Nothing else happens in it, so that it can be captured: the vectors' gradient is for the caller to look at.
        """
        return self._top(self._bottom(continuous, len(vectors)), vectors, watches=False)

    def _bottom(self, continuous: Tensor, samples: int) -> Tensor:
        with self._autocast(continuous):
            if self.bottom is not None:
                bottom: Tensor = self.bottom(continuous)  # [B, D]
                return bottom
            assert self.constant is not None
            return self.constant.expand(samples, -1)

    def _top(self, bottom: Tensor, vectors: Tensor | ZeroCopyVectors | None, watches: bool = True) -> Tensor:
        with self._autocast(bottom):
            inputs = bottom if vectors is None else dot_interaction(bottom, vectors)
            # Zero-copy vectors have no gradient of their own that could be looked at: it is made of the inputs'.
            watched = vectors if isinstance(vectors, Tensor) else inputs
            if watches and self.training and watched.requires_grad:
                watched.register_hook(self.add_gradient_sum)  # type: ignore[no-untyped-call]
            logits: Tensor = self.top(inputs).squeeze(1)
        return logits.float()

    def add_gradient_sum(self, gradient: Tensor) -> None:
        """Note a gradient of vectors, of any shape, for `take_gradient_sum`."""
        total = gradient.sum(dtype=torch.float32)
        self._gradient_sum = total if self._gradient_sum is None else self._gradient_sum + total

    def take_gradient_sum(self) -> Tensor | None:
        """The sum of the vectors' gradients since the last call, float32 []: NaN or infinite where one of them is.

        Of vectors that are read in place it is that of the top MLP's inputs, of which the interaction makes theirs.
        None: there was no backward pass, or none that is looked at.
        """
        found, self._gradient_sum = self._gradient_sum, None
        return found

    def _autocast(self, x: Tensor) -> torch.autocast:
        return torch.autocast(x.device.type, torch.bfloat16, enabled=self.training and self.precision == "bf16")

    def train(self, mode: bool = True) -> DLRM:
        """As of any module; on a GPU also says whether products of float32 are TF32's, for this process."""
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high" if mode and self.precision == "tf32" else "highest")
        return super().train(mode)

    @property
    def features(self) -> int:
        """Categorical features, F."""
        return self._columns.features

    def vectors(self, lookups: PendingLookups) -> Tensor | ZeroCopyVectors:
        """The features' vectors in the schema's order: [B, F, D]. Collective: the lookup ends."""
        planned: Tensor | ZeroCopyVectors = self.embeddings(lookups.planned)
        if self.absent is None or isinstance(planned, ZeroCopyVectors):
            return planned
        columns = self._columns
        parts = dict(zip(columns.planned_features, planned.unbind(1), strict=True))
        for i, ((vectors, has_row), offsets) in enumerate(zip(lookups.planned.found, lookups.offsets, strict=True)):
            known = torch.where(has_row.unsqueeze(1), vectors, self.absent[i])
            parts[columns.dynamic_features[i]] = (
                known if offsets is None else JaggedTensor(known, offsets).pooled(columns.pooling)
            )
        return torch.stack([parts[i] for i in range(columns.features)], dim=1)

    def configure_optimizer(self, optimizer: config.EmbeddingOptimizer | config.Optimizer) -> None:
        """Choose the optimizer of all tables; see ShardedEmbeddings.configure_all."""
        self.embeddings.configure_all(_of_embeddings(optimizer))

    def step_embeddings(self, lr: float | None = None) -> None:
        """Apply the gradients since the last step to all tables."""
        self.embeddings.step_all(lr)

    def age_state(self, kept: float) -> None:
        """See ShardedEmbeddings.age_state; of all tables."""
        self.embeddings.age_state(kept)
        if self.dynamic is not None:
            self.dynamic.age_state(kept)

    def dense_parameters(self) -> list[nn.Parameter]:
        """What every rank holds alike, in a fixed order. (Embeddings are no parameters.)"""
        return list(self.parameters())


@dataclass(frozen=True)
class PendingLookups:
    """Lookups that have begun: `DLRM.prepare`."""

    planned: LookupHandle
    #: Rows of the batch, B.
    samples: int
    #: By feature of raw ids: where each row's ids begin and end, int64 [B + 1]; None: each row has one.
    offsets: Sequence[Tensor | None] = ()

    def prefetch(self) -> None:
        """See LookupHandle.prefetch."""
        self.planned.prefetch()

    def start(self) -> None:
        """See LookupHandle.start."""
        self.planned.start()

    def drop(self) -> None:
        """See LookupHandle.drop."""
        self.planned.drop()


def _of_embeddings(given: config.EmbeddingOptimizer | config.Optimizer) -> config.EmbeddingOptimizer:
    if isinstance(given, config.EmbeddingOptimizer):
        return given
    return config.EmbeddingOptimizer.model_validate(given.model_dump())


class _CodeColumns:
    """Which codes belong to which feature."""

    def __init__(self, schema: DatasetSchema, pooling: Literal["sum", "mean", "max"]) -> None:
        self._features = schema.of(Kind.CATEGORICAL)
        self.pooling = pooling
        self.features = len(self._features)
        self.has_lists = any(f.is_list for f in self._features)
        #: Places of the features of codes, and of raw ids.
        self.planned_features = [i for i, f in enumerate(self._features) if not f.dynamic]
        self.dynamic_features = [i for i, f in enumerate(self._features) if f.dynamic]

    def by_feature(self, batch: CategoricalBatch) -> list[Tensor | JaggedTensor]:
        """Of each feature: int64 [B], or any number a row."""
        scalars, lists = iter(batch.codes.unbind(1)), iter(batch.lists)
        return [next(lists) if f.is_list else next(scalars) for f in self._features]


def _without_nulls(ids: Tensor | JaggedTensor) -> Tensor | JaggedTensor:
    """A list has nothing where an id is null; a scalar has the id 0."""
    return ids.without(NULL_CODE) if isinstance(ids, JaggedTensor) else ids
