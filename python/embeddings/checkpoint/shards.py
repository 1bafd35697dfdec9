"""Embedding shards on disk. A saved table knows nothing of the world that saved it.

Each rank writes its rows as chunks: (table, rows from start to stop by a stride, columns from one to another) and the
numbers themselves, in safetensors files of bounded size, weights and each optimizer state in files of their own, so
that scoring never reads a state. Its record `rank-NNNNN.json` lists them with checksums. When all ranks have written (a
barrier), the chief folds the records into `index.json` (`write_index`); only a folder with an index can be read, by any
number of ranks and by any plan.

    with shared_directory(final, collective) as folder:
        save_shards(embeddings, folder, with_optimizer=True)
        collective.barrier()
        if collective.world.is_chief:
            write_index(folder)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.embeddings.checkpoint.files import (
    INDEX,
    WEIGHT,
    CheckpointIndex,
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
from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.sharding_plan import Plan
from headrace.embeddings.storage import convert, decode
from headrace.embeddings.update_rules import RULES
from headrace.errors import UserError
from headrace.storage import Location

log = logging.getLogger("headrace.embeddings")

#: Largest size of a file in bytes (one row at least): the memory that one file takes at once.
FILE_BYTES = 128 * 2**20


@dataclass
class Loaded:
    """Result of `load_shards`, for the whole model."""

    #: Rows read by table.
    tables: dict[str, int] = field(default_factory=dict)
    #: Rows that the save lacks and that keep their initial values, by table; all rows of a new table.
    new_rows: dict[str, int] = field(default_factory=dict)
    #: Saved tables that this model lacks.
    unused: tuple[str, ...] = ()


def save_shards(embeddings: LocalTables, directory: Location, with_optimizer: bool) -> None:
    """Write this rank's rows, its optimizer states, and the record of both. No communication.

    Args:
        embeddings: the tables.
        directory: shared by all ranks, empty at first; made if it is not there.
        with_optimizer: also the states, so that `load_shards` goes on exactly; twice the size with adagrad.

    Raises:
        RuntimeError: states are wanted but there is no optimizer, or gradients wait for `step`.
    """
    if embeddings.has_pending:
        raise RuntimeError("gradients wait for step(): a save between backward and step would lose them")
    plan, world = embeddings.plan, embeddings.collective.world
    optimizer = None
    if with_optimizer:
        if embeddings.optimizer is None:
            raise RuntimeError("there is no optimizer whose states could be saved")
        optimizer = OptimizerRecord(
            kind=embeddings.optimizer.kind, steps=embeddings.steps, states=RULES[embeddings.optimizer.kind].state
        )
    embeddings.flush()
    files: list[FileRecord] = []
    chunks: list[FileChunk] = []
    for state, sources in matrices_of(embeddings, with_optimizer).items():
        for number, pieces in enumerate(_files_of(embeddings, state, sources)):
            name = f"{state}-{world.rank:05d}-{number:05d}.safetensors"
            tensors = {}
            for piece, rows, source in pieces:
                key = f"{piece.table}/{rows.start}:{rows.stop}:{rows.step}"
                key += "" if piece.columns is None else "/{}:{}".format(*piece.columns)
                tensors[key] = source
                chunks.append(
                    FileChunk(
                        table=piece.table,
                        state=state,
                        start=rows.start,
                        stop=rows.stop,
                        stride=rows.step,
                        file=name,
                        key=key,
                        columns=piece.columns,
                    )
                )
            files.append(save_tensors(directory / name, tensors))
    record = RankRecord(
        rank=world.rank,
        world_size=world.size,
        optimizer=optimizer,
        files=tuple(files),
        chunks=tuple(chunks),
        tables=tuple(TableRecord(name=t.name, rows=t.rows, dim=t.dim) for t in plan.tables),
    )
    rank_file(directory, world.rank).put_text(record.model_dump_json(indent=1) + "\n")


def matrices_of(embeddings: LocalTables, with_optimizer: bool) -> dict[str, list[Tensor]]:
    """Return the weight and the optimizer states by name: this rank's matrix of each fused table."""
    matrices = {WEIGHT: list(embeddings.weights)}
    if with_optimizer and embeddings.optimizer is not None:
        for name in RULES[embeddings.optimizer.kind].state:
            matrices[name] = [states[name] for states in embeddings.states]
    return matrices


@dataclass(frozen=True)
class LocalBlock:
    """Part of a block that a rank holds, in its fused table's matrix: rows `rows`, from matrix row `first` on."""

    table: str
    rows: range
    fused: int
    first: int
    #: First and last column of the table, where these are not all.
    columns: tuple[int, int] | None
    width: int
    replicated: bool


def local_blocks(embeddings: LocalTables, state: str) -> Iterator[LocalBlock]:
    """Yield the blocks of a weight or state that this rank holds."""
    plan = embeddings.plan
    by_row = state != WEIGHT and embeddings.optimizer is not None and RULES[embeddings.optimizer.kind].by_row
    for fused in embeddings.layout.fused_tables:
        for block, rows, first in fused.local_blocks:
            has_all_columns = by_row or len(block.columns) == plan.by_name[block.table].dim
            yield LocalBlock(
                block.table,
                rows,
                fused.number,
                first,
                None if has_all_columns else (block.columns.start, block.columns.stop),
                1 if by_row else fused.width,
                block.replicated,
            )


def _files_of(
    embeddings: LocalTables, state: str, sources: list[Tensor]
) -> Iterator[list[tuple[LocalBlock, range, Tensor]]]:
    """Cut the rows that a rank saves of a weight or state into files: lists of (block, table rows, their values)."""
    world = embeddings.collective.world
    pieces: list[tuple[LocalBlock, range, Tensor]] = []
    saved: set[tuple[str, int]] = set()
    room = FILE_BYTES
    for held in local_blocks(embeddings, state):
        source = sources[held.fused][held.first : held.first + len(held.rows)]
        rows = held.rows
        if held.replicated:  # all ranks have it: each saves a part
            rows, source = rows[world.rank :: world.size], source[world.rank :: world.size]
        elif held.columns is None and len(embeddings.plan.blocks_of(held.table)) > 1:
            # A state by row of a table cut by columns: every block has it, the first saves it.
            if embeddings.plan.blocks_of(held.table)[0].first_rank != world.rank or (held.table, rows.start) in saved:
                continue
            saved.add((held.table, rows.start))
        row_bytes = source.shape[1] * source.element_size()
        while len(rows):
            taken = max(1, room // row_bytes) if pieces else max(1, FILE_BYTES // row_bytes)
            part, rows = rows[:taken], rows[taken:]
            pieces.append((held, part, source[: len(part)]))
            source = source[len(part) :]
            room -= len(part) * row_bytes
            if room < row_bytes:
                yield pieces
                pieces, room = [], FILE_BYTES
    if pieces:
        yield pieces


def load_shards(embeddings: LocalTables, directory: Location, with_optimizer: bool) -> Loaded:
    """Read this rank's rows, saved by any number of ranks. No communication.

    Rows that the save lacks (the vocabulary has grown since) keep their start and fresh optimizer states, as do
    tables that it lacks. Tables that only the save has are left out. Rows are read into place (a second copy may not
    fit), so after an error the tables hold a part of the save: make them anew.

    Args:
        embeddings: the tables; an optimizer must be configured where its states are wanted.
        directory: written by `save_shards` and `write_index`.
        with_optimizer: also the states and the number of steps.

    Raises:
        UserError: no index, a missing or damaged file, another embedding_dim or optimizer, or a saved table with more
            rows than the model's.
    """
    chain = read_chain(directory)
    index = chain[-1][1]
    loaded = _compare(index, embeddings.plan, directory)
    if with_optimizer:
        _check_optimizer(index, embeddings, directory)
    embeddings.invalidate()
    read_into(embeddings, matrices_of(embeddings, with_optimizer), chain)
    embeddings.drop_gradients()
    if with_optimizer and index.optimizer:
        embeddings.steps = index.optimizer.steps
    return loaded


def read_into(
    embeddings: LocalTables, targets: Mapping[str, list[Tensor]], chain: Sequence[tuple[Location, CheckpointIndex]]
) -> None:
    """Fill matrices that are laid out like the tables with the values of a chain of saves.

    Args:
        embeddings: says what is where.
        targets: by `weight` and state; see `matrices_of`. States become zero where no save has them.
        chain: see `read_chain`.

    Raises:
        UserError: a file is missing or damaged.
    """
    for state, matrices in targets.items():
        if state != WEIGHT:
            for full in matrices:
                full.zero_()
        for directory, index in chain:
            if index.base is not None and embeddings.optimizer and state in RULES[embeddings.optimizer.kind].growing:
                for full in matrices:
                    full.mul_(index.base.aged)
            saved = {t.name: t.rows for t in index.tables}
            local = [h for h in local_blocks(embeddings, state) if h.table in saved]
            state_chunks = [c for c in index.chunks if c.state == state]
            numbers_read = _read_chunks(state_chunks, index, directory, local, matrices)
            expected = sum(
                len(range(h.rows.start, min(h.rows.stop, saved[h.table]), h.rows.step)) * h.width for h in local
            )
            if index.base is None and numbers_read != expected:
                raise UserError(f"{directory}: {numbers_read} of {expected} numbers of '{state}' were found")


def _compare(index: CheckpointIndex, plan: Plan, directory: Location) -> Loaded:
    """Compare the tables of a save with a plan."""
    saved = {t.name: t for t in index.tables}
    loaded = Loaded(unused=tuple(sorted(saved.keys() - {t.name for t in plan.tables})))
    for table in plan.tables:
        old = saved.get(table.name)
        if old is None:
            loaded.new_rows[table.name] = table.rows
            continue
        if old.dim != table.dim:
            raise UserError(
                f"{directory}: table '{table.name}' was saved with embedding_dim {old.dim}, the model has {table.dim}: "
                f"set model.embedding_dim back, or train from nothing (train.warm_start=false)"
            )
        if old.rows > table.rows:
            raise UserError(
                f"{directory}: table '{table.name}' was saved with {old.rows} rows, the model has {table.rows}: "
                f"the dataset was made with an older vocabulary than the saved model"
            )
        loaded.tables[table.name] = old.rows
        if table.rows > old.rows:
            loaded.new_rows[table.name] = table.rows - old.rows
    if loaded.new_rows or loaded.unused:
        log.info("%s: new rows by table: %s; unused tables: %s", directory, loaded.new_rows, list(loaded.unused))
    return loaded


def _check_optimizer(index: CheckpointIndex, embeddings: LocalTables, directory: Location) -> None:
    if embeddings.optimizer is None:
        raise RuntimeError("configure_optimizer comes before loading its states")
    if index.optimizer is None:
        raise UserError(f"{directory} was saved without optimizer states: training cannot go on from it exactly")
    if index.optimizer.kind != embeddings.optimizer.kind:
        raise UserError(
            f"{directory} was saved with optimizer '{index.optimizer.kind}', train.embeddings.kind is "
            f"'{embeddings.optimizer.kind}': its states do not fit"
        )


def _read_chunks(
    chunks: Iterable[FileChunk],
    index: CheckpointIndex,
    directory: Location,
    local: list[LocalBlock],
    targets: list[Tensor],
) -> int:
    """Copy the values that are both in the chunks and in this rank's blocks into the targets; return their number."""
    by_table: dict[str, list[LocalBlock]] = {}
    for h in local:
        by_table.setdefault(h.table, []).append(h)
    by_file: dict[str, list[tuple[FileChunk, LocalBlock]]] = {}
    for c in chunks:
        for h in by_table.get(c.table, ()):
            if _meet(c, h):
                by_file.setdefault(c.file, []).append((c, h))
    records = {f.name: f for f in index.files}
    numbers_read = 0
    for name, pairs in by_file.items():
        tensors = load_tensors(directory, records[name])
        for c, h in pairs:
            rows = torch.arange(c.start, c.stop, c.stride) if c.rows_key is None else tensors[c.rows_key]
            is_local = (
                (rows % h.rows.step == h.rows.start % h.rows.step) & (rows < h.rows.stop) & (rows >= h.rows.start)
            )
            positions = h.first + torch.div(rows[is_local] - h.rows.start, h.rows.step, rounding_mode="trunc")
            values, target = tensors[c.key], targets[h.fused]
            if (c.columns, h.columns) == (None, None):
                stored = convert(values[is_local], target.dtype)
                target.index_copy_(0, positions.to(target.device), stored.to(target.device))
                numbers_read += positions.numel() * h.width
                continue
            if target.dtype is torch.uint8:
                raise UserError(
                    f"{directory}: table '{c.table}' was saved by columns; int8 stores whole rows. Load it by another "
                    f"storage (train.sharding.storage) and save it by rows first"
                )
            values = decode(values) if values.dtype is torch.uint8 else values
            # Columns of the table: those of the chunk, those of the block, those of both.
            have = c.columns or (0, values.shape[1])
            want = h.columns or (0, h.width)
            both = max(have[0], want[0]), min(have[1], want[1])
            part = values[:, both[0] - have[0] : both[1] - have[0]][is_local]
            target[positions.to(target.device), both[0] - want[0] : both[1] - want[0]] = part.to(target)
            numbers_read += part.numel()
    return numbers_read


def _meet(chunk: FileChunk, held: LocalBlock) -> bool:
    """Return whether a chunk may have values of a block.

    Two arithmetic progressions can meet only if gcd(strides) divides the gap.
    """
    if (held.rows.start - chunk.start) % math.gcd(held.rows.step, chunk.stride):
        return False
    if chunk.columns is None or held.columns is None:
        return True
    return chunk.columns[0] < held.columns[1] and held.columns[0] < chunk.columns[1]


#: Row numbers by table.
Rows = Mapping[str, Collection[int]]


def count_rows(folder: Location, rows: Rows) -> int:
    """Return the number of these rows that are not zero in a save; in a save of changes, of its own rows.

    Raises:
        UserError: a file is missing or damaged.
    """
    index = read_index(folder)
    return sum(_zeroed(folder, record, index.chunks, rows)[1] for record in index.files)


def zero_rows(folder: Location, target: Location, rows: Rows) -> int:
    """Write a copy of a save with some rows set to zero; files that have none of them are shared.

    Saves that lie upon it (`base`) lie upon the new one.

    Args:
        folder: of the save.
        target: of the new one: empty, its publication is the caller's.
        rows: which, by table; tables that the save lacks are passed over.

    Returns:
        how many rows were not zero.

    Raises:
        UserError: a file is missing or damaged.
    """
    index = read_index(folder)
    files, count = list[FileRecord](), 0
    for record in index.files:
        tensors, zeroed = _zeroed(folder, record, index.chunks, rows)
        count += zeroed
        if tensors is None:
            (target / record.name).copy_from(folder / record.name, share=True)
            files.append(record)
        else:
            files.append(save_tensors(target / record.name, tensors))
    known_as = index.saved_as or index.sha256
    new = index.model_copy(update={"files": tuple(files), "saved_as": known_as})
    new = new.model_copy(update={"sha256": new.digest()})
    (target / INDEX).put_text(new.model_dump_json(indent=1) + "\n")
    return count


def _zeroed(
    folder: Location, record: FileRecord, chunks: Collection[FileChunk], rows: Rows
) -> tuple[dict[str, Tensor] | None, int]:
    """Return a file's tensors with the rows set to zero, None if they are already; and the number of changed rows."""
    file_chunks = [c for c in chunks if c.file == record.name and _may_hold(c, rows.get(c.table, ()))]
    if not file_chunks:
        return None, 0
    tensors, count, changed = load_tensors(folder, record), 0, False
    for chunk in file_chunks:
        numbers = torch.arange(chunk.start, chunk.stop, chunk.stride)
        if chunk.rows_key is not None:
            numbers = tensors[chunk.rows_key]
        row_numbers = torch.tensor(sorted(rows[chunk.table]), dtype=torch.int64)
        values = tensors[chunk.key]
        positions = torch.isin(numbers, row_numbers).nonzero().flatten()
        positions = positions[(values[positions].contiguous().view(torch.uint8) != 0).flatten(1).any(dim=1)]
        if len(positions):
            values[positions] = 0
            changed = True
            count += len(positions) if chunk.state == WEIGHT else 0
    return (tensors if changed else None), count


def _may_hold(chunk: FileChunk, rows: Collection[int]) -> bool:
    return bool(rows) and (chunk.rows_key is not None or any(row in chunk.rows for row in rows))
