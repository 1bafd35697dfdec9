"""Model over sharded embeddings: the parts that are common to all classes of networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headrace import config
from headrace.comm.base import Collective
from headrace.config.schema import NULL_CODE, DatasetSchema, Kind
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.embeddings.jagged import JaggedTensor
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.layout import FusedTable
from headrace.embeddings.lookup.handle import LookupHandle
from headrace.embeddings.lookup.zero_copy import ZeroCopyVectors
from headrace.embeddings.sharding_plan import Lookup, Plan, Table, row_wise
from headrace.errors import UserError
from headrace.models.categorical import BatchIds, CategoricalBatch
from headrace.models.classes import make_network
from headrace.models.inputs import InputFeatures, Inputs, ShareOf
from headrace.models.lookups import NetworkLookups, lookups_of, model_tables
from headrace.models.objective import Tasks, spec_loss

#: (tables, lookups, ranks) -> plan.
MakePlan = Callable[[Sequence[Table], Sequence[Lookup], int], Plan]

_NETWORK = "network."


class ShardedModel(nn.Module):
    """A model whose embeddings are sharded and whose dense part is the same on all ranks.

    The dense part (`network`) is a torch module that `headrace.models.classes` creates; the spec's `model.class` names
    it. The categorical features of a batch are a `CategoricalBatch`, or all side by side, int64 [B, S], with lists
    padded by 0.

    A network with `lookups` (headrace.models.lookups) has the tables of these lookups. One without has the vectors of
    each categorical feature, `embedding_dim` wide.

    Features of raw ids are looked up in tables of their own (`dynamic`), the others by the plan (`embeddings`), all in
    one exchange each way. An id without a row gets the learned vector `absent` of its table, which belongs to the dense
    part and is initially zero.

    The dense part has the same initial weights on all ranks (same seed); `dense_state` returns it. The embeddings are
    sharded over `collective`. B may be 0 on a rank, but all ranks call forward and backward the same number of times.

        model = ShardedModel(schema, spec.model, LocalCollective(), seed=1)
        logits = model(torch.zeros(8, 3), torch.zeros(8, 5, dtype=torch.int64))   # [8]

    Args:
        schema: schema of the dataset.
        model: class, settings and widths.
        collective: the ranks.
        seed: seed of all initial weights.
        make_plan: function that plans the tables of codes.
        settings: `train.embeddings`, for the tables of raw ids; None: the model is for scoring.
        device: device of the tables and the dense part. Batches may be on the host; codes must be.
        network: the network of `model` with this seed; None: it is created here.
        tasks: `train.tasks`, the labels of the network's outputs.
        matrix: see ShardedEmbeddings.

    Raises:
        UserError: the schema has neither continuous nor categorical features, or the settings or the network's lookups
            do not fit it.
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
        network: nn.Module | None = None,
        tasks: Mapping[str, config.Task] | None = None,
        matrix: Callable[[FusedTable], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.device = torch.device(device)
        self.tasks = Tasks(tasks or {})
        features = InputFeatures.from_schema(schema, model.embedding_dim, tasks)
        if not features.continuous and not features.categorical:
            raise UserError("the dataset has no features: tag at least one column of features.workflow as an input")
        network = make_network(model, features, seed) if network is None else network
        tables = model_tables(schema, model, network, None if settings is None else _of_embeddings(settings))
        requested, dynamic = lookups_of(network), tables.dynamic
        if model.loss is not None and (self.tasks.names or hasattr(network, "loss")):
            whose = "train.tasks say the losses" if self.tasks.names else f"'{model.kind}' has a loss of its own"
            raise UserError(f"model.loss: {whose}; leave it out")
        self._spec_loss = model.loss or config.Loss()
        self.schema = schema
        self.config = model
        self.seed = seed
        self.inputs = features
        #: Arithmetic of the dense part in training; weights, embeddings, their gradients and loss are fp32.
        self.precision: Literal["fp32", "tf32", "bf16"] = "fp32"
        self.embeddings = ShardedEmbeddings(
            make_plan(tables.tables, tables.lookups, collective.world.size),
            collective,
            seed,
            dynamic=DynamicEmbeddings(dynamic, collective, seed, device=self.device) if dynamic else None,
            device=self.device,
            matrix=matrix,
        )
        self._collective = collective
        self._columns = _CodeColumns(schema, model.pooling)
        self._places = BatchIds.places_of(schema)
        #: Lookups of the network; None: each categorical feature.
        self._lookups = None if requested is None else NetworkLookups(requested, schema, tables)
        self._gradient_sum: Tensor | None = None
        #: Log probabilities of codes, if the run has them; see `Inputs`.
        self.log_share: Callable[[str, ShareOf], Tensor] | None = None
        #: Vector of an id without a row, by table: [tables of raw ids, D], or [D] for each of a network's lookups.
        self.absent: nn.Parameter | nn.ParameterList | None = None
        if dynamic and requested is None:
            self.absent = nn.Parameter(torch.zeros(len(dynamic), model.embedding_dim))
        elif dynamic:
            self.absent = nn.ParameterList(nn.Parameter(torch.zeros(s.dim)) for s in dynamic)
        self.network = network
        #: True once the network has seen the training rows: buffers computed from them stay when a model is restored.
        self.has_observed = False
        if self.device.type != "cpu":  # drawn on the host, so that every device has the same initial weights
            self.to(self.device)

    @property
    def _is_mixed(self) -> bool:
        return self.training and self.precision == "bf16"

    @property
    def dynamic(self) -> DynamicEmbeddings | None:
        """The tables of raw ids."""
        return self.embeddings.dynamic

    def prepare(self, batch: Tensor | CategoricalBatch) -> PendingLookups:
        """Start the lookups of a batch's categorical features; see ShardedEmbeddings.prepare. Collective."""
        columns = self._columns
        if isinstance(batch, Tensor):
            batch = CategoricalBatch.of_padded(batch, self.schema) if columns.has_lists else CategoricalBatch(batch)
        if self.device.type != "cpu":
            batch = batch.to(self.device)
        samples, by_name = batch.samples, BatchIds(batch, self._places)
        if self._lookups is not None:
            return PendingLookups(self._lookups.prepare(self.embeddings, by_name), samples, by_name)
        # Zero-copy reads are C++ for fp32.
        zero_copy = getattr(self.network, "reads_in_place", False) and not self._is_mixed
        if not columns.has_lists and not columns.dynamic_features:
            return PendingLookups(self.embeddings.prepare(batch.codes, zero_copy=zero_copy), samples, by_name)
        by_feature = columns.by_feature(batch)
        planned = [by_feature[i] for i in columns.planned_features]
        raw = [_without_nulls(by_feature[i]) for i in columns.dynamic_features]
        ids = [x.values if isinstance(x, JaggedTensor) else x.contiguous() for x in raw]
        handle = self.embeddings.prepare(planned or batch.codes[:, :0], raw=ids, zero_copy=zero_copy)
        offsets = [x.offsets if isinstance(x, JaggedTensor) else None for x in raw]
        return PendingLookups(handle, samples, by_name, offsets)

    def forward(self, continuous: Tensor, batch: Tensor | CategoricalBatch | PendingLookups) -> Tensor:
        """Return the logits float32 [B] of continuous float32 [B, C] and the categorical features. Collective."""
        return self.outputs_of(continuous, batch)["logits"]

    def outputs_of(self, continuous: Tensor, batch: Tensor | CategoricalBatch | PendingLookups) -> dict[str, Tensor]:
        """Return all outputs, including the logits that `forward` returns. Collective."""
        return self.outputs(self.inputs_of(continuous, batch))

    def inputs_of(
        self,
        continuous: Tensor,
        batch: Tensor | CategoricalBatch | PendingLookups,
        labels: Tensor | None = None,
        weights: Tensor | None = None,
        targets: Mapping[str, Tensor] | None = None,
        lists: Tensor | None = None,
    ) -> Inputs:
        """Return the inputs of the network; the embeddings' rows begin to travel. Collective."""
        lookups = batch if isinstance(batch, PendingLookups) else self.prepare(batch)
        lookups.start()

        def vectors(in_place: bool) -> Tensor | ZeroCopyVectors:
            if isinstance(lookups.planned, LookupHandle):
                lookups.planned.zero_copy &= in_place
            with torch.autocast(self.device.type, enabled=False) if self._is_mixed else nullcontext():
                return self.vectors(lookups)

        def vectors_by_name() -> Mapping[str, Tensor | JaggedTensor]:
            assert self._lookups is not None
            absent = self.absent if isinstance(self.absent, nn.ParameterList) else ()
            with torch.autocast(self.device.type, enabled=False) if self._is_mixed else nullcontext():
                return self._lookups.vectors_by_name(self.embeddings, lookups.planned, lookups.ids, tuple(absent))

        of_features: Tensor | Callable[[bool], Tensor | ZeroCopyVectors] = vectors
        if self._lookups is not None:
            of_features = _no_vectors
        elif not self.features:
            of_features = continuous.new_empty((lookups.samples, 0, self.config.embedding_dim), device=self.device)
        return Inputs(
            self.inputs,
            continuous.to(self.device),
            of_features,
            labels,
            weights,
            self.add_gradient_sum if self.training else None,
            embeddings=None if self._lookups is None else vectors_by_name,
            ids=lookups.ids,
            negatives=lookups.ids.negatives if lookups.ids.are_drawn or not self.training else None,
            all_gather=partial(all_gather_rows, collective=self._collective),
            rank=self._collective.world.rank,
            targets=targets,
            lists=lists,
            log_share=self.log_share,
            drop=lookups.drop,
        )

    def outputs(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return the network's outputs for a batch, float32."""
        with torch.autocast(self.device.type, torch.bfloat16) if self._is_mixed else nullcontext():
            outputs: dict[str, Tensor] = self.network(inputs)
        return self.tasks.complete({name: value.float() for name, value in outputs.items()})

    def loss(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        """Return the sum over the batch's rows, []: the network's own loss, that of the tasks, or the spec's."""
        network_loss = getattr(self.network, "loss", None)
        if network_loss is not None:
            total: Tensor = network_loss(outputs, inputs)
            return total
        if self.tasks.names:
            return self.tasks.loss(outputs, inputs)
        return spec_loss(self._spec_loss, outputs, inputs, getattr(self.network, "item", None))

    @property
    def predicts(self) -> Literal["probability", "number", "order"]:
        """Meaning of logits: see config.Loss; a network with a loss of its own declares it, by default a
        probability.
        """
        kind: Literal["probability", "number", "order"] = getattr(self.network, "predicts", self._spec_loss.predicts)
        return kind

    def value(self, logits: Tensor) -> Tensor:
        """Return the prediction of logits float32 [B]: the label's value, or a probability or rank score in (0, 1)."""
        return logits if self.predicts == "number" else logits.sigmoid()

    def begin_step(self, step: int) -> None:
        """Call the network's `begin_step`, if it has one, with the step of training, from 1."""
        begin_step = getattr(self.network, "begin_step", None)
        if begin_step is not None:
            begin_step(step)

    def observe(self, rows: Iterable[tuple[Tensor, CategoricalBatch, Tensor]]) -> None:
        """Show the network's `observe` rows without embeddings: continuous features, categorical ones, labels.

        The network computes from them the buffers that its `observed` names. They belong to the dense part, but
        restoring a saved model does not replace them.
        """
        self.network.observe(  # type: ignore[operator]
            Inputs(self.inputs, continuous, _no_vectors, labels, ids=BatchIds(batch, self._places))
            for continuous, batch, labels in rows
        )
        self.has_observed = True

    def add_gradient_sum(self, gradient: Tensor) -> None:
        """Add a gradient of vectors, of any shape, for `take_gradient_sum`."""
        total = gradient.sum(dtype=torch.float32)
        self._gradient_sum = total if self._gradient_sum is None else self._gradient_sum + total

    def take_gradient_sum(self) -> Tensor | None:
        """Return the sum of the vectors' gradients since the last call, float32 []: not finite if one of them is not.

        For vectors that are read in place it is the gradient of the output that was computed from them
        (`Inputs.watch`). None: no backward pass has added a gradient.
        """
        gradient_sum, self._gradient_sum = self._gradient_sum, None
        return gradient_sum

    def train(self, mode: bool = True) -> ShardedModel:
        """Switch between training and evaluation; on a GPU also set whether float32 products use TF32, for this
        process.
        """
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high" if mode and self.precision == "tf32" else "highest")
        return super().train(mode)

    @property
    def features(self) -> int:
        """Categorical features, F."""
        return self._columns.features

    def vectors(self, lookups: PendingLookups) -> Tensor | ZeroCopyVectors:
        """Return the features' vectors in the schema's order: [B, F, D]. Collective: the lookup ends."""
        planned: Tensor | ZeroCopyVectors = self.embeddings(lookups.planned)
        absent = self.absent
        if not isinstance(absent, nn.Parameter) or isinstance(planned, ZeroCopyVectors):
            return planned
        columns = self._columns
        parts = dict(zip(columns.planned_features, planned.unbind(1), strict=True))
        for i, ((vectors, has_row), offsets) in enumerate(zip(lookups.planned.found, lookups.offsets, strict=True)):
            known = torch.where(has_row.unsqueeze(1), vectors, absent[i])
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

    def age_state(self, factor: float) -> None:
        """Age the states of all tables; see ShardedEmbeddings.age_state."""
        self.embeddings.age_state(factor)
        if self.dynamic is not None:
            self.dynamic.age_state(factor)

    def dense_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are replicated on all ranks, in a fixed order. (Embeddings are no parameters.)"""
        return list(self.parameters())

    def named_dense_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the dense parameters by the names of `dense_state`."""
        return ((name.removeprefix(_NETWORK), p) for name, p in self.named_parameters())

    def dense_state(self) -> dict[str, Tensor]:
        """Return the state dict of the dense part: the network's, by its own names, and `absent` where there are raw
        ids.
        """
        return {name.removeprefix(_NETWORK): value for name, value in self.state_dict().items()}

    @property
    def observed(self) -> tuple[str, ...]:
        """Names in `dense_state` of buffers computed from the training rows; their shapes follow from the data."""
        return tuple(getattr(self.network, "observed", ()))

    def load_dense_state(self, state: Mapping[str, Tensor]) -> None:
        """Load a `dense_state` of the same shapes, except for `observed` buffers."""
        for name in self.observed:
            setattr(self.network, name, torch.empty_like(state[name], device=self.device))
        self.load_state_dict(
            {name if name.split(".")[0] == "absent" else _NETWORK + name: value for name, value in state.items()}
        )


@dataclass(frozen=True)
class PendingLookups:
    """Lookups that have started: `ShardedModel.prepare`."""

    planned: LookupHandle
    #: Rows of the batch, B.
    samples: int
    #: Ids of the batch, by feature.
    ids: BatchIds
    #: Offsets of each row's ids by feature of raw ids, int64 [B + 1]; None: each row has one.
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


def _no_vectors(in_place: bool) -> Tensor:
    raise UserError("the model has `lookups`, and so no vectors of all features: ask for Inputs.embedding(name)")


def _of_embeddings(optimizer: config.EmbeddingOptimizer | config.Optimizer) -> config.EmbeddingOptimizer:
    if isinstance(optimizer, config.EmbeddingOptimizer):
        return optimizer
    return config.EmbeddingOptimizer.model_validate(optimizer.model_dump())


class _CodeColumns:
    """Positions of the categorical features of codes and of raw ids."""

    def __init__(self, schema: DatasetSchema, pooling: Literal["sum", "mean", "max"]) -> None:
        self._features = schema.of(Kind.CATEGORICAL)
        self.pooling = pooling
        self.features = len(self._features)
        self.has_lists = any(f.is_list for f in self._features)
        #: Positions of the features of codes, and of raw ids.
        self.planned_features = [i for i, f in enumerate(self._features) if not f.dynamic]
        self.dynamic_features = [i for i, f in enumerate(self._features) if f.dynamic]

    def by_feature(self, batch: CategoricalBatch) -> list[Tensor | JaggedTensor]:
        """Return the ids of each feature: int64 [B], or any number a row."""
        scalars, lists = iter(batch.codes.unbind(1)), iter(batch.lists)
        return [next(lists) if f.is_list else next(scalars) for f in self._features]


def _without_nulls(ids: Tensor | JaggedTensor) -> Tensor | JaggedTensor:
    """Remove nulls from a list; a scalar keeps the id 0."""
    return ids.without(NULL_CODE) if isinstance(ids, JaggedTensor) else ids


def all_gather_rows(x: Tensor, collective: Collective) -> Tensor:
    """Concatenate the ranks' `x` [B_r, ...] in their order: [sum of B_r, ...]. Collective, as is its backward.

    B_r may differ and be 0. The gradient of `x` is the sum of all ranks' gradients of its rows, in order of the ranks.
    """
    if collective.world.size == 1:
        return x
    gathered: Tensor = _AllGather.apply(x, collective)  # type: ignore[no-untyped-call]
    return gathered


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: Collective) -> Tensor:
        size = collective.world.size
        # Send the same rows to each rank: one all-to-all, which also tells how many rows each rank has.
        copies = x.detach().unsqueeze(0).expand(size, *x.shape).reshape(size * len(x), *x.shape[1:])
        gathered, rows = collective.all_to_all(copies, [len(x)] * size)
        ctx.collective, ctx.rows, ctx.local_rows = collective, rows, len(x)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        size = ctx.collective.world.size
        back, _ = ctx.collective.all_to_all(grads[0].contiguous(), ctx.rows)
        return back.view(size, ctx.local_rows, *back.shape[1:]).sum(0), None
