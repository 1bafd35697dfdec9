"""Embedding layer as a library: features by name in, vectors by name out, in a training loop of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headrace.comm.base import Collective, LocalCollective
from headrace.config.embeddings import DynamicTable, EmbeddingOptimizer, Optimizer, Sharding
from headrace.embeddings.addressing import feature_codes
from headrace.embeddings.jagged import JaggedTensor
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.lookup.handle import LookupHandle
from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.planner.search import plan_tables
from headrace.embeddings.sharding_plan import Lookup, Pooling, Table
from headrace.embeddings.storage import INIT_BOUND, decode, encode
from headrace.errors import UserError, nearest

if TYPE_CHECKING:
    from headrace.embeddings.dynamic.spec import DynamicSpec

#: Folders of a save.
_PLANNED, _RAW_IDS = "planned_tables", "raw_ids"


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
        check_features(features)
        if reduction not in ("mean", "sum"):
            raise UserError(f"reduction is 'mean' or 'sum', not '{reduction}'")
        if isinstance(optimizer, Optimizer):
            optimizer = EmbeddingOptimizer.model_validate(optimizer.model_dump())
        self.features = tuple(features)
        comm = LocalCollective() if comm is None else comm
        raw, dynamic = raw_id_tables(features, optimizer), None
        if raw:
            from headrace.embeddings.dynamic.tables import DynamicEmbeddings

            dynamic = DynamicEmbeddings(raw, comm, seed, init_bound=init_bound, device=device)
        self.embeddings = ShardedEmbeddings(
            plan_tables(
                *planned_tables(features),
                comm.world.size,
                batch_size=batch_size,
                optimizer="sgd" if optimizer is None else optimizer.kind,
                settings=sharding or Sharding(),
                card=torch.device(device).type == "cuda",
            ).plan,
            comm,
            seed,
            init_bound=init_bound,
            dynamic=dynamic,
            device=device,
        )
        if optimizer is not None:
            self.embeddings.configure_all(optimizer)
        self._planned = [f for f in features if f.rows is not None]
        #: Features by table of raw ids.
        self._raw = {spec.name: [f for f in features if f.rows is None and f.table_name == spec.name] for spec in raw}
        self._dims = {f.name: f.dim for f in self._planned if f.pooling != "none"}
        self._scale = 1 / comm.world.size if reduction == "mean" else 1.0
        #: Inputs of the next step, whose ids travel ahead.
        self._following: PreparedInputs | None = None

    def prepare(self, inputs: Mapping[str, Any]) -> PreparedInputs:
        """Start a lookup: send the ids to the owners of their rows. Collective. `pipeline` does so ahead of time.

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
        """Look up the features' vectors. Collective.

        Args:
            inputs: by name; or what `prepare` or `pipeline` made of them, which is used once.
        """
        prepared = inputs if isinstance(inputs, PreparedInputs) else self.prepare(inputs)
        prepared.use()
        outs = [self._scaled(x) for x in self.embeddings.outputs(prepared.handle)]
        other_vectors: dict[str, Tensor | JaggedTensor] = {}
        for f, vectors in zip([f for f in self._planned if f.pooling == "none"], outs[1:], strict=True):
            other_vectors[f.name] = _as_given(vectors, prepared[f.name])
        for of_table, (vectors, _) in zip(self._raw.values(), prepared.handle.found, strict=True):
            sizes = [prepared.raw[f.name].values.numel() for f in of_table]
            for f, part in zip(of_table, torch.split(self._scaled(vectors), sizes), strict=True):
                other_vectors[f.name] = _pooled(f, part, prepared.raw[f.name], prepared[f.name])
        world = self.embeddings.collective.world
        if self._following is not None and world.local_size < world.size:
            self._following.handle.prefetch()  # hides a network's time; inside one machine it costs more than it saves
        return EmbeddingOutputs(
            {f.name: f.pooling != "none" for f in self.features}, outs[0], self._dims, other_vectors
        )

    def pipeline(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches; ids of each travel during the step of the previous one, its rows after that step.

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
        """Write all tables into a folder that appears once it is complete, in place of an earlier one. Collective.

        Args:
            folder: on a file system that the ranks share.
            with_optimizer: also the optimizer's states, to go on training.

        Raises:
            RuntimeError: gradients wait for `step`, or there is no optimizer whose states could be saved.
        """
        from headrace.embeddings.checkpoint.files import shared_directory, write_index
        from headrace.embeddings.checkpoint.shards import save_shards
        from headrace.storage import local

        comm = self.embeddings.collective
        with shared_directory(local(folder), comm) as building:
            save_shards(self.embeddings, building / _PLANNED, with_optimizer)
            if self.embeddings.dynamic is not None:
                from headrace.embeddings.checkpoint.dynamic import save_dynamic

                save_dynamic(self.embeddings.dynamic, building / _RAW_IDS)
            comm.barrier()
            if comm.world.is_chief:
                write_index(building / _PLANNED)

    def load(self, folder: str | Path, *, with_optimizer: bool = True) -> None:
        """Read a save of any number of ranks and any sharding. No communication.

        Tables that have grown keep the start of their new rows; tables that the save lacks keep theirs.

        Raises:
            UserError: a file is missing or damaged, or has other dims or another optimizer.
        """
        from headrace.embeddings.checkpoint.shards import load_shards
        from headrace.storage import local

        load_shards(self.embeddings, local(folder) / _PLANNED, with_optimizer)
        if self.embeddings.dynamic is not None:
            from headrace.embeddings.checkpoint.dynamic import load_dynamic

            load_dynamic(self.embeddings.dynamic, local(folder) / _RAW_IDS, with_optimizer)

    def table(self, name: str) -> Tensor:
        """Return a whole table with rows, on every rank: float32 [rows, dim].

        Collective. Raises KeyError: no such table.
        """
        return gather_table(self.embeddings, name)

    def set_table(self, name: str, weights: Tensor) -> None:
        """Replace the rows of a table by [rows, dim]; each rank keeps its own. Optimizer states stay as they are.

        Raises:
            KeyError: no such table.
            ValueError: another shape.
        """
        scatter_table(self.embeddings, name, weights)

    def _raw_ids(self, f: EmbeddingFeature, ids: Any) -> JaggedTensor:
        flat_ids = feature_codes(f.name, ids, weighted=f.weighted, padding_idx=None).flat()
        if f.padding_idx is not None and f.pooling != "none":
            flat_ids = flat_ids.without(f.padding_idx)
        return JaggedTensor(flat_ids.values.long(), flat_ids.offsets, flat_ids.weights)

    def _scaled(self, vectors: Tensor) -> Tensor:
        """Return the same vectors, whose gradient is this rank's share."""
        if self._scale != 1 and vectors.requires_grad:
            vectors.register_hook(lambda gradient: gradient * self._scale)  # type: ignore[no-untyped-call]
        return vectors


def _pooled(f: EmbeddingFeature, vectors: Tensor, ids: JaggedTensor, original_ids: Any) -> Tensor | JaggedTensor:
    """Pool the vectors [N, dim] of a feature's raw ids."""
    if f.pooling == "none":
        return _as_given(vectors, original_ids)
    if ids.weights is not None:
        vectors = vectors * ids.weights.to(vectors.device).unsqueeze(1)
    return JaggedTensor(vectors, ids.offsets.to(vectors.device)).pooled(f.pooling)


def _as_given(vectors: Tensor, original_ids: Tensor | JaggedTensor) -> Tensor | JaggedTensor:
    """Return vectors [N, dim] of a sequence in the form of its ids."""
    if isinstance(original_ids, JaggedTensor):
        return JaggedTensor(vectors, (original_ids.offsets - original_ids.offsets[0]).to(vectors.device))
    return vectors.view(*original_ids.shape, vectors.shape[1])


@dataclass(frozen=True)
class EmbeddingFeature:
    """A feature that is looked up.

    Attributes:
        name: under which its ids come and its vectors go.
        dim: width of its vectors.
        rows: of its table, whose ids are 0 to rows - 1; None: a table of raw ids, any 64-bit integers, whose rows come
            and go with the ids (headrace.embeddings.dynamic).
        table: the table's name; features that name the same table share it. None: as the feature.
        pooling: how the vectors of a sample become one: sum, mean or max; none: they do not, the feature is a sequence.
        weighted: the ids come with a weight each, and the pooling is the sum of weight times vector.
        padding_idx: the id that counts nothing, as torch.nn.EmbeddingBag's; None: each is looked up.
        ids: of a sample, in the mean: what the planner reckons with (`sharding.kind: auto`).
    """

    name: str
    dim: int
    rows: int | None = None
    table: str | None = None
    pooling: Pooling = "sum"
    weighted: bool = False
    padding_idx: int | None = None
    ids: int = 1

    @property
    def table_name(self) -> str:
        return self.table or self.name


def check_features(features: Sequence[EmbeddingFeature]) -> None:
    """Raise UserError where names or shapes of features do not fit each other."""
    if not features:
        raise UserError("an EmbeddingCollection needs one feature at least")
    names = [f.name for f in features]
    duplicate_names = sorted({n for n in names if names.count(n) > 1})
    if duplicate_names:
        raise UserError(f"two features of one name: {', '.join(duplicate_names)}")
    by_table: dict[str, EmbeddingFeature] = {}
    for f in features:
        if f.dim < 1 or f.ids < 1 or (f.rows is not None and f.rows < 1):
            raise UserError(f"feature '{f.name}': dim={f.dim}, rows={f.rows}, ids={f.ids}: each is at least 1")
        if f.padding_idx is not None and f.rows is not None and not 0 <= f.padding_idx < f.rows:
            raise UserError(f"feature '{f.name}': padding_idx={f.padding_idx} is no row of {f.rows}")
        if f.weighted and f.pooling != "sum":
            raise UserError(f"feature '{f.name}': weights are for pooling='sum', not for '{f.pooling}'")
        known = by_table.setdefault(f.table_name, f)
        if (known.rows, known.dim) != (f.rows, f.dim):
            raise UserError(
                f"features '{known.name}' and '{f.name}' share table '{f.table_name}', but say rows={known.rows}, "
                f"dim={known.dim} and rows={f.rows}, dim={f.dim}"
            )


def planned_tables(features: Sequence[EmbeddingFeature]) -> tuple[tuple[Table, ...], tuple[Lookup, ...]]:
    """Return the tables with a number of rows, and their lookups in the features' order."""
    tables = {f.table_name: Table(f.table_name, f.rows, f.dim) for f in features if f.rows is not None}
    lookups = [
        Lookup(f.name, f.table_name, f.ids, True, f.pooling, f.weighted, f.padding_idx)
        for f in features
        if f.rows is not None
    ]
    return tuple(tables.values()), tuple(lookups)


def raw_id_tables(
    features: Sequence[EmbeddingFeature], optimizer: EmbeddingOptimizer | None
) -> tuple[DynamicSpec, ...]:
    """Return the tables of raw ids, with the settings of `optimizer.dynamic` by table.

    Raises:
        UserError: settings of a table that has no raw ids.
    """
    dims = {f.table_name: f.dim for f in features if f.rows is None}
    settings = {} if optimizer is None else optimizer.dynamic
    for name in settings:
        if name not in dims:
            known = ", ".join(dims) or "none"
            raise UserError(f"optimizer.dynamic: '{name}' is no table of raw ids (those are: {known})")
    if not dims:
        return ()
    from headrace.embeddings.dynamic.spec import DynamicSpec

    return tuple(DynamicSpec(n, d, **settings.get(n, DynamicTable()).model_dump()) for n, d in dims.items())


class EmbeddingOutputs(Mapping[str, Tensor | JaggedTensor]):
    """Vectors by feature: float32 [B, dim], or of a sequence a JaggedTensor of values [N, dim].

    A sequence whose ids came as a tensor has vectors of that shape, [..., dim].

    Args:
        pooled: of all features in order, whether they are pooled, by name.
        side_by_side: vectors of the pooled features of planned tables: [B, their dims].
        dims: of these features by name, in order.
        others: the vectors of all other features.
    """

    def __init__(
        self,
        pooled: Mapping[str, bool],
        side_by_side: Tensor,
        dims: Mapping[str, int],
        others: Mapping[str, Tensor | JaggedTensor],
    ) -> None:
        self._pooled, self._side_by_side, self._dims = dict(pooled), side_by_side, dict(dims)
        self._other_vectors = dict(others)
        self._split: dict[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor | JaggedTensor:
        if name in self._other_vectors:
            return self._other_vectors[name]
        if self._split is None:  # once: gradients of all are put together at once
            parts = torch.split(self._side_by_side, list(self._dims.values()), dim=1)
            self._split = dict(zip(self._dims, parts, strict=True))
        return self._split[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pooled)

    def __len__(self) -> int:
        return len(self._pooled)

    def side_by_side(self) -> Tensor:
        """Return all pooled features in order: float32 [B, sum of their dims]. Without a copy where no ids are raw."""
        names = [name for name, is_pooled in self._pooled.items() if is_pooled]
        if names == list(self._dims):
            return self._side_by_side
        return torch.cat([x for x in map(self.__getitem__, names) if isinstance(x, Tensor)], dim=1)


class PreparedInputs(Mapping[str, Any]):
    """Inputs by name, as they were passed, and their lookup. For one forward pass."""

    def __init__(self, inputs: Mapping[str, Any], handle: LookupHandle, raw: Mapping[str, JaggedTensor]) -> None:
        self._inputs, self.handle = inputs, handle
        #: Ids that are looked up, by feature of raw ids.
        self.raw = raw
        self.is_used = False

    def use(self) -> None:
        """Mark the lookup as used; raise RuntimeError if it was used before."""
        if self.is_used:
            raise RuntimeError("prepared inputs are for one forward pass: prepare them again")
        self.is_used = True

    def __getitem__(self, name: str) -> Any:
        return self._inputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)


def gather_table(embeddings: LocalTables, name: str) -> Tensor:
    """Return a planned table on every rank: float32 [rows, dim]. Collective.

    Raises:
        KeyError: there is no such table.
    """
    table = embeddings.plan.by_name[name]
    full_table = torch.zeros(table.rows, table.dim)
    embeddings.flush()
    for fused, weight in zip(embeddings.layout.fused_tables, embeddings.weights, strict=True):
        for block, rows, first in fused.local_blocks:
            if block.table == name and (not block.replicated or embeddings.collective.world.is_chief):
                part = decode(weight[first : first + len(rows)]).cpu()
                full_table[rows.start : rows.stop : rows.step, block.columns.start : block.columns.stop] = part
    embeddings.collective.all_reduce_sum([full_table])  # each number is some rank's, and nobody else's
    return full_table


def scatter_table(embeddings: LocalTables, name: str, full_table: Tensor) -> None:
    """Copy this rank's rows of a planned table [rows, dim], rounded as they are stored. No communication.

    Raises:
        KeyError: there is no such table.
        ValueError: it has another shape.
    """
    table = embeddings.plan.by_name[name]
    if full_table.shape != (table.rows, table.dim):
        raise ValueError(f"table '{name}' is [{table.rows}, {table.dim}], not {list(full_table.shape)}")
    embeddings.invalidate()
    for fused, weight in zip(embeddings.layout.fused_tables, embeddings.weights, strict=True):
        for block, rows, first in fused.local_blocks:
            if block.table == name:
                part = full_table[rows.start : rows.stop : rows.step, block.columns.start : block.columns.stop]
                weight[first : first + len(rows)] = encode(part.detach().float().to(weight.device), fused.dtype)
