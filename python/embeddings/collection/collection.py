"""The layer as a library: features by name in, vectors by name out, in a training loop of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.comm.base import Collective, LocalCollective
from headrace.config import EmbeddingOptimizer, Optimizer, Sharding
from headrace.embeddings.checkpoint.dynamic import load_dynamic, save_dynamic
from headrace.embeddings.checkpoint.index import write_index
from headrace.embeddings.checkpoint.shards import load_shards, save_shards
from headrace.embeddings.checkpoint.shared_directory import shared_directory
from headrace.embeddings.collection.features import EmbeddingFeature, check, planned, raw_id_tables
from headrace.embeddings.collection.outputs import EmbeddingOutputs
from headrace.embeddings.collection.prepared import PreparedInputs
from headrace.embeddings.collection.whole_tables import gather_table, scatter_table
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.embeddings.input.feature_codes import feature_codes
from headrace.embeddings.input.jagged import JaggedTensor
from headrace.embeddings.planner.search import plan_tables
from headrace.embeddings.sharded import ShardedEmbeddings
from headrace.embeddings.storage.initialize import INIT_BOUND
from headrace.errors import UserError, nearest
from headrace.storage import local

#: Folders of a save.
_PLANNED, _RAW_IDS = "planned", "raw_ids"


class EmbeddingCollection(nn.Module):
    """Embedding tables of named features, spread over the ranks of a job and trained where they lie.

        features = [
            EmbeddingFeature("user", rows=1_000_000, dim=64),
            EmbeddingFeature("tags", rows=5_000, dim=64, pooling="mean"),
            EmbeddingFeature("session", dim=64),                             # no rows: any 64-bit ids
        ]
        embeddings = EmbeddingCollection(features, optimizer=EmbeddingOptimizer(), comm=headrace.comm.horovod())
        for inputs, labels in embeddings.pipeline(loader):
            vectors = embeddings(inputs)              # vectors["user"]: float32 [B, 64]
            loss_of(vectors, labels).backward()       # a mean over this rank's rows, as hvd.DistributedOptimizer takes
            embeddings.step()

    Inputs by name: a `JaggedTensor` of ids, any number of each sample's; or a tensor, one each [B] or L each [B, L], as
    torch.nn.EmbeddingBag takes. Outputs by name: see `EmbeddingOutputs`. B may differ between ranks and be 0, but all
    ranks call forward, backward and `step` the same number of times: they exchange rows. The weights are no torch
    parameters: `state_dict` and torch's optimizers do not see them, `step`, `save` and `load` are theirs.

    A raw id without a row (see `DynamicTable.admit_after`) has zeros, and learns nothing.

    Args:
        features: what is looked up; features of one table share it.
        optimizer: how rows learn (headrace.config); None: to look up alone.
        comm: the ranks; None: this process alone.
        sharding: where tables are (headrace.config): by rows, or as the planner finds cheapest; exceptions by table.
        batch_size: rows of a step over all ranks, which the planner reckons with.
        reduction: of the ranks' gradients. mean: each rank's loss is the mean over its own rows, as Horovod averages;
            sum: it is its share of the global batch's.
        seed: of the rows' starts, which depend on nothing else.
        init_bound: rows start uniform in +- this.
        device: of the tables, inputs and outputs.

    Raises:
        UserError: features or settings that do not fit each other, tables that do not fit in memory, no such device.
    """

    def __init__(
        self,
        features: Sequence[EmbeddingFeature],
        *,
        optimizer: EmbeddingOptimizer | Optimizer | None = None,
        comm: Collective | None = None,
        sharding: Sharding | None = None,
        batch_size: int = 8_192,
        reduction: str = "mean",
        seed: int = 1,
        init_bound: float = INIT_BOUND,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__()
        check(features)
        if reduction not in ("mean", "sum"):
            raise UserError(f"reduction is 'mean' or 'sum', not '{reduction}'")
        if isinstance(optimizer, Optimizer):
            optimizer = EmbeddingOptimizer.model_validate(optimizer.model_dump())
        self.features = tuple(features)
        comm = LocalCollective() if comm is None else comm
        raw = raw_id_tables(features, optimizer)
        self.embeddings = ShardedEmbeddings(
            plan_tables(
                *planned(features),
                comm.world.size,
                batch_size=batch_size,
                optimizer="sgd" if optimizer is None else optimizer.kind,
                settings=sharding or Sharding(),
                card=torch.device(device).type == "cuda",
            ).plan,
            comm,
            seed,
            init_bound=init_bound,
            dynamic=DynamicEmbeddings(raw, comm, seed, init_bound=init_bound, device=device) if raw else None,
            device=device,
        )
        if optimizer is not None:
            self.embeddings.configure_all(optimizer)
        self._planned = [f for f in features if f.rows is not None]
        #: By table of raw ids, its features.
        self._raw = {spec.name: [f for f in features if f.rows is None and f.table_name == spec.name] for spec in raw}
        self._dims = {f.name: f.dim for f in self._planned if f.pooling != "none"}
        self._scale = 1 / comm.world.size if reduction == "mean" else 1.0
        #: The inputs whose ids travel ahead.
        self._following: PreparedInputs | None = None

    def prepare(self, inputs: Mapping[str, Any]) -> PreparedInputs:
        """Begin a lookup: send the ids to the owners of their rows. Collective. `pipeline` does so ahead of time.

        Args:
            inputs: has the features by name; whatever else it has is left alone.

        Raises:
            UserError: a feature is missing, or an id is outside its table.
            ValueError: an input of another shape or type.
        """
        for f in self.features:
            if f.name not in inputs:
                raise UserError(f"the inputs have no '{f.name}'{nearest(f.name, list(inputs))}")
        raw = {f.name: self._raw_ids(f, inputs[f.name]) for of_table in self._raw.values() for f in of_table}
        ids = [torch.cat([raw[f.name].values for f in of_table]) for of_table in self._raw.values()]
        batch = [inputs[f.name] for f in self._planned]
        first = inputs[self.features[0].name]
        samples = first.samples if isinstance(first, JaggedTensor) else len(first)
        handle = self.embeddings.prepare(batch or torch.zeros(samples, 0, dtype=torch.int64), raw=ids)
        return PreparedInputs(inputs, handle, raw)

    def forward(self, inputs: Mapping[str, Any]) -> EmbeddingOutputs:
        """The features' vectors. Collective.

        Args:
            inputs: by name; or what `prepare` or `pipeline` made of them, which is used once.
        """
        prepared = inputs if isinstance(inputs, PreparedInputs) else self.prepare(inputs)
        prepared.use()
        outs = [self._scaled(x) for x in self.embeddings.outputs(prepared.handle)]
        others: dict[str, Tensor | JaggedTensor] = {}
        for f, vectors in zip([f for f in self._planned if f.pooling == "none"], outs[1:], strict=True):
            others[f.name] = _as_given(vectors, prepared[f.name])
        for of_table, (vectors, _) in zip(self._raw.values(), prepared.handle.found, strict=True):
            sizes = [prepared.raw[f.name].values.numel() for f in of_table]
            for f, part in zip(of_table, torch.split(self._scaled(vectors), sizes), strict=True):
                others[f.name] = _pooled(f, part, prepared.raw[f.name], prepared[f.name])
        world = self.embeddings.collective.world
        if self._following is not None and world.local_size < world.size:
            self._following.handle.prefetch()  # hides a network's time; inside one machine it costs more than it saves
        return EmbeddingOutputs({f.name: f.pooling != "none" for f in self.features}, outs[0], self._dims, others)

    def pipeline(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, while the ids of each travel during the step of the one before, and its rows after that step.

        Collective: all ranks have as many batches. Results are those without it, bit for bit.

        Args:
            batches: each the inputs by name, or a tuple whose first element they are. In their place comes what
                `forward` takes, which has them by name, too.
        """
        source = iter(batches)
        following = self._begin(source)
        try:
            while following is not None:
                current, following = following, None
                following = self._begin(source)
                self._following = following and following[0]
                prepared, rest = current
                yield prepared if rest is None else (prepared, *rest)
                if not prepared.is_used:
                    prepared.handle.drop()
        finally:  # no message may be under way when the ranks part
            self._following = None
            if following is not None:
                following[0].handle.drop()

    def _begin(self, source: Iterator[Any]) -> tuple[PreparedInputs, Sequence[Any] | None] | None:
        for batch in source:
            if isinstance(batch, Mapping):
                return self.prepare(batch), None
            inputs, *rest = batch
            return self.prepare(inputs), rest
        return None

    def step(self, lr: float | None = None) -> None:
        """Apply the gradients since the last step to the rows they touch. Collective.

        Args:
            lr: the learning rate of this step; None: the configured one.
        """
        self.embeddings.step_all(lr)
        if self._following is not None:
            self._following.handle.start()

    def save(self, folder: str | Path, *, with_optimizer: bool = True) -> None:
        """Write all tables into a folder that appears when it is whole, in place of an earlier one. Collective.

        Args:
            folder: on a file system that the ranks share.
            with_optimizer: also the optimizer's states, to go on training.

        Raises:
            RuntimeError: gradients wait for `step`, or there is no optimizer whose states could be saved.
        """
        comm = self.embeddings.collective
        with shared_directory(local(folder), comm) as building:
            save_shards(self.embeddings, building / _PLANNED, with_optimizer)
            if self.embeddings.dynamic is not None:
                save_dynamic(self.embeddings.dynamic, building / _RAW_IDS)
            comm.barrier()
            if comm.world.is_chief:
                write_index(building / _PLANNED)

    def load(self, folder: str | Path, *, with_optimizer: bool = True) -> None:
        """Read what `save` wrote, on any number of ranks and with any sharding. Speaks to no other rank.

        Tables that have grown keep the start of their new rows; tables that the save lacks keep theirs.

        Raises:
            UserError: a file is missing or damaged, or has other dims or another optimizer.
        """
        load_shards(self.embeddings, local(folder) / _PLANNED, with_optimizer)
        if self.embeddings.dynamic is not None:
            load_dynamic(self.embeddings.dynamic, local(folder) / _RAW_IDS, with_optimizer)

    def table(self, name: str) -> Tensor:
        """A whole table with rows, on every rank: float32 [rows, dim]. Collective. Raises KeyError: no such table."""
        return gather_table(self.embeddings, name)

    def set_table(self, name: str, weights: Tensor) -> None:
        """Replace the rows of a table by [rows, dim]; each rank keeps its own. Optimizer states stay as they are.

        Raises:
            KeyError: no such table.
            ValueError: another shape.
        """
        scatter_table(self.embeddings, name, weights)

    def _raw_ids(self, f: EmbeddingFeature, given: Any) -> JaggedTensor:
        found = feature_codes(f.name, given, weighted=f.weighted, padding_idx=None).flat()
        if f.padding_idx is not None and f.pooling != "none":
            found = found.without(f.padding_idx)
        return JaggedTensor(found.values.long(), found.offsets, found.weights)

    def _scaled(self, vectors: Tensor) -> Tensor:
        """The same vectors, whose gradient is this rank's share."""
        if self._scale != 1 and vectors.requires_grad:
            vectors.register_hook(lambda gradient: gradient * self._scale)  # type: ignore[no-untyped-call]
        return vectors


def _pooled(f: EmbeddingFeature, vectors: Tensor, ids: JaggedTensor, given: Any) -> Tensor | JaggedTensor:
    """What a feature of raw ids gives, from the vectors [N, dim] of its ids."""
    if f.pooling == "none":
        return _as_given(vectors, given)
    if ids.weights is not None:
        vectors = vectors * ids.weights.to(vectors.device).unsqueeze(1)
    return JaggedTensor(vectors, ids.offsets.to(vectors.device)).pooled(f.pooling)


def _as_given(vectors: Tensor, given: Tensor | JaggedTensor) -> Tensor | JaggedTensor:
    """Vectors [N, dim] of a sequence, in the form that its ids came in."""
    if isinstance(given, JaggedTensor):
        return JaggedTensor(vectors, (given.offsets - given.offsets[0]).to(vectors.device))
    return vectors.view(*given.shape, vectors.shape[1])
