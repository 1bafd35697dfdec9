"""Tables of raw ids on disk: each rank writes its own rows, any number of ranks reads them.

    user-00000.safetensors            ids and weights of rank 0: all that scoring reads
    user-00000-training.safetensors   counts, optimizer states and who waits for a row
    user-00000.json                   what they are, their checksums and its own; written last

The folder is the caller's: it appears whole, or not at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.embeddings.addressing import owners
from headrace.embeddings.checkpoint.files import FileRecord, load_tensors, save_tensors
from headrace.embeddings.dynamic.rows import ID
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.errors import UserError
from headrace.storage import Location


def save_dynamic(embeddings: DynamicEmbeddings, folder: Location) -> None:
    """Write this rank's rows, states, counts and waiting ids of all tables. No communication."""
    folder.make_dir()
    for t in embeddings.tables:
        save_rows(t, folder)


def load_dynamic(embeddings: DynamicEmbeddings, folder: Location, with_optimizer: bool) -> None:
    """Replace the rows of all tables by this rank's share of a save of any number of ranks; see `load_rows`.

    Raises:
        UserError: a file is missing or damaged, or another dim or optimizer.
    """
    for t in embeddings.tables:
        load_rows(t, folder, with_optimizer)


def save_rows(rows: Any, folder: Location) -> None:
    """Write the rows of one table that this rank holds, HostRows or DeviceRows. No communication."""
    scoring, training = rows.dump()
    stem = _stem(rows.spec.name, rows.world.rank)
    meta = _Meta(
        dim=rows.spec.dim,
        world_size=rows.world.size,
        steps=rows.steps,
        batches=rows.batches,
        optimizer=rows.optimizer.kind if rows.optimizer else None,
        counters=tuple(int(n) for n in rows.counters),
        scoring=save_tensors(folder / f"{stem}.safetensors", scoring),
        training=save_tensors(folder / f"{stem}-training.safetensors", training),
    )
    (folder / f"{stem}.json").put_text(meta.signed().model_dump_json() + "\n")


def load_rows(rows: Any, folder: Location, with_optimizer: bool) -> None:
    """Replace this rank's rows of one table by its share of a save of any number of ranks. No communication.

    Without an optimizer (scoring) only ids and vectors are read.

    Args:
        rows: what is filled.
        folder: where `save_rows` wrote.
        with_optimizer: also the optimizer's states and its number of steps.

    Raises:
        UserError: a file is missing or damaged, or another dim or optimizer.
    """
    spec, world = rows.spec, rows.world
    first, *_ = metas = _read_metas(folder, spec)
    kind = rows.optimizer.kind if rows.optimizer else None
    if with_optimizer and first.optimizer != kind:
        raise UserError(f"{folder}: table '{spec.name}' was saved with optimizer {first.optimizer}, it has {kind}")
    scoring, training = [], []
    for meta in metas:
        tensors = load_tensors(folder, meta.scoring)
        is_local = torch.from_numpy(owners(tensors["ids"].numpy(), world.size) == world.rank)
        scoring.append({k: t[is_local] for k, t in tensors.items()})
        if rows.optimizer is None:
            continue
        tensors = load_tensors(folder, meta.training)
        waiting = tensors.pop("waiting")
        states = {k: t[is_local] for k, t in tensors.items() if with_optimizer or not k.startswith("state/")}
        is_local_waiting = torch.from_numpy(owners(waiting[:, ID].numpy().copy(), world.size) == world.rank)
        training.append({**states, "waiting": waiting[is_local_waiting]})
    rows.replace(
        *({k: torch.cat([p[k] for p in parts]) for k in (parts[0] if parts else ())} for parts in (scoring, training))
    )
    rows.batches = first.batches
    rows.steps = first.steps if with_optimizer else 0
    # Counters of saved ranks are dealt to the ranks: only their sum matters.
    rows.counters = np.zeros(4, dtype=np.int64)
    for meta in metas[world.rank :: world.size]:
        rows.counters += np.array(meta.counters, dtype=np.int64)


def saved_files(folder: Location, spec: DynamicSpec) -> list[FileRecord]:
    """Return the files of ids and rows of a saved table, by the ranks among which its ids are divided.

    Raises:
        UserError: a record is missing or damaged, or of another dim.
    """
    return [meta.scoring for meta in _read_metas(folder, spec)]


class _Meta(BaseModel):
    """Record of one rank. `sha256` is of this record with an empty checksum."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dim: int
    world_size: int
    steps: int
    batches: int
    optimizer: str | None
    #: admitted, evicted, hits, lookups.
    counters: tuple[int, int, int, int]
    scoring: FileRecord
    training: FileRecord
    sha256: str = ""

    def signed(self) -> _Meta:
        bare = self.model_copy(update={"sha256": ""})
        return bare.model_copy(update={"sha256": hashlib.sha256(bare.model_dump_json().encode()).hexdigest()})


def _read_metas(folder: Location, spec: DynamicSpec) -> list[_Meta]:
    """Read the record of each rank for a table."""
    first = _read_meta(folder, spec.name, 0)
    if first.dim != spec.dim:
        raise UserError(f"{folder}: table '{spec.name}' was saved with dim {first.dim}, it has {spec.dim}")
    return [first, *(_read_meta(folder, spec.name, r) for r in range(1, first.world_size))]


def _read_meta(folder: Location, name: str, rank: int) -> _Meta:
    path = folder / f"{_stem(name, rank)}.json"
    try:
        meta = _Meta.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the save of {folder} did not finish or was damaged") from None
    except ValidationError as e:
        raise UserError(f"{path} is damaged or of another version: {e.errors()[0]['msg']}") from None
    if meta.signed() != meta:
        raise UserError(f"{path} is damaged: its contents do not match its checksum")
    return meta


def _stem(name: str, rank: int) -> str:
    return f"{quote(name, safe='')}-{rank:05d}"


def count_ids(folder: Location, ids: Mapping[str, Collection[int]]) -> int:
    """Return the number of ids, by table, that saved tables have rows for or that wait for one.

    Raises:
        UserError: a file is missing or damaged.
    """
    return sum(_remove_from_rank(folder, meta, ids[name])[2] for _, name, meta in _saved(folder, ids))


def remove_ids(folder: Location, target: Location, ids: Mapping[str, Collection[int]]) -> int:
    """Write saved tables again without the rows of some ids; files of other tables are shared.

    Args:
        folder: where `save_dynamic` wrote.
        target: an empty folder, whose publication is the caller's.
        ids: by table.

    Returns:
        how many there were.

    Raises:
        UserError: a file is missing or damaged.
    """
    target.make_dir()
    count, written = 0, set[str]()
    for stem, name, meta in _saved(folder, ids):
        scoring, training, removed = _remove_from_rank(folder, meta, ids[name])
        files = {
            "scoring": save_tensors(target / meta.scoring.name, scoring),
            "training": save_tensors(target / meta.training.name, training),
        }
        (target / f"{stem}.json").put_text(meta.model_copy(update=files).signed().model_dump_json() + "\n")
        written |= {f"{stem}.json", meta.scoring.name, meta.training.name}
        count += removed
    for file in folder.files():
        if file.below(folder) not in written:
            (target / file.below(folder)).copy_from(file, share=True)
    return count


def _saved(folder: Location, tables: Collection[str]) -> Iterator[tuple[str, str, _Meta]]:
    """Yield (stem, table, record) of the files of some tables."""
    for file in folder.entries():
        name = unquote(file.stem[: -len("-00000")])
        if file.suffix == ".json" and name in tables:
            yield file.stem, name, _read_meta(folder, name, int(file.stem[-5:]))


def _remove_from_rank(
    folder: Location, meta: _Meta, ids: Collection[int]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """Return a rank's scoring and training tensors without some ids, and the number of removed entries."""
    removed = torch.tensor(sorted(ids), dtype=torch.int64)
    scoring, training = load_tensors(folder, meta.scoring), load_tensors(folder, meta.training)
    waiting = training.pop("waiting")
    is_retained, is_waiting_retained = ~torch.isin(scoring["ids"], removed), ~torch.isin(waiting[:, ID], removed)
    count = int((~is_retained).sum()) + int((~is_waiting_retained).sum())
    training_rest = {k: t[is_retained] for k, t in training.items()} | {"waiting": waiting[is_waiting_retained]}
    return {k: t[is_retained] for k, t in scoring.items()}, training_rest, count


def saved_tables(folder: Location) -> list[str]:
    """Return the names of the tables that a folder has rows of."""
    return sorted({unquote(f.stem[: -len("-00000")]) for f in folder.entries() if f.suffix == ".json"})
