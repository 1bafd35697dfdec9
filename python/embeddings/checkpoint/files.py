"""Files of a save of shards: tensors, and their index.

Tensors are in safetensors files with checksums: no pickle, and a damaged file is refused by name. The index has the
ranks' records, combined into one file with a checksum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, Literal, TypeVar

import safetensors
import safetensors.torch
from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer
from torch import Tensor

from headrace.comm.base import Collective
from headrace.errors import UserError
from headrace.errors.stores import ChangedInPlace
from headrace.storage import Location

#: Bytes of a file that are in memory at a time where it is read piece by piece.
PIECE_BYTES = 16 << 20


class FileRecord(BaseModel):
    """A written file, relative to the folder of the record that holds it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    bytes: int
    sha256: str


def save_tensors(path: Location, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write a safetensors file and flush it to the disk.

    The checksum is of the bytes in memory, so it also finds what the disk did not keep. The whole file passes through
    memory once: callers with large tensors split them.
    """
    return _write(path, safetensors.torch.save({name: t.detach().contiguous() for name, t in tensors.items()}))


def load_tensors(folder: Location, record: FileRecord) -> dict[str, Tensor]:
    """Read a file of `save_tensors` and compare it with its record.

    Raises:
        UserError: it is missing, cut off, altered, or not a safetensors file.
    """
    path = folder / record.name
    content = read_checked(folder, record)
    try:
        loaded: dict[str, Tensor] = safetensors.torch.load(content)
    except safetensors.SafetensorError as e:
        raise UserError(f"{path} is not a safetensors file: {e}") from None
    return loaded


def read_checked(folder: Location, record: FileRecord) -> bytes:
    """Read a file and compare it with its record.

    Raises:
        UserError: the file is missing, or differs.
    """
    path = folder / record.name
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} is missing, though the record beside it lists it: the folder is damaged") from None
    except ChangedInPlace as e:
        raise UserError(f"{path} is damaged: {e}") from None
    if len(content) != record.bytes:
        raise UserError(f"{path} is damaged: {len(content)} bytes instead of {record.bytes}")
    digest = hashlib.sha256(content).hexdigest()
    if digest != record.sha256:
        raise UserError(f"{path} is damaged: its SHA-256 is {digest[:12]}…, not {record.sha256[:12]}… as recorded")
    return content


def check_file(folder: Location, record: FileRecord) -> None:
    """Compare a file with its record, a piece at a time.

    Raises:
        UserError: the file is missing, or differs.
    """
    path, digest = folder / record.name, hashlib.sha256()
    try:
        with open(path.local_path(), "rb") as f:
            while piece := f.read(PIECE_BYTES):
                digest.update(piece)
    except FileNotFoundError:
        raise UserError(f"{path} is missing, though the record beside it lists it: the folder is damaged") from None
    except ChangedInPlace as e:
        raise UserError(f"{path} is damaged: {e}") from None
    if digest.hexdigest() != record.sha256:
        raise UserError(f"{path} is damaged: its SHA-256 is not that of its record")


def record_of(folder: Location, name: str) -> FileRecord:
    """Return the record of an existing file."""
    content = (folder / name).read_bytes()
    return FileRecord(name=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def _write(path: Location, content: bytes) -> FileRecord:
    path.put_bytes(content)
    return FileRecord(name=path.name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


#: Token of the folder that all ranks fill; one save at a time goes on in a folder.
TOKEN = "shared"


@contextmanager
def shared_directory(final: Location, collective: Collective) -> Iterator[Location]:
    """Yield a folder that all ranks fill and that appears as `final` in one step: `Location.new_folder` for many ranks.

    Collective: every rank enters and leaves. The chief makes the folder and, when all ranks have left the block well,
    flushes and renames it; an earlier `final` is replaced. What a killed attempt left behind is removed on entry.
    The ranks must share a file system.
    """
    if collective.world.is_chief:
        final.begin(TOKEN)
    collective.barrier()
    yield final.building(TOKEN)
    collective.barrier()
    if collective.world.is_chief:
        final.commit(TOKEN)
    collective.barrier()


R = TypeVar("R", bound=BaseModel)

INDEX = "index.json"
#: The name under which the rows themselves are stored, beside the names of optimizer states.
WEIGHT = "weight"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TableRecord(_Record):
    """A saved table."""

    name: str
    rows: int
    dim: int


class FileChunk(_Record):
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
    #: In a save of changes, the tensor with the numbers of the rows, int64; the range is then that of all rows.
    rows_key: str | None = None

    @model_serializer(mode="wrap")
    def _only_said(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Indexes without columns and lists of rows keep the checksums that they had before these fields existed.
        return {k: v for k, v in write(self).items() if k not in ("columns", "rows_key") or v is not None}

    @property
    def rows(self) -> range:
        return range(self.start, self.stop, self.stride)


class OptimizerRecord(_Record):
    """The optimizer whose states were saved."""

    kind: str
    steps: int
    states: tuple[str, ...]


class Base(_Record):
    """Reference to the save below a save of changes."""

    #: Path from the folder of the changes.
    path: str
    #: The checksum of its index.
    sha256: str
    #: Factor by which the states that never shrink were multiplied before anything changed.
    aged: float
    #: Number of saves below this one, down to a complete one.
    depth: int


class RankRecord(_Record):
    """Record of one rank."""

    format: Literal[1] = 1
    rank: int
    world_size: int
    tables: tuple[TableRecord, ...]
    optimizer: OptimizerRecord | None
    files: tuple[FileRecord, ...]
    chunks: tuple[FileChunk, ...]
    base: Base | None = None


class CheckpointIndex(_Record):
    """Record of all ranks: the content of `index.json`."""

    format: Literal[1] = 1
    tables: tuple[TableRecord, ...]
    optimizer: OptimizerRecord | None
    files: tuple[FileRecord, ...]
    chunks: tuple[FileChunk, ...]
    #: Save below this one; None: this save is complete.
    base: Base | None = None
    #: Checksum before some rows were set to zero (`zero_rows`): saves on top of that save lie on top of this one.
    saved_as: str | None = None
    #: SHA-256 of this record with an empty checksum.
    sha256: str = ""

    @model_serializer(mode="wrap")
    def _only_said(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Complete saves keep the checksums that they had before these fields existed.
        return {k: v for k, v in write(self).items() if k not in ("base", "saved_as") or v is not None}

    def digest(self) -> str:
        text = self.model_copy(update={"sha256": ""}).model_dump_json()
        return hashlib.sha256(text.encode()).hexdigest()


def write_index(directory: Location) -> CheckpointIndex:
    """Combine the ranks' records into the index. Done by the chief, after a barrier that follows `save_shards`.

    Raises:
        UserError: a rank's record is missing or the ranks do not agree.
    """
    first = _read(rank_file(directory, 0), RankRecord)
    records = [first, *(_read(rank_file(directory, r), RankRecord) for r in range(1, first.world_size))]
    for record in records:
        summaries = [(r.world_size, r.tables, r.optimizer, r.base) for r in (record, first)]
        if summaries[0] != summaries[1]:
            raise UserError(f"{directory}: ranks 0 and {record.rank} did not save the same tables or step")
    chunks = tuple(c for r in records for c in r.chunks)
    if first.base is None:
        _check_whole(first, chunks, directory)
    files = tuple(f for r in records for f in r.files)
    index = CheckpointIndex(tables=first.tables, optimizer=first.optimizer, files=files, chunks=chunks, base=first.base)
    index = index.model_copy(update={"sha256": index.digest()})
    (directory / INDEX).put_text(index.model_dump_json(indent=1) + "\n")
    for record in records:
        rank_file(directory, record.rank).remove()
    return index


def _check_whole(first: RankRecord, chunks: tuple[FileChunk, ...], directory: Location) -> None:
    for state in (WEIGHT, *(first.optimizer.states if first.optimizer else ())):
        for table in first.tables:
            matching = [c for c in chunks if c.table == table.name and c.state == state]
            shares = (
                len(c.rows)
                * Fraction(
                    1 if c.columns is None else c.columns[1] - c.columns[0], 1 if c.columns is None else table.dim
                )
                for c in matching
            )
            saved = sum(shares, Fraction(0))
            if saved != table.rows:
                raise UserError(
                    f"{directory}: {float(saved):g} of the {table.rows} rows of table '{table.name}' were saved"
                )


def read_index(directory: Location) -> CheckpointIndex:
    """Read the index of a saved folder.

    Raises:
        UserError: there is none (the save did not finish), or it was altered.
    """
    path = directory / INDEX
    index = _read(path, CheckpointIndex)
    if index.digest() != index.sha256:
        raise UserError(f"{path} is damaged: its contents do not match its checksum")
    return index


def read_chain(directory: Location) -> list[tuple[Location, CheckpointIndex]]:
    """Return a save and the saves below it, the complete one first.

    Raises:
        UserError: one is missing, damaged, or another than the changes were saved upon.
    """
    chain = [(directory, read_index(directory))]
    while (base := chain[0][1].base) is not None:
        folder = chain[0][0].following(base.path)
        try:
            index = read_index(folder)
        except UserError as e:
            message = f"{chain[0][0]} holds the rows that changed since {folder}, which cannot be read"
            raise UserError(f"{message}: {e}") from None
        if base.sha256 not in (index.sha256, index.saved_as):
            raise UserError(
                f"{chain[0][0]} holds the rows that changed since {folder}, and that is another save by now: restore "
                f"it, or train the day again"
            )
        chain.insert(0, (folder, index))
    return chain


def verify_shards(directory: Location) -> CheckpointIndex:
    """Read every file of a saved folder and compare it with its checksum.

    Raises:
        UserError: naming the file that is missing or damaged.
    """
    chain = read_chain(directory)
    for folder, index in chain:
        for record in index.files:
            read_checked(folder, record)
    return chain[-1][1]


def rank_file(directory: Location, rank: int) -> Location:
    """Return the path of one rank's record, which exists until the index is written."""
    return directory / f"rank-{rank:05d}.json"


def _read(path: Location, kind: type[R]) -> R:
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the save of {path.parent} did not finish or was damaged") from None
    except ChangedInPlace as e:
        raise UserError(f"{path} is damaged: {e}") from None
    except ValidationError as e:
        raise UserError(f"{path} is damaged or of another version: {e.errors()[0]['msg']}") from None
