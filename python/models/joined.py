"""Joined tables of a saved model: no process holds them, and each batch gets only the rows that it needs.

    names = frozenset({"user_id"})
    model = load_mapped(folder, maps, joined=names)
    codes = needed_codes(model, names, columns)         # by table, int64, ascending
    set_rows(model, names, read_rows(folder, model, names, codes))
    model(...)                                          # the same bits as with complete tables

`read_rows` reads the saved files. For many rows, tasks of Spark read them in one pass (headrace.score.joined_rows).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from headrace.comm import World
from headrace.compute.jagged import FeatureColumns, JaggedArray
from headrace.config.schema import NULL_CODE, Kind
from headrace.embeddings.checkpoint.dynamic import saved_files
from headrace.embeddings.checkpoint.mapped import MappedRows, SortedIds
from headrace.embeddings.checkpoint.saved_rows import SavedFile, assemble, files_of
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.layout import TableRows
from headrace.embeddings.sharding_plan import Table, row_bytes
from headrace.errors import UserError
from headrace.models.classes import make_network
from headrace.models.inputs import InputFeatures
from headrace.models.lookups import lookups_of, model_tables, table_name
from headrace.models.mapped import storages
from headrace.models.saved import DYNAMIC, EMBEDDINGS, ModelCard, read_card
from headrace.models.sharded_model import ShardedModel
from headrace.storage import Location

#: Codes by table: int64 [n], ascending, none twice.
Codes = Mapping[str, NDArray[np.int64]]


def table_bytes(folder: Location) -> dict[str, int]:
    """Return the bytes of a saved model's tables as processes map them, by name; tables of raw ids include their ids.

    Raises:
        UserError: a file is missing or damaged.
    """
    card, stored = read_card(folder), storages(folder / EMBEDDINGS)
    tables = model_tables(card.dataset_schema, card.model, _network(card))
    sizes = {t.name: t.rows * row_bytes(stored.get(t.name, "fp32"), t.dim) for t in tables.tables}
    return sizes | {s.name: sum(r.bytes for r in saved_files(folder / DYNAMIC, s)) for s in tables.dynamic}


def whole_tables(folder: Location) -> dict[str, str]:
    """Return the tables that a saved model's network reads completely in each batch, and the lookup (`ids="all"`)."""
    card = read_card(folder)
    features = {f.name: f for f in card.dataset_schema.of(Kind.CATEGORICAL)}
    return {table_name(w, features[w.feature]): w.name for w in lookups_of(_network(card)) or () if w.ids == "all"}


def joined_files(folder: Location, names: Collection[str]) -> tuple[SavedFile, ...]:
    """Return the files of a saved model that have rows of some tables.

    Raises:
        UserError: an index or a record is missing or damaged.
    """
    card = read_card(folder)
    tables = model_tables(card.dataset_schema, card.model, _network(card))
    return files_of(folder / EMBEDDINGS, folder / DYNAMIC, names, [s for s in tables.dynamic if s.name in names])


def needed_codes(model: ShardedModel, names: Collection[str], columns: FeatureColumns) -> dict[str, NDArray[np.int64]]:
    """Return the codes, or raw ids, that features of some rows look up in joined tables.

    Args:
        model: of `load_mapped`.
        names: the joined tables.
        columns: some of the features.
    """
    codes_by_table: dict[str, list[NDArray[np.int64]]] = {}
    for feature, table in _looked_up(model):
        if table not in names:
            continue
        f = next(f for f in model.schema.features if f.name == feature)
        feature_columns = [columns[name] for name in (f.name, *f.physical) if name in columns]
        values = [x.flat() if isinstance(x, JaggedArray) else np.asarray(x) for x in feature_columns]
        codes_by_table.setdefault(table, []).extend(np.unique(x).astype(np.int64) for x in values)
    return {table: np.unique(np.concatenate(parts)) for table, parts in codes_by_table.items() if parts}


def null_codes(model: ShardedModel, names: Collection[str]) -> dict[str, NDArray[np.int64]]:
    """Return code 0 of each joined table, which nulls, padding and missing sides of pairs need."""
    return {table: np.array([NULL_CODE], np.int64) for _, table in _looked_up(model) if table in names}


def united_codes(parts: Iterable[Codes]) -> dict[str, NDArray[np.int64]]:
    """Merge the codes of several parts."""
    codes_by_table: dict[str, list[NDArray[np.int64]]] = {}
    for part in parts:
        for table, codes in part.items():
            codes_by_table.setdefault(table, []).append(codes)
    return {table: np.unique(np.concatenate(parts_of_table)) for table, parts_of_table in codes_by_table.items()}


def read_rows(folder: Location, model: ShardedModel, names: Collection[str], codes: Codes) -> dict[str, TableRows]:
    """Read a few rows of joined tables from the saved files, without comparing checksums.

    Raises:
        UserError: a file is missing or damaged.
    """
    files = joined_files(folder, names)
    return {
        table.name: assemble(
            table,
            (
                rows
                for f in files
                for rows in f.read(table.name, codes[table.name][f.may_have(table.name, codes[table.name])])
            ),
        )
        for table in joined_tables(model, names)
        if table.name in codes
    }


def joined_tables(model: ShardedModel, names: Collection[str]) -> list[Table | DynamicSpec]:
    """Return the joined tables as they are looked up."""
    raw = [] if model.dynamic is None else [t.spec for t in model.dynamic.tables]
    return [t for t in (*model.embeddings.plan.tables, *raw) if t.name in names]


def set_rows(model: ShardedModel, names: Collection[str], rows: Mapping[str, TableRows]) -> None:
    """Replace the rows of the joined tables: the next batches can look up only these.

    A raw id that is not among them has no row.
    """
    model.embeddings.set_joined(
        {name: table_rows for name, table_rows in rows.items() if name in model.embeddings.plan.by_name}
    )
    if model.dynamic is None:
        return
    for number, table in enumerate(model.dynamic.tables):
        spec = table.spec
        if spec.name in names:
            joined_rows = rows.get(spec.name) or TableRows(torch.empty(0, dtype=torch.int64), torch.empty(0, spec.dim))
            ids = SortedIds(joined_rows.codes.numpy(), [joined_rows.codes.numel()])
            model.dynamic.tables[number] = MappedRows(spec, World(0, 1), ids, joined_rows.rows)


def check_joined(lookups_of_whole_tables: Mapping[str, str], names: Collection[str], folder: Location) -> None:
    """Raise UserError where a joined table is one that the network reads completely (`whole_tables`)."""
    for table, lookup in lookups_of_whole_tables.items():
        if table in names:
            raise UserError(
                f"the rows of table '{table}' cannot be joined in: the model {folder} looks at all of them in each "
                f"batch (its lookup '{lookup}', ids 'all'). Map it (score.embeddings.rows: mapped) on hosts whose disk "
                f"has room for it"
            )


def _network(card: ModelCard) -> nn.Module:
    return make_network(
        card.model, InputFeatures.from_schema(card.dataset_schema, card.model.embedding_dim, card.tasks), card.seed
    )


def _looked_up(model: ShardedModel) -> list[tuple[str, str]]:
    """Return (feature, table) of all lookups."""
    lookups = lookups_of(model.network)
    features = {f.name: f for f in model.schema.of(Kind.CATEGORICAL)}
    if lookups is not None:
        return [(w.feature, table_name(w, features[w.feature])) for w in lookups]
    planned = [(x.feature, x.table) for x in model.embeddings.plan.lookups]
    return [*planned, *((f.name, f.name) for f in features.values() if f.dynamic)]
