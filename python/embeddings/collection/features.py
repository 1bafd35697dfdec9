"""Named features of an embedding collection, and the tables and lookups that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.config import DynamicTable, EmbeddingOptimizer
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.sharding.plan import Lookup, Pooling, Table
from headrace.errors import UserError


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


def check(features: Sequence[EmbeddingFeature]) -> None:
    """Raise UserError where names or shapes of features do not fit each other."""
    if not features:
        raise UserError("an EmbeddingCollection needs one feature at least")
    names = [f.name for f in features]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise UserError(f"two features of one name: {', '.join(twice)}")
    first: dict[str, EmbeddingFeature] = {}
    for f in features:
        if f.dim < 1 or f.ids < 1 or (f.rows is not None and f.rows < 1):
            raise UserError(f"feature '{f.name}': dim={f.dim}, rows={f.rows}, ids={f.ids}: each is at least 1")
        if f.padding_idx is not None and f.rows is not None and not 0 <= f.padding_idx < f.rows:
            raise UserError(f"feature '{f.name}': padding_idx={f.padding_idx} is no row of {f.rows}")
        if f.weighted and f.pooling != "sum":
            raise UserError(f"feature '{f.name}': weights are for pooling='sum', not for '{f.pooling}'")
        other = first.setdefault(f.table_name, f)
        if (other.rows, other.dim) != (f.rows, f.dim):
            raise UserError(
                f"features '{other.name}' and '{f.name}' share table '{f.table_name}', but say rows={other.rows}, "
                f"dim={other.dim} and rows={f.rows}, dim={f.dim}"
            )


def planned(features: Sequence[EmbeddingFeature]) -> tuple[tuple[Table, ...], tuple[Lookup, ...]]:
    """The tables with a number of rows, and who looks them up, in the features' order."""
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
    """The tables of raw ids, with the settings of `optimizer.dynamic` by table.

    Raises:
        UserError: settings of a table that has no raw ids.
    """
    dims = {f.table_name: f.dim for f in features if f.rows is None}
    settings = {} if optimizer is None else optimizer.dynamic
    for name in settings:
        if name not in dims:
            known = ", ".join(dims) or "none"
            raise UserError(f"optimizer.dynamic: '{name}' is no table of raw ids (those are: {known})")
    return tuple(DynamicSpec(n, d, **settings.get(n, DynamicTable()).model_dump()) for n, d in dims.items())
