"""Settings of tables of raw ids: plain values, so that a spec can be checked where no torch is loaded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from headrace.config.embeddings import DynamicTable, EmbeddingOptimizer
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.errors import UserError, nearest


@dataclass(frozen=True)
class DynamicSpec:
    """Settings of a table of raw ids, which has no vocabulary."""

    name: str
    dim: int
    #: Number of times that an id is seen in training before it gets a row.
    admit_after: int = 1
    #: Chance that an id gets a row each time it is seen, once `admit_after` is reached; 1: at once.
    admit_chance: float = 1.0
    #: Rows over all ranks; each rank has its even share. None: no limit.
    max_rows: int | None = None
    #: MiB of each rank for rows, optimizer states, counts and the hash table. None: no limit.
    memory_mib: float | None = None
    #: Eviction rule: lfu, rows seen least often (of equals the longest ago); lru the other way.
    evict: Literal["lfu", "lru"] = "lfu"
    #: Share of a rank's rows that are evicted at once: each eviction costs one pass over the rows.
    evict_share: float = 0.1
    #: Ids that wait for admission over all ranks; beyond it those seen longest ago are forgotten.
    max_waiting: int = 1_000_000
    #: Rows start uniform in +- this; None: as those of the layer's other tables.
    init_bound: float | None = None


def dynamic_features(schema: DatasetSchema) -> tuple[Feature, ...]:
    """Return the features of raw ids, in order."""
    return tuple(f for f in schema.of(Kind.CATEGORICAL) if f.dynamic)


def dynamic_specs(
    schema: DatasetSchema, dim: int, settings: EmbeddingOptimizer | None = None
) -> tuple[DynamicSpec, ...]:
    """Return a table for each feature of raw ids, named after it, in schema order.

    Args:
        schema: the dataset's.
        dim: width of the vectors.
        settings: `train.embeddings`; None: to score, where nothing is admitted or evicted.

    Raises:
        UserError: settings of a feature that has no raw ids.
    """
    features = dynamic_features(schema)
    if settings is None:
        return tuple(DynamicSpec(f.name, dim) for f in features)
    names = [f.name for f in features]
    check_known("train.embeddings.dynamic", settings.dynamic, names)
    tables = ((n, settings.dynamic.get(n, DynamicTable())) for n in names)
    return tuple(DynamicSpec(n, dim, **settings_of_table.model_dump()) for n, settings_of_table in tables)


def check_known(key: str, names: Collection[str], known: Collection[str]) -> None:
    """Raise UserError for a name of `names` that is none of the features of raw ids in `known`."""
    for name in names:
        if name not in known:
            raise UserError(
                f"{key}: '{name}' is not a feature of raw ids{nearest(name, list(known))} (there are: "
                f"{', '.join(known) or 'none'}); the operator raw_id makes them"
            )
