"""Hashes of the keys of a data file's rows, in the folder of a load: those of any range are read without the others."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.storage import Location

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
#: Of the file's name: the same hashes in ascending order, of rows that have a key.
_SORTED = ".sorted.npy"


def save_hashes(folder: Location, hashes: Sequence[I64], keyed: Sequence[Mask]) -> str:
    """Save the hashes of a file's rows, given in pieces (headrace.lake.ingest.key_hash). Returns their name."""
    name = f"hashes-{uuid.uuid4()}.npz"
    every, of_key = np.concatenate([np.zeros(0, np.int64), *hashes]), np.concatenate([np.zeros(0, np.bool_), *keyed])
    with (folder / name).new_file() as place, open(place, "wb") as file:
        np.savez(file, hashes=every, keyed=of_key)
    ordered = every if of_key.all() else every[of_key]
    ordered.sort()
    save_array(folder / (name + _SORTED), ordered)
    return name


def save_array(place: Location, values: I64) -> None:
    """Save an array in NumPy's format, under just that name."""
    with place.new_file() as path, open(path, "wb") as file:
        np.save(file, values)


def load_hashes(folder: Location, name: str) -> tuple[I64, Mask]:
    """(hash, whether it has a key) of each row. int64, bool [rows]."""
    with np.load((folder / name).local_path()) as saved:
        return saved["hashes"], saved["keyed"]


def hashes_of_share(folder: Location, name: str, share: int, shares: int) -> I64:
    """The hashes of rows that have a key in one of `shares` equal ranges of all hashes; int64, ascending, mapped."""
    ordered = np.load((folder / (name + _SORTED)).local_path(), mmap_mode="r")
    first, last = (
        len(ordered) if k == shares else int(np.searchsorted(ordered, np.int64(k * (1 << 64) // shares - (1 << 63))))
        for k in (share, share + 1)
    )
    found: I64 = ordered[first:last]
    return found
