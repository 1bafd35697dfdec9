"""Incremental dumps: only the rows that changed since the last dump, on top of a whole save.

    embeddings.track_changes()
    ...steps...
    save_changes(embeddings, folder / "delta-0001")      # each rank; then a barrier
    apply_changes(embeddings, folder / "delta-0001")     # on any world, by any plan; oldest first

A model that is served elsewhere follows a training run this way at the cost of the rows that were touched; of tables
of raw ids also those that came, and the ids of those that went. Weights alone: who trains on needs a whole save.
"""

from __future__ import annotations

import hashlib

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from headrace.embeddings.checkpoint.tensors import FileRecord, load_tensors, save_tensors
from headrace.embeddings.input.raw_ids import owners
from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.storage.dtypes import convert, decode, numbers_of
from headrace.errors import UserError
from headrace.storage import Location


class _Record(BaseModel):
    """What one rank wrote: for each block `<table>/<first column>`, its rows and their numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    world_size: int
    #: Steps that all changes since the last dump were made in: (first, last].
    steps: tuple[int, int]
    tables: dict[str, tuple[int, int]]
    #: Width by table of raw ids: `raw/<table>/ids`, their `weight`, and the ids that are `gone`.
    raw: dict[str, int] = {}
    file: FileRecord
    sha256: str = ""

    def signed(self) -> _Record:
        bare = self.model_copy(update={"sha256": ""})
        return bare.model_copy(update={"sha256": hashlib.sha256(bare.model_dump_json().encode()).hexdigest()})


def save_changes(embeddings: LocalTables, folder: Location) -> int:
    """Write this rank's rows that changed since the last call, and begin anew. How many. Speaks to no other rank.

    Replicated tables are written by the first rank alone.

    Raises:
        RuntimeError: changes are not tracked, or gradients wait for `step`.
    """
    raw = [] if embeddings.dynamic is None else embeddings.dynamic.tables
    if embeddings.has_pending or any(t.has_pending for t in raw):
        raise RuntimeError("gradients wait for step(): a save between backward and step would lose them")
    embeddings.flush()
    changes, since = embeddings.take_changes()
    rank = embeddings.collective.world.rank
    tensors: dict[str, Tensor] = {}
    count = 0
    for fused, changed in zip(embeddings.layout.fused_tables, changes, strict=True):
        for block, rows, first in fused.local_blocks:
            if block.replicated and rank != 0:
                continue
            here = changed[first : first + len(rows)].nonzero().flatten()
            key = f"{block.table}/{block.columns.start}"
            tensors[f"{key}/rows"] = rows.start + here * rows.step
            tensors[f"{key}/values"] = embeddings.weights[fused.number].index_select(0, first + here)
            count += here.numel()
    for t in raw:
        found = t.take_changes()
        tensors |= {f"raw/{t.spec.name}/{part}": x for part, x in found.items()}
        count += len(found["ids"])
    record = _Record(
        world_size=embeddings.collective.world.size,
        steps=(since, embeddings.steps),
        tables={t.name: (t.rows, t.dim) for t in embeddings.plan.tables},
        raw={t.spec.name: t.spec.dim for t in raw},
        file=save_tensors(folder / f"changes-{rank:05d}.safetensors", tensors),
    )
    (folder / f"changes-{rank:05d}.json").put_text(record.signed().model_dump_json() + "\n")
    return count


def apply_changes(embeddings: LocalTables, folder: Location) -> int:
    """Put the changed rows of a dump into this rank's blocks. How many numbers. Speaks to no other rank.

    Raises:
        UserError: a file is missing or damaged, or a table is another.
    """
    first = _read(folder, 0)
    records = [first, *(_read(folder, r) for r in range(1, first.world_size))]
    embeddings.invalidate()
    plan = embeddings.plan
    for name, (rows, dim) in first.tables.items():
        table = plan.by_name.get(name)
        if table is None or table.dim != dim or table.rows < rows:
            found = "not there" if table is None else f"{table.rows} x {table.dim}"
            raise UserError(f"{folder}: table '{name}' was dumped as {rows} x {dim}, in the model it is {found}")
    raw = {} if embeddings.dynamic is None else {t.spec.name: t for t in embeddings.dynamic.tables}
    if first.raw != {name: t.spec.dim for name, t in raw.items()}:
        raise UserError(f"{folder}: the tables of raw ids were dumped with dims {first.raw}, the model's are others")
    written = 0
    for record in records:
        tensors = load_tensors(folder, record.file)
        for key in (k.removesuffix("/rows") for k in tensors if k.endswith("/rows")):
            name, _, start = key.rpartition("/")
            written += _put(embeddings, name, int(start), tensors[f"{key}/rows"], tensors[f"{key}/values"])
        for name, t in raw.items():
            ids, gone = tensors[f"raw/{name}/ids"], tensors[f"raw/{name}/gone"]
            mine, leave = (torch.from_numpy(owners(x.numpy(), t.world.size) == t.world.rank) for x in (ids, gone))
            weight = tensors[f"raw/{name}/weight"][mine]
            t.put_changes({"ids": ids[mine], "gone": gone[leave], "weight": weight})
            written += weight.numel()
    return written


def _put(embeddings: LocalTables, table: str, column: int, rows: Tensor, values: Tensor) -> int:
    written = 0
    for fused in embeddings.layout.fused_tables:
        for block, held, first in fused.local_blocks:
            low, high = max(block.columns.start, column), min(block.columns.stop, column + numbers_of(values))
            if block.table != table or low >= high:
                continue
            mine = rows % held.step == held.start % held.step
            positions = first + torch.div(rows[mine] - held.start, held.step, rounding_mode="trunc")
            target = embeddings.weights[fused.number]
            if target.dtype is torch.uint8:
                if numbers_of(values) != fused.width:
                    raise UserError(f"table '{table}' was dumped by columns; int8 stores whole rows: dump it by rows")
                target.index_copy_(
                    0, positions.to(target.device), convert(values[mine], target.dtype).to(target.device)
                )
                written += positions.numel() * fused.width
                continue
            part = decode(values[mine])[:, low - column : high - column]
            target[positions.to(target.device), low - block.columns.start : high - block.columns.start] = part.to(
                target
            )
            written += part.numel()
    return written


def _read(folder: Location, rank: int) -> _Record:
    path = folder / f"changes-{rank:05d}.json"
    try:
        record = _Record.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the dump of {folder} did not finish or was damaged") from None
    except ValidationError as e:
        raise UserError(f"{path} is damaged or of another version: {e.errors()[0]['msg']}") from None
    if record.signed() != record:
        raise UserError(f"{path} is damaged: its contents do not match its checksum")
    return record
