"""Changed rows on disk: a save on top of another save, and dumps that follow a training run.

A save of the rows that a day changed lies on top of an earlier save:

    base = changes_base(earlier, folder, aged=0.5)
    save_changed_rows(embeddings, folder, earlier, base, with_optimizer=True)   # each rank; then as after `save_shards`

Rows are compared by their bits with those that `load_shards` would read from the base, so that both together equal a
complete save, on any number of ranks. Meanwhile a rank holds the base's values of its rows beside its own.

Dumps are incremental, on top of a complete save:

    embeddings.track_changes()
    ...steps...
    save_changes(embeddings, folder / "delta-0001")      # each rank; then a barrier
    apply_changes(embeddings, folder / "delta-0001")     # on any world, by any plan; oldest first

A model that is served elsewhere follows a training run this way at the cost of the touched rows; of tables of raw ids
also new ids and removed ones. Dumps have weights alone: to go on training takes a complete save.
"""

from __future__ import annotations

import hashlib

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from headrace.embeddings.addressing import owners
from headrace.embeddings.checkpoint.files import (
    Base,
    FileChunk,
    FileRecord,
    OptimizerRecord,
    RankRecord,
    TableRecord,
    load_tensors,
    rank_file,
    read_chain,
    read_index,
    save_tensors,
)
from headrace.embeddings.checkpoint.shards import FILE_BYTES, LocalBlock, local_blocks, matrices_of, read_into
from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.storage import convert, decode, numbers_of
from headrace.embeddings.update_rules import RULES
from headrace.errors import UserError
from headrace.storage import Location


def changes_base(base: Location, folder: Location, aged: float) -> Base:
    """Return the record by which a save in `folder` names the save `base`, both in one store.

    Args:
        base: the folder of the save to lie upon.
        folder: where the changes will be in the end.
        aged: what the states that never shrink were multiplied by before anything changed (`age_state`).

    Raises:
        UserError: the base is missing or damaged.
    """
    index = read_index(base)
    return Base(
        path=base.seen_from(folder), sha256=index.sha256, aged=aged, depth=1 + (index.base.depth if index.base else 0)
    )


def save_changed_rows(
    embeddings: LocalTables, directory: Location, base_folder: Location, base: Base, with_optimizer: bool
) -> None:
    """Write, as `save_shards` does, the rows that differ from those of `base_folder` and those that it lacks.

    Args:
        embeddings: the tables.
        directory: shared by all ranks, empty at first.
        base_folder: the folder of the save to lie upon.
        base: how that is named; see `changes_base`.
        with_optimizer: as of `save_shards`; the base has states of the same optimizer then.

    Raises:
        RuntimeError: gradients wait for `step`.
        UserError: the base is missing or damaged.
    """
    if embeddings.has_pending:
        raise RuntimeError("gradients wait for step(): a save between backward and step would lose them")
    embeddings.flush()
    world, plan, optimizer = embeddings.collective.world, embeddings.plan, None
    if with_optimizer:
        assert embeddings.optimizer is not None
        rule = RULES[embeddings.optimizer.kind]
        optimizer = OptimizerRecord(kind=embeddings.optimizer.kind, steps=embeddings.steps, states=rule.state)
    chain = read_chain(base_folder)
    saved_rows = {t.name: t.rows for t in chain[-1][1].tables}
    files: list[FileRecord] = []
    chunks: list[FileChunk] = []
    for state, sources in matrices_of(embeddings, with_optimizer).items():
        base_values = [torch.empty_like(m) for m in sources]
        read_into(embeddings, {state: base_values}, chain)
        if optimizer is not None and state in RULES[optimizer.kind].growing:
            for full in base_values:
                full.mul_(base.aged)
        for block in _saved_here(embeddings, state):
            changed = _changed(block, sources[block.fused], base_values[block.fused], saved_rows.get(block.table, 0))
            if block.replicated:  # all ranks have it: each saves a part
                changed = changed[changed % world.size == world.rank]
            source = sources[block.fused]
            each = max(1, FILE_BYTES // max(1, source.shape[1] * source.element_size()))
            for start in range(0, len(changed), each):
                part = changed[start : start + each]
                name = f"{state}-{world.rank:05d}-{len(files):05d}.safetensors"
                rows = block.rows.start + part * block.rows.step
                places = (block.first + part).to(source.device)
                tensors = {"rows": rows, "values": source.index_select(0, places).cpu()}
                files.append(save_tensors(directory / name, tensors))
                chunks.append(
                    FileChunk(
                        table=block.table,
                        state=state,
                        start=0,
                        stop=plan.by_name[block.table].rows,
                        stride=1,
                        file=name,
                        key="values",
                        columns=block.columns,
                        rows_key="rows",
                    )
                )
    record = RankRecord(
        rank=world.rank,
        world_size=world.size,
        optimizer=optimizer,
        files=tuple(files),
        chunks=tuple(chunks),
        tables=tuple(TableRecord(name=t.name, rows=t.rows, dim=t.dim) for t in plan.tables),
        base=base,
    )
    rank_file(directory, world.rank).put_text(record.model_dump_json(indent=1) + "\n")


def _saved_here(embeddings: LocalTables, state: str) -> list[LocalBlock]:
    """Return the blocks whose rows this rank saves; of a state by row of a table cut by columns only the first."""
    blocks: list[LocalBlock] = []
    saved: set[tuple[str, int]] = set()
    for block in local_blocks(embeddings, state):
        table_blocks = embeddings.plan.blocks_of(block.table)
        if not block.replicated and block.columns is None and len(table_blocks) > 1:
            first = table_blocks[0].first_rank == embeddings.collective.world.rank
            if not first or (block.table, block.rows.start) in saved:
                continue
            saved.add((block.table, block.rows.start))
        blocks.append(block)
    return blocks


def _changed(block: LocalBlock, new: Tensor, old: Tensor, known: int) -> Tensor:
    """Return the rows of a block that differ or that the base lacks: positions in the block, int64."""
    block_rows = slice(block.first, block.first + len(block.rows))
    differs = (new[block_rows].view(torch.uint8) != old[block_rows].view(torch.uint8)).any(dim=1)
    rows = torch.arange(block.rows.start, block.rows.stop, block.rows.step, device=differs.device)
    return (differs | (rows >= known)).nonzero().flatten().cpu()


class _Record(BaseModel):
    """Record of one rank: for each block `<table>/<first column>`, its rows and their values."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    world_size: int
    #: Steps in which the changes were made: (first, last].
    steps: tuple[int, int]
    tables: dict[str, tuple[int, int]]
    #: Width by table of raw ids. Its tensors are `raw/<table>/ids`, their `weight`, and the removed ids as `gone`.
    raw: dict[str, int] = {}
    file: FileRecord
    sha256: str = ""

    def signed(self) -> _Record:
        bare = self.model_copy(update={"sha256": ""})
        return bare.model_copy(update={"sha256": hashlib.sha256(bare.model_dump_json().encode()).hexdigest()})


def save_changes(embeddings: LocalTables, folder: Location) -> int:
    """Write this rank's rows that changed since the last call, and start anew; return their number. No communication.

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
            changed_rows = changed[first : first + len(rows)].nonzero().flatten()
            key = f"{block.table}/{block.columns.start}"
            tensors[f"{key}/rows"] = rows.start + changed_rows * rows.step
            tensors[f"{key}/values"] = embeddings.weights[fused.number].index_select(0, first + changed_rows)
            count += changed_rows.numel()
    for t in raw:
        changed_ids = t.take_changes()
        tensors |= {f"raw/{t.spec.name}/{part}": x for part, x in changed_ids.items()}
        count += len(changed_ids["ids"])
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
    """Write the changed rows of a dump into this rank's blocks; return the number of values. No communication.

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
            actual = "not there" if table is None else f"{table.rows} x {table.dim}"
            raise UserError(f"{folder}: table '{name}' was dumped as {rows} x {dim}, in the model it is {actual}")
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
            ids, removed = tensors[f"raw/{name}/ids"], tensors[f"raw/{name}/gone"]
            is_local, is_local_removed = (
                torch.from_numpy(owners(x.numpy(), t.world.size) == t.world.rank) for x in (ids, removed)
            )
            weight = tensors[f"raw/{name}/weight"][is_local]
            t.put_changes({"ids": ids[is_local], "gone": removed[is_local_removed], "weight": weight})
            written += weight.numel()
    return written


def _put(embeddings: LocalTables, table: str, column: int, rows: Tensor, values: Tensor) -> int:
    written = 0
    for fused in embeddings.layout.fused_tables:
        for block, held, first in fused.local_blocks:
            low, high = max(block.columns.start, column), min(block.columns.stop, column + numbers_of(values))
            if block.table != table or low >= high:
                continue
            is_local = rows % held.step == held.start % held.step
            positions = first + torch.div(rows[is_local] - held.start, held.step, rounding_mode="trunc")
            target = embeddings.weights[fused.number]
            if target.dtype is torch.uint8:
                if numbers_of(values) != fused.width:
                    raise UserError(f"table '{table}' was dumped by columns; int8 stores whole rows: dump it by rows")
                target.index_copy_(
                    0, positions.to(target.device), convert(values[is_local], target.dtype).to(target.device)
                )
                written += positions.numel() * fused.width
                continue
            part = decode(values[is_local])[:, low - column : high - column]
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
