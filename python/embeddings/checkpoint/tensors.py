"""Tensors in safetensors files with checksums: no pickle, and a damaged file is refused by name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import safetensors
import safetensors.torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from headrace.comm.base import Collective
from headrace.errors import UserError
from headrace.storage import Location
from headrace.storage.objects.calls import ChangedInPlace

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
