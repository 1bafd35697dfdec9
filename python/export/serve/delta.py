"""Deltas between two versions of a model's files: blocks of bytes, in which a table's changed rows are.

A delta is a folder:

    delta.json           by file of the new version: bytes, digest, and how it is made; digests of the base's files
    blocks-N.bin         changed blocks of a file, in order
    blocks-N.index.bin   their numbers, int64
    whole-N.bin          files that the base lacks, or that have little in common with it

Files that are the same are shared with the base where the store can: a version costs what is new of it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.errors import UserError
from headrace.storage import Location

RECORD = "delta.json"
#: Bytes of a block: 16 float32. Its number takes 8 bytes.
BLOCK = 64
#: Bytes that are compared, read or written at once.
_CHUNK = 1 << 26
#: Share of a file's blocks above which it is sent whole.
_WHOLE_FILE_SHARE = 0.6

_How = Literal["same", "blocks", "whole"]


@dataclass(frozen=True)
class _File:
    name: str
    size: int
    digest: str
    how: _How
    number: int


def write_delta(base: Location, new: Location, delta: Location) -> int:
    """Write what makes `new` of `base` into a folder, which appears whole.

    Args:
        base: a version's folder that whoever applies the delta has, too.
        new: the next one's.
        delta: the folder to make.

    Returns:
        bytes of the delta's files.

    Raises:
        UserError: a folder has no files.
    """
    base_names, after = _names(base), _names(new)
    with delta.new_folder() as folder:
        files = [_compare(number, name, base, new, name in base_names, folder) for number, name in enumerate(after)]
        record = {
            "base": {f.name: digest_of(base / f.name) for f in files if f.how != "whole"},
            "files": {f.name: {"size": f.size, "digest": f.digest, "how": f.how, "number": f.number} for f in files},
        }
        (folder / RECORD).put_text(json.dumps(record, indent=1) + "\n")
    return sum(f.size() for f in delta.files())


def apply_delta(base: Location, delta: Location, folder: Location) -> None:
    """Make the new version's files in an empty folder, and look whether they are what they were.

    Raises:
        UserError: `base` is another one than the delta was made for, or the delta is torn.
    """
    record = _read(delta)
    for name, digest in record["base"].items():
        if not (base / name).is_file() or digest_of(base / name) != digest:
            raise UserError(f"{delta} was made for another base than {base}: '{name}' is not the same")
    for name, file in record["files"].items():
        target, number = folder / name, file["number"]
        try:
            if file["how"] == "same":
                target.copy_from(base / name, share=True)
                continue
            if file["how"] == "whole":
                target.copy_from(delta / f"whole-{number}.bin")
            else:
                _patch(base / name, delta, number, target, file["size"])
        except FileNotFoundError as e:
            raise UserError(f"{delta} is torn: {e.filename} is missing") from None
        if digest_of(target) != file["digest"]:
            raise UserError(f"{delta} is torn: '{name}' does not become what it was")


def digest_of(file: Location) -> str:
    """Return the digest of a file's bytes."""
    digest = hashlib.blake2b(digest_size=16)
    with file.open() as f:
        while data := f.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def _read(delta: Location) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((delta / RECORD).read_bytes())
        _ = record["base"].items(), [(f["size"], f["digest"], f["how"], f["number"]) for f in record["files"].values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{delta} is no delta: {e}") from None
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in (*record["files"], *record["base"])):
        raise UserError(f"{delta} is no delta: a file's name leads out of the folder")
    return record


def _names(folder: Location) -> list[str]:
    if not (names := [f.below(folder) for f in folder.files()]):
        raise UserError(f"{folder} has no files: name a version's folder")
    return names


def _compare(number: int, name: str, base: Location, new: Location, known: bool, folder: Location) -> _File:
    size, digest = (new / name).size(), digest_of(new / name)
    changed = _changed_blocks(base / name, new / name) if known else None
    if changed is None or len(changed) * BLOCK > _WHOLE_FILE_SHARE * size:
        (folder / f"whole-{number}.bin").copy_from(new / name)
        return _File(name, size, digest, "whole", number)
    if not len(changed) and (base / name).size() == size:
        return _File(name, size, digest, "same", number)
    with (folder / f"blocks-{number}.index.bin").new_file() as path:
        changed.tofile(path)
    with (folder / f"blocks-{number}.bin").new_file() as path, open(path, "wb") as out, (new / name).open() as f:
        for block in changed.tolist():
            f.seek(block * BLOCK)
            out.write(f.read(BLOCK))
    return _File(name, size, digest, "blocks", number)


def _changed_blocks(base: Location, new: Location) -> npt.NDArray[np.int64]:
    """Return numbers of the new file's blocks that the base has not at the same place."""
    changed = []
    with base.open() as base_file, new.open() as after:
        start = 0
        while data := after.read(_CHUNK):
            old = base_file.read(_CHUNK)
            size = -(-len(data) // BLOCK) * BLOCK
            pair = [np.frombuffer(x.ljust(size, b"\0"), np.uint64) for x in (data, old[:size])]
            differs = (pair[0] != pair[1]).reshape(-1, BLOCK // 8).any(axis=1)
            differs[min(len(old), len(data)) // BLOCK :] |= len(old) < len(data)  # what the base has not, zeros too
            changed.append(np.flatnonzero(differs) + start)
            start += size // BLOCK
    return np.concatenate(changed).astype("<i8") if changed else np.empty(0, "<i8")


def _patch(base: Location, delta: Location, number: int, target: Location, size: int) -> None:
    index = delta / f"blocks-{number}.index.bin"
    index_bytes = index.read_bytes()
    blocks = np.frombuffer(index_bytes[: len(index_bytes) // 8 * 8], "<i8")
    if len(index_bytes) % 8 or ((blocks < 0) | (blocks > max(0, size - 1) // BLOCK)).any():
        raise UserError(f"{delta} is torn: {index.name} has no numbers of blocks of a file of {size:,} bytes")
    target.copy_from(base)
    with (delta / f"blocks-{number}.bin").open() as data, open(target.local_path(), "r+b") as out:
        out.truncate(size)
        for block in blocks.tolist():
            out.seek(block * BLOCK)
            out.write(data.read(BLOCK))
        out.truncate(size)
