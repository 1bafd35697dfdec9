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

import hashlib
import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer
from torch import Tensor

from headrace.comm.base import Collective
from headrace.embeddings.checkpoint.tensors import FileRecord, load_tensors, read_checked, save_tensors
from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.optim.rules import RULES
from headrace.embeddings.sharding.plan import Plan
from headrace.embeddings.storage.dtypes import convert, decode
from headrace.errors import UserError
from headrace.storage import local

log = logging.getLogger("headrace.embeddings")

R = TypeVar("R", bound=BaseModel)

INDEX = "index.json"
#: The name under which the rows themselves are stored, beside the names of optimizer states.
WEIGHT = "weight"
#: Bytes of a file at most (one row at least): what passes through memory at once.
FILE_BYTES = 128 * 2**20
#: Names the place that all ranks fill; one save at a time goes on in a folder.
_TOKEN = "shared"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TableRecord(_Record):
    """A saved table."""

    name: str
    rows: int
    dim: int


class Chunk(_Record):
    """Rows `range(start, stop, stride)` of one table's weight or optimizer state: tensor `key` of `file`.

    Of these rows the columns [first, end) of `columns`; None: all that there are (one, in a state by row).
    """

    table: str
    state: str
    start: int
    stop: int
    stride: int
    file: str
    key: str
    columns: tuple[int, int] | None = None

    @model_serializer(mode="wrap")
    def _only_said(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Checksums of indexes that know no columns stay what they were.
        return {k: v for k, v in write(self).items() if k != "columns" or v is not None}

    @property
    def rows(self) -> range:
        return range(self.start, self.stop, self.stride)


class OptimizerRecord(_Record):
    """The optimizer whose states were saved."""

    kind: str
    steps: int
    states: tuple[str, ...]


class RankRecord(_Record):
    """What one rank wrote."""

    format: Literal[1] = 1
    rank: int
    world_size: int
    tables: tuple[TableRecord, ...]
    optimizer: OptimizerRecord | None
    files: tuple[FileRecord, ...]
    chunks: tuple[Chunk, ...]


class Index(_Record):
    """What all ranks wrote."""

    format: Literal[1] = 1
    tables: tuple[TableRecord, ...]
    optimizer: OptimizerRecord | None
    files: tuple[FileRecord, ...]
    chunks: tuple[Chunk, ...]
    #: SHA-256 of this record with an empty checksum.
    sha256: str = ""

    def digest(self) -> str:
        text = self.model_copy(update={"sha256": ""}).model_dump_json()
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class Loaded:
    """What `load_shards` found, for the whole model."""

    #: Rows read by table.
    tables: dict[str, int] = field(default_factory=dict)
    #: Rows that the save did not have and that keep their start, by table; a table that is new wholly so.
    new_rows: dict[str, int] = field(default_factory=dict)
    #: Saved tables that this model lacks.
    unused: tuple[str, ...] = ()


def save_shards(embeddings: LocalTables, directory: Path, with_optimizer: bool) -> None:
    """Write this rank's rows, and its optimizer states, and the record of both. Speaks to no other rank.

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
    chunks: list[Chunk] = []
    for state, sources in _matrices(embeddings, with_optimizer).items():
        for number, pieces in enumerate(_files_of(embeddings, state, sources)):
            name = f"{state}-{world.rank:05d}-{number:05d}.safetensors"
            tensors = {}
            for piece, rows, source in pieces:
                key = f"{piece.table}/{rows.start}:{rows.stop}:{rows.step}"
                key += "" if piece.columns is None else "/{}:{}".format(*piece.columns)
                tensors[key] = source
                chunks.append(
                    Chunk(
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
    local(_rank_file(directory, world.rank)).put_text(record.model_dump_json(indent=1) + "\n")


def _matrices(embeddings: LocalTables, with_optimizer: bool) -> dict[str, list[Tensor]]:
    """The weight and the optimizer states by name: this rank's matrix of each fused table."""
    found = {WEIGHT: list(embeddings.weights)}
    if with_optimizer and embeddings.optimizer is not None:
        for name in RULES[embeddings.optimizer.kind].state:
            found[name] = [states[name] for states in embeddings.states]
    return found


@dataclass(frozen=True)
class _Held:
    """What a rank holds of one block, in its fused table's matrix: rows `rows`, from matrix row `first` on."""

    table: str
    rows: range
    fused: int
    first: int
    #: First and last column of the table, where these are not all.
    columns: tuple[int, int] | None
    width: int
    replicated: bool


def _held(embeddings: LocalTables, state: str) -> Iterator[_Held]:
    """What this rank holds of a weight or state, block by block."""
    plan = embeddings.plan
    by_row = state != WEIGHT and embeddings.optimizer is not None and RULES[embeddings.optimizer.kind].by_row
    for fused in embeddings.layout.fused_tables:
        for block, rows, first in fused.local_blocks:
            whole = by_row or len(block.columns) == plan.by_name[block.table].dim
            yield _Held(
                block.table,
                rows,
                fused.number,
                first,
                None if whole else (block.columns.start, block.columns.stop),
                1 if by_row else fused.width,
                block.replicated,
            )


def _files_of(
    embeddings: LocalTables, state: str, sources: list[Tensor]
) -> Iterator[list[tuple[_Held, range, Tensor]]]:
    """Cut what a rank saves of a weight or state into files: lists of (block, table rows, their numbers)."""
    world = embeddings.collective.world
    pieces: list[tuple[_Held, range, Tensor]] = []
    saved: set[tuple[str, int]] = set()
    room = FILE_BYTES
    for held in _held(embeddings, state):
        source = sources[held.fused][held.first : held.first + len(held.rows)]
        rows = held.rows
        if held.replicated:  # all have it: each saves a part
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


def write_index(directory: Path) -> Index:
    """Fold the ranks' records into the index. The chief's work, after a barrier that follows `save_shards`.

    Raises:
        UserError: a rank's record is missing or the ranks do not agree.
    """
    first = _read(_rank_file(directory, 0), RankRecord)
    records = [first, *(_read(_rank_file(directory, r), RankRecord) for r in range(1, first.world_size))]
    for record in records:
        if (record.world_size, record.tables, record.optimizer) != (first.world_size, first.tables, first.optimizer):
            raise UserError(f"{directory}: ranks 0 and {record.rank} did not save the same tables or step")
    chunks = tuple(c for r in records for c in r.chunks)
    for state in (WEIGHT, *(first.optimizer.states if first.optimizer else ())):
        for table in first.tables:
            mine = [c for c in chunks if c.table == table.name and c.state == state]
            shares = (
                len(c.rows)
                * Fraction(
                    1 if c.columns is None else c.columns[1] - c.columns[0], 1 if c.columns is None else table.dim
                )
                for c in mine
            )
            saved = sum(shares, Fraction(0))
            if saved != table.rows:
                raise UserError(
                    f"{directory}: {float(saved):g} of the {table.rows} rows of table '{table.name}' were saved"
                )
    files = tuple(f for r in records for f in r.files)
    index = Index(tables=first.tables, optimizer=first.optimizer, files=files, chunks=chunks)
    index = index.model_copy(update={"sha256": index.digest()})
    local(directory / INDEX).put_text(index.model_dump_json(indent=1) + "\n")
    for record in records:
        _rank_file(directory, record.rank).unlink()
    return index


def read_index(directory: Path) -> Index:
    """The index of a saved folder.

    Raises:
        UserError: there is none (the save did not finish), or it was altered.
    """
    path = directory / INDEX
    index = _read(path, Index)
    if index.digest() != index.sha256:
        raise UserError(f"{path} is damaged: its contents do not match its checksum")
    return index


def verify_shards(directory: Path) -> Index:
    """Read every file of a saved folder and compare it with its checksum.

    Raises:
        UserError: naming the file that is missing or damaged.
    """
    index = read_index(directory)
    for record in index.files:
        read_checked(directory, record)
    return index


def load_shards(embeddings: LocalTables, directory: Path, with_optimizer: bool) -> Loaded:
    """Read this rank's rows, whatever world saved them. Speaks to no other rank.

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
    index = read_index(directory)
    loaded = _compare(index, embeddings.plan, directory)
    if with_optimizer:
        _check_optimizer(index, embeddings, directory)
    embeddings.invalidate()
    targets = _matrices(embeddings, with_optimizer)
    for state, matrices in targets.items():
        if state != WEIGHT:
            for full in matrices:
                full.zero_()
    for state, matrices in targets.items():
        held = [h for h in _held(embeddings, state) if h.table in loaded.tables]
        wanted = [c for c in index.chunks if c.state == state]
        expected = sum(len(_saved_rows(h, loaded)) * h.width for h in held)
        found = _read_chunks(wanted, index, directory, held, matrices)
        if found != expected:
            raise UserError(f"{directory}: {found} of {expected} numbers of '{state}' were found")
    embeddings.drop_gradients()
    if with_optimizer and index.optimizer:
        embeddings.steps = index.optimizer.steps
    return loaded


def _saved_rows(held: _Held, loaded: Loaded) -> range:
    return range(held.rows.start, min(held.rows.stop, loaded.tables[held.table]), held.rows.step)


def _compare(index: Index, plan: Plan, directory: Path) -> Loaded:
    """What of a save fits a plan."""
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


def _check_optimizer(index: Index, embeddings: LocalTables, directory: Path) -> None:
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
    chunks: Iterable[Chunk], index: Index, directory: Path, held: list[_Held], targets: list[Tensor]
) -> int:
    """Copy what is in both the chunks and the blocks held here into the targets; how many numbers."""
    by_table: dict[str, list[_Held]] = {}
    for h in held:
        by_table.setdefault(h.table, []).append(h)
    by_file: dict[str, list[tuple[Chunk, _Held]]] = {}
    for c in chunks:
        for h in by_table.get(c.table, ()):
            if _meet(c, h):
                by_file.setdefault(c.file, []).append((c, h))
    records = {f.name: f for f in index.files}
    found = 0
    for name, pairs in by_file.items():
        tensors = load_tensors(directory, records[name])
        for c, h in pairs:
            rows = torch.arange(c.start, c.stop, c.stride)
            mine = (rows % h.rows.step == h.rows.start % h.rows.step) & (rows < h.rows.stop) & (rows >= h.rows.start)
            place = h.first + torch.div(rows[mine] - h.rows.start, h.rows.step, rounding_mode="trunc")
            values, target = tensors[c.key], targets[h.fused]
            if (c.columns, h.columns) == (None, None):
                stored = convert(values[mine], target.dtype)
                target.index_copy_(0, place.to(target.device), stored.to(target.device))
                found += place.numel() * h.width
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
            part = values[:, both[0] - have[0] : both[1] - have[0]][mine]
            target[place.to(target.device), both[0] - want[0] : both[1] - want[0]] = part.to(target)
            found += part.numel()
    return found


def _meet(chunk: Chunk, held: _Held) -> bool:
    """Whether a chunk may have numbers of a block.

    Two arithmetic progressions can meet only if gcd(strides) divides the gap.
    """
    if (held.rows.start - chunk.start) % math.gcd(held.rows.step, chunk.stride):
        return False
    if chunk.columns is None or held.columns is None:
        return True
    return chunk.columns[0] < held.columns[1] and held.columns[0] < chunk.columns[1]


@contextmanager
def shared_directory(final: Path, collective: Collective) -> Iterator[Path]:
    """A folder that all ranks fill and that appears as `final` in one step: `Location.new_folder` for many ranks.

    Collective: every rank enters and leaves. The chief makes the folder and, when all ranks have left the block well,
    flushes and renames it; an earlier `final` is replaced. What a killed attempt left behind is removed on entry.
    The ranks must share a file system.
    """
    place = local(final)
    if collective.world.is_chief:
        place.begin(_TOKEN)
    collective.barrier()
    yield place.building(_TOKEN).local_path()
    collective.barrier()
    if collective.world.is_chief:
        place.commit(_TOKEN)
    collective.barrier()


def _rank_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.json"


def _read(path: Path, kind: type[R]) -> R:
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the save of {path.parent} did not finish or was damaged") from None
    except ValidationError as e:
        raise UserError(f"{path} is damaged or of another version: {e.errors()[0]['msg']}") from None
