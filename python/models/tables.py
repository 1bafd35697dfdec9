"""The embedding tables of a model: those that its network asks for, or one lookup of each categorical feature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from headrace import config
from headrace.embeddings.dynamic.spec import DynamicSpec, dynamic_features, dynamic_specs
from headrace.embeddings.sharding.plan import Lookup, Table, tables_of
from headrace.errors import UserError, nearest
from headrace.models.lookups import EmbeddingLookup
from headrace.schema import NULL_CODE, DatasetSchema, Feature, Kind


@dataclass(frozen=True)
class ModelTables:
    """What is looked up in which tables.

    Attributes:
        tables: of codes.
        lookups: of these tables.
        counted: those of `lookups` whose codes are a row's own; the others are drawn, or are all that there are.
        dynamic: tables of raw ids.
        raw_ids: by table of raw ids, the most ids of a row.
    """

    tables: tuple[Table, ...]
    lookups: tuple[Lookup, ...]
    counted: tuple[Lookup, ...]
    dynamic: tuple[DynamicSpec, ...]
    raw_ids: tuple[int, ...]


def lookups_of(network: nn.Module) -> tuple[EmbeddingLookup, ...] | None:
    """What a network looks up; None: each categorical feature once, `Inputs.vectors`."""
    found = getattr(network, "lookups", None)
    return None if found is None else tuple(found)


def model_tables(
    schema: DatasetSchema,
    model: config.Model,
    network: nn.Module,
    settings: config.EmbeddingOptimizer | None = None,
    *,
    negatives: int = 1,
    rows: int = 1,
) -> ModelTables:
    """The tables of a model.

    Args:
        schema: the dataset's.
        model: its widths.
        network: made of `model`.
        settings: `train.embeddings`, for the tables of raw ids; None: to score.
        negatives: ids that are drawn for a row, which the planner reckons with.
        rows: of a rank's batch, which share what is looked up whole.

    Raises:
        UserError: a lookup of what the dataset does not have, or lookups or settings that do not fit each other.
    """
    specs = {s.name: s for s in dynamic_specs(schema, model.embedding_dim, settings)}
    wanted = lookups_of(network)
    if wanted is None:
        tables, lookups = tables_of(schema, model.embedding_dim, pooling=model.pooling)
        lengths = tuple(f.length for f in dynamic_features(schema))
        return ModelTables(tables, lookups, lookups, tuple(specs.values()), lengths)
    check_lookups(wanted, schema)
    features = {f.name: f for f in schema.of(Kind.CATEGORICAL)}
    rows_of: dict[str, int] = {}
    for f in features.values():
        rows_of[_vocabulary(f)] = max(rows_of.get(_vocabulary(f), 0), f.cardinality or 0)
    planned: dict[str, Table] = {}
    dynamic: dict[str, DynamicSpec] = {}
    raw_ids: dict[str, int] = {}
    found, counted = [], []
    for w in wanted:
        f, name = features[w.feature], table_name(w, features[w.feature])
        ids = {"batch": f.length, "negatives": negatives, "all": -(-(f.cardinality or 0) // rows)}[w.ids]
        if f.dynamic:
            spec = dynamic.get(name) or replace(specs[f.name], name=name, dim=w.dim)
            dynamic[name] = replace(spec, init_bound=w.init_bound or spec.init_bound)
            raw_ids[name] = raw_ids.get(name, 0) + ids
            continue
        bound = planned[name].init_bound if name in planned else None
        planned[name] = Table(name, rows_of[_vocabulary(f)], w.dim, init_bound=w.init_bound or bound)
        found.append(_planned(w, f, name, ids))
        if w.ids == "batch":
            counted.append(found[-1])
    return ModelTables(
        tuple(planned.values()), tuple(found), tuple(counted), tuple(dynamic.values()), tuple(raw_ids.values())
    )


def check_lookups(wanted: Sequence[EmbeddingLookup], schema: DatasetSchema) -> None:
    """Raise UserError where lookups do not fit the dataset, or each other."""
    features = {f.name: f for f in schema.of(Kind.CATEGORICAL)}
    tables: dict[str, EmbeddingLookup] = {}
    names: set[str] = set()
    for w in wanted:
        what = f"the model's lookup '{w.name}'"
        if w.name in names:
            raise UserError(f"{what}: another one has this name")
        names.add(w.name)
        f = features.get(w.feature)
        if f is None:
            known = ", ".join(features) or "none"
            raise UserError(
                f"{what} asks for feature '{w.feature}', which the dataset does not have"
                f"{nearest(w.feature, list(features))}; categorical features: {known}"
            )
        if w.dim < 1:
            raise UserError(f"{what}: dim is {w.dim}; it is at least 1")
        if w.init_bound is not None and not w.init_bound > 0:
            raise UserError(f"{what}: init_bound is {w.init_bound}; it is above 0")
        if w.pooling == "none" and w.ids == "batch" and not f.is_list:
            raise UserError(
                f"{what} wants '{w.feature}' as a sequence (pooling none), which has one value a row: make a list of "
                f"it, or leave pooling out"
            )
        if w.ids == "all" and f.dynamic:
            raise UserError(
                f"{what} wants all rows of '{w.feature}', which has raw ids: their table has no end; give it codes "
                f"(categorify)"
            )
        if not f.dynamic and not f.cardinality:
            raise UserError(f"categorical feature '{f.name}' has no cardinality in the dataset's schema: categorify it")
        other = tables.setdefault(table_name(w, f), w)
        bounds = {x for x in (other.init_bound, w.init_bound) if x is not None}
        if other.dim != w.dim or len(bounds) > 1:
            raise UserError(
                f"lookups '{other.name}' and '{w.name}' of the model share table '{table_name(w, f)}', but say "
                f"dim={other.dim}, init_bound={other.init_bound} and dim={w.dim}, init_bound={w.init_bound}: give one "
                f"of them a table of its own (table=...)"
            )


def table_name(lookup: EmbeddingLookup, feature: Feature) -> str:
    """A vocabulary's name, else the feature's; of further tables over it `<vocabulary>.<table>`."""
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
