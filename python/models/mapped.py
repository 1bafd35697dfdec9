"""Mapped tables of a saved model: files on this host's disk that all processes map, one copy in the page cache.

A saved model has its rows in files of bounded size, as many ranks wrote them. The first process of a host writes them
once in the order of a lookup, in their saved type (fp32, fp16, bf16, int8). Each process has the dense weights in its
own memory. It shares the pages of the tables that it reads with all others. Tables whose rows are joined
(headrace.models.joined) are not mapped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import safetensors
from torch import Tensor

from headrace.comm.base import LocalCollective
from headrace.embeddings.checkpoint.files import WEIGHT, read_chain
from headrace.embeddings.checkpoint.mapped import mapped_matrix, open_mapped, write_mapped
from headrace.embeddings.checkpoint.shards import load_shards
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.embeddings.layout import FusedTable
from headrace.embeddings.sharding_plan import Lookup, Plan, Storage, Table, row_wise
from headrace.errors import UserError
from headrace.models.saved import DYNAMIC, EMBEDDINGS, ModelCard, check_tables, check_workflow, read_card, restore_dense
from headrace.models.sharded_model import ShardedModel
from headrace.storage import Location, StoreAway
from headrace.storage.host_scratch import create_once

#: Storage types by safetensors' names.
_STORAGES: Mapping[str, Storage] = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "U8": "int8"}
#: Largest file of the workflow whose checksum each process compares. Only the first process reads larger ones
#: (vocabularies).
_CHECKED_BYTES = 16 << 20


def load_mapped(folder: Location, maps: Location, joined: Collection[str] = ()) -> ShardedModel:
    """Open a saved model with embeddings for prediction on the CPU: `saved.load_model` with its tables mapped.

    Args:
        folder: written by `save_model`.
        maps: a folder for this model alone; the first process of the host writes the tables' files there.
        joined: tables that are not mapped; they have no rows until `joined.set_rows` sets some.

    Raises:
        UserError: a file is missing or damaged; names it.
    """
    card = read_card(folder)
    storage_by_table = storages(folder / EMBEDDINGS)
    suffix = f"-without-{hashlib.sha256(repr(sorted(joined)).encode()).hexdigest()[:16]}" if joined else ""
    tables = create_once(
        maps / f"tables{suffix}", lambda building: _write(folder, card, storage_by_table, joined, building)
    )
    model = _model(card, storage_by_table, joined, tables, write=False)
    restore_dense(model, folder, card)
    if model.dynamic is not None:
        _map_raw_ids(model.dynamic, folder / DYNAMIC, maps / f"raw_ids{suffix}", joined)
    check_workflow(folder, card, _CHECKED_BYTES)
    return model.eval()


def _map_raw_ids(dynamic: DynamicEmbeddings, saved: Location, maps: Location, joined: Collection[str]) -> None:
    mapped = {number: t.spec for number, t in enumerate(dynamic.tables) if t.spec.name not in joined}

    def write(building: Location) -> None:
        for number, spec in mapped.items():
            write_mapped(spec, number, saved, building)

    folder = create_once(maps, write)
    for number, spec in mapped.items():
        dynamic.tables[number] = open_mapped(spec, number, folder)


def _write(
    folder: Location,
    card: ModelCard,
    storage_by_table: Mapping[str, Storage],
    joined: Collection[str],
    building: Location,
) -> None:
    check_workflow(folder, card)
    model = _model(card, storage_by_table, joined, building, write=True)
    check_tables(load_shards(model.embeddings, folder / EMBEDDINGS, with_optimizer=False), folder)


def _model(
    card: ModelCard, storage_by_table: Mapping[str, Storage], joined: Collection[str], folder: Location, write: bool
) -> ShardedModel:
    def plan(tables: Sequence[Table], lookups: Sequence[Lookup], ranks: int) -> Plan:
        planned = [replace(t, storage=storage_by_table.get(t.name, "fp32"), joined=t.name in joined) for t in tables]
        return row_wise(planned, lookups, ranks)

    def matrix(fused: FusedTable) -> Tensor:
        file = folder / f"table-{fused.number}.rows"
        return mapped_matrix(file, fused.rows, fused.stored_width, fused.dtype, write=write)

    schema, local = card.dataset_schema, LocalCollective()
    return ShardedModel(schema, card.model, local, card.seed, plan, tasks=card.tasks, matrix=matrix)


def storages(folder: Location) -> dict[str, Storage]:
    """Return the storage of the saved tables, by name.

    Raises:
        UserError: the index, or a file, is missing or damaged.
    """
    storage_by_table: dict[str, Storage] = {}
    for save, chunk in ((save, c) for save, index in read_chain(folder) for c in index.chunks):
        if chunk.state != WEIGHT or chunk.table in storage_by_table:
            continue
        path = save / chunk.file
        try:
            with safetensors.safe_open(path.local_path(), "pt") as f:
                storage_by_table[chunk.table] = _STORAGES[f.get_slice(chunk.key).get_dtype()]
        except StoreAway:  # nothing is known of the file
            raise
        except (OSError, safetensors.SafetensorError, KeyError) as e:
            raise UserError(f"{path} is missing or no file of tables: {e}") from None
    return storage_by_table
