"""Lookups of a model: the requested vectors of features, the tables that they need, and the results by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from headrace import config
from headrace.config.schema import NULL_CODE, DatasetSchema, Feature, Kind
from headrace.embeddings.dynamic.spec import DynamicSpec, dynamic_features, dynamic_specs
from headrace.embeddings.jagged import JaggedTensor
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.lookup.handle import LookupHandle
from headrace.embeddings.sharding_plan import Lookup, Pooling, Table, tables_of
from headrace.errors import UserError, nearest
from headrace.models.categorical import BatchIds


@dataclass(frozen=True)
class EmbeddingLookup:
    """One lookup of a batch: a model's attribute `lookups` is a sequence of them.

    A model without that attribute has a lookup of each categorical feature, `embedding_dim` wide and pooled as in the
    spec: `Inputs.vectors`. A model with it has only the lookups that it declares: `Inputs.embedding(name)`.

        EmbeddingLookup("item", "item_id", dim=64)                              # [B, 64]
        EmbeddingLookup("history", "viewed_items", dim=64, pooling="none")      # a JaggedTensor, values [N, 64]
        EmbeddingLookup("negatives", "item_id", dim=64, ids="negatives")        # [B, n, 64]
        EmbeddingLookup("mlp_item", "item_id", dim=32, table="mlp")             # a table of its own, item_id.mlp

    Attributes:
        name: name of the result for `Inputs.embedding`.
        feature: a categorical feature of the dataset.
        dim: width D of the vectors.
        pooling: how the vectors of a list become one; `none`: they stay a sequence. Nulls are left out.
        table: name of another table over the feature's vocabulary; None: the table that all features of the vocabulary
            share. `train.embeddings.tables` and `train.sharding.tables` call it `<vocabulary>.<table>`. Lookups of one
            table have one `dim`.
        ids: `batch`: the feature's ids of each row, with the result float32 [B, D], or for a sequence a JaggedTensor of
            [N, D] that belongs to `Inputs.ids(feature)`; `negatives`: the ids that are drawn for the batch
            (`train.negatives`): [B, n, D]; `all`: every code of the vocabulary, by code: [cardinality, D], on each
            rank.
        init_bound: initial rows are uniform in [-init_bound, init_bound] and depend only on seed, table, row and
            column; None: 0.05. A normal distribution of deviation s has the variance of the bound sqrt(3) s.
    """

    name: str
    feature: str
    dim: int
    pooling: Pooling = "sum"
    table: str | None = None
    ids: Literal["batch", "negatives", "all"] = "batch"
    init_bound: float | None = None


@dataclass(frozen=True)
class ModelTables:
    """Tables and lookups of a model.

    Attributes:
        tables: tables of codes.
        lookups: lookups in these tables.
        counted: lookups whose codes are those of the rows; the others look up drawn ids or all codes.
        dynamic: tables of raw ids.
        raw_ids: for each table of raw ids, the largest number of ids of a row.
    """

    tables: tuple[Table, ...]
    lookups: tuple[Lookup, ...]
    counted: tuple[Lookup, ...]
    dynamic: tuple[DynamicSpec, ...]
    raw_ids: tuple[int, ...]


def lookups_of(network: nn.Module) -> tuple[EmbeddingLookup, ...] | None:
    """Return a network's lookups; None: each categorical feature once, `Inputs.vectors`."""
    lookups = getattr(network, "lookups", None)
    return None if lookups is None else tuple(lookups)


def model_tables(
    schema: DatasetSchema,
    model: config.Model,
    network: nn.Module,
    settings: config.EmbeddingOptimizer | None = None,
    *,
    negatives: int = 1,
    rows: int = 1,
) -> ModelTables:
    """Return the tables of a model.

    Args:
        schema: schema of the dataset.
        model: settings of the model, with its widths.
        network: the network of `model`.
        settings: `train.embeddings`, for the tables of raw ids; None: the tables are for scoring.
        negatives: number of ids that are drawn for a row, for the planner.
        rows: number of rows of a rank's batch, which share the lookups of complete tables.

    Raises:
        UserError: a lookup's feature is not in the dataset, or lookups or settings contradict each other.
    """
    specs = {s.name: s for s in dynamic_specs(schema, model.embedding_dim, settings)}
    requested = lookups_of(network)
    if requested is None:
        tables, lookups = tables_of(schema, model.embedding_dim, pooling=model.pooling)
        lengths = tuple(f.length for f in dynamic_features(schema))
        return ModelTables(tables, lookups, lookups, tuple(specs.values()), lengths)
    check_lookups(requested, schema)
    features = {f.name: f for f in schema.of(Kind.CATEGORICAL)}
    rows_of: dict[str, int] = {}
    for f in features.values():
        rows_of[_vocabulary(f)] = max(rows_of.get(_vocabulary(f), 0), f.cardinality or 0)
    planned: dict[str, Table] = {}
    dynamic: dict[str, DynamicSpec] = {}
    raw_ids: dict[str, int] = {}
    planned_lookups, counted = [], []
    for w in requested:
        f, name = features[w.feature], table_name(w, features[w.feature])
        ids = {"batch": f.length, "negatives": negatives, "all": -(-(f.cardinality or 0) // rows)}[w.ids]
        if f.dynamic:
            spec = dynamic.get(name) or replace(specs[f.name], name=name, dim=w.dim)
            dynamic[name] = replace(spec, init_bound=w.init_bound or spec.init_bound)
            raw_ids[name] = raw_ids.get(name, 0) + ids
            continue
        bound = planned[name].init_bound if name in planned else None
        planned[name] = Table(name, rows_of[_vocabulary(f)], w.dim, init_bound=w.init_bound or bound)
        planned_lookups.append(_planned(w, f, name, ids))
        if w.ids == "batch":
            counted.append(planned_lookups[-1])
    return ModelTables(
        tuple(planned.values()),
        tuple(planned_lookups),
        tuple(counted),
        tuple(dynamic.values()),
        tuple(raw_ids.values()),
    )


def check_lookups(requested: Sequence[EmbeddingLookup], schema: DatasetSchema) -> None:
    """Raise UserError where lookups do not fit the dataset, or each other."""
    features = {f.name: f for f in schema.of(Kind.CATEGORICAL)}
    tables: dict[str, EmbeddingLookup] = {}
    names: set[str] = set()
    for w in requested:
        prefix = f"the model's lookup '{w.name}'"
        if w.name in names:
            raise UserError(f"{prefix}: another one has this name")
        names.add(w.name)
        f = features.get(w.feature)
        if f is None:
            known = ", ".join(features) or "none"
            raise UserError(
                f"{prefix} asks for feature '{w.feature}', which the dataset does not have"
                f"{nearest(w.feature, list(features))}; categorical features: {known}"
            )
        if w.dim < 1:
            raise UserError(f"{prefix}: dim is {w.dim}; it is at least 1")
        if w.init_bound is not None and not w.init_bound > 0:
            raise UserError(f"{prefix}: init_bound is {w.init_bound}; it is above 0")
        if w.pooling == "none" and w.ids == "batch" and not f.is_list:
            raise UserError(
                f"{prefix} wants '{w.feature}' as a sequence (pooling none), which has one value a row: make a list of "
                f"it, or leave pooling out"
            )
        if w.ids == "all" and f.dynamic:
            raise UserError(
                f"{prefix} wants all rows of '{w.feature}', which has raw ids: their table has no end; give it codes "
                f"(categorify)"
            )
        if not f.dynamic and not f.cardinality:
            raise UserError(f"categorical feature '{f.name}' has no cardinality in the dataset's schema: categorify it")
        first = tables.setdefault(table_name(w, f), w)
        bounds = {x for x in (first.init_bound, w.init_bound) if x is not None}
        if first.dim != w.dim or len(bounds) > 1:
            raise UserError(
                f"lookups '{first.name}' and '{w.name}' of the model share table '{table_name(w, f)}', but say "
                f"dim={first.dim}, init_bound={first.init_bound} and dim={w.dim}, init_bound={w.init_bound}: give one "
                f"of them a table of its own (table=...)"
            )


def table_name(lookup: EmbeddingLookup, feature: Feature) -> str:
    """Return the name of the vocabulary or, without one, of the feature; for other tables `<vocabulary>.<table>`."""
    name = _vocabulary(feature)
    return name if lookup.table is None else f"{name}.{lookup.table}"


def _vocabulary(feature: Feature) -> str:
    return feature.vocabulary or feature.name


def _planned(w: EmbeddingLookup, f: Feature, table: str, ids: int) -> Lookup:
    if w.ids != "batch" or w.pooling == "none":  # nulls are taken out before
        return Lookup(f.name, table, max(1, ids), True, "none")
    if not f.is_list:
        return Lookup(f.name, table)
    return Lookup(f.name, table, ids, True, w.pooling, padding_idx=NULL_CODE)


class NetworkLookups:
    """Lookups by name, in the order of a plan and of tables of raw ids.

    Args:
        requested: lookups of the network.
        schema: schema of the dataset.
        tables: result of `model_tables`.
    """

    def __init__(self, requested: Sequence[EmbeddingLookup], schema: DatasetSchema, tables: ModelTables) -> None:
        self.requested = tuple(requested)
        self._features = {f.name: f for f in schema.of(Kind.CATEGORICAL)}
        self._planned = [w for w in self.requested if not self._features[w.feature].dynamic]
        #: Lookups by table of raw ids.
        self._raw = [
            [w for w in self.requested if table_name(w, self._features[w.feature]) == spec.name]
            for spec in tables.dynamic
        ]
        self._dims = [w.dim for w in self._planned if not _is_sequence(w)]

    def prepare(self, embeddings: ShardedEmbeddings, ids: BatchIds) -> LookupHandle:
        """Start the lookups of a batch. Collective; see ShardedEmbeddings.prepare."""
        batch = [self._ids(w, ids) for w in self._planned]
        raw = [[_flat(self._ids(w, ids)) for w in of_table] for of_table in self._raw]
        no_codes = torch.zeros(ids.samples, 0, dtype=torch.int64)
        return embeddings.prepare(batch or no_codes, raw=[torch.cat(of_table) for of_table in raw])

    def vectors_by_name(
        self, embeddings: ShardedEmbeddings, handle: LookupHandle, ids: BatchIds, absent: Sequence[nn.Parameter]
    ) -> dict[str, Tensor | JaggedTensor]:
        """Return the vectors of all lookups by name. Collective: the lookup ends.

        Args:
            embeddings: the tables.
            handle: result of `prepare`.
            ids: ids of the same batch.
            absent: for each table of raw ids, the vector of an id without a row, [D].
        """
        side_by_side, *sequences = embeddings.outputs(handle)
        pooled = iter(torch.split(side_by_side, self._dims, dim=1) if self._dims else ())
        rest = iter(sequences)
        results = {w.name: self._shaped(w, next(rest), ids) if _is_sequence(w) else next(pooled) for w in self._planned}
        for of_table, (vectors, has_row), missing in zip(self._raw, handle.found, absent, strict=True):
            known = torch.where(has_row.unsqueeze(1), vectors, missing)
            sizes = [_flat(self._ids(w, ids)).numel() for w in of_table]
            for w, part in zip(of_table, torch.split(known, sizes), strict=True):
                results[w.name] = self._shaped(w, part, ids)
        return {w.name: results[w.name] for w in self.requested}

    def _ids(self, w: EmbeddingLookup, ids: BatchIds) -> Tensor | JaggedTensor:
        if w.ids == "all":
            return torch.arange(self._features[w.feature].cardinality or 0, device=ids.device)
        return ids.negatives.reshape(-1) if w.ids == "negatives" else ids[w.feature]

    def _shaped(self, w: EmbeddingLookup, vectors: Tensor, ids: BatchIds) -> Tensor | JaggedTensor:
        """Return the result of a lookup from the vectors [N, D] of its ids."""
        if w.ids == "negatives":
            return vectors.view(*ids.negatives.shape, w.dim)
        ids_of_lookup = self._ids(w, ids)
        if not isinstance(ids_of_lookup, JaggedTensor):
            return vectors
        jagged = JaggedTensor(vectors, ids_of_lookup.offsets)
        return jagged if w.pooling == "none" else jagged.pooled(w.pooling)


def _is_sequence(w: EmbeddingLookup) -> bool:
    """Return whether each id has a vector of its own in the tables' output."""
    return w.ids != "batch" or w.pooling == "none"


def _flat(ids: Tensor | JaggedTensor) -> Tensor:
    return ids.values if isinstance(ids, JaggedTensor) else ids.contiguous()
