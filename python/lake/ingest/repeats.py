"""Rows whose key may be there twice, found by hashes alone: only they are compared with each other
(headrace.lake.ingest.deduplicate).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.lake.ingest.data_file import SOURCE_FILE, SOURCE_LINE
from headrace.lake.ingest.key_hash import key_hashes
from headrace.lake.sources.frame import GOOD
from headrace.storage import Location

I64 = npt.NDArray[np.int64]
#: The hashes that may be there twice, in the folder of a load: int64, sorted.
REPEATED = "repeated.npy"
#: Folders of rows with such hashes: to load, and in the table.
SUSPECTS = ("suspects", "suspects-loaded")


@dataclass(frozen=True)
class KeyedFile:
    """A Parquet file with key columns."""

    path: Location
    #: The day of its rows.
    ds: str = ""
    #: Whether it has rows that Spark has typed, good and bad ones.
    is_typed: bool = False
    #: The .npz file in the scratch folder with the hashes of its rows.
    hashes: str = ""


@dataclass(frozen=True)
class HashTask:
    """Hashes the keys of data files; yields the names of the .npz files."""

    files: tuple[KeyedFile, ...]
    keys: tuple[str, ...]
    scratch: Location

    def __call__(self, number: int) -> Iterator[dict[str, Any]]:
        mine = self.files[number]
        file = pq.ParquetFile(mine.path.local_path(), coerce_int96_timestamp_unit="us")
        # A data file that is older than a column has no keys.
        groups = file.num_row_groups if set(self.keys) <= set(file.schema_arrow.names) else 0
        found, keyed = [np.zeros(0, np.int64)], [np.zeros(0, np.bool_)]
        for group in range(groups):
            state = ["_state"] if mine.is_typed else []
            table = file.read_row_group(group, columns=[*self.keys, *state], use_threads=False)
            if mine.is_typed:
                table = table.filter(pc.equal(table.column("_state"), GOOD))
            if table.num_rows:
                hashes, whole = key_hashes([table.column(k) for k in self.keys])
                found.append(hashes)
                keyed.append(whole)
        path = self.scratch / f"hashes-{uuid.uuid4()}.npz"
        np.savez(path.local_path(), hashes=np.concatenate(found), keyed=np.concatenate(keyed))
        yield {"file": number, "hashes": path.name}


@dataclass(frozen=True)
class RepeatTask:
    """Finds the hashes of one share of all: there twice among rows to load, or there and in the table."""

    mine: tuple[str, ...]
    loaded: tuple[str, ...]
    scratch: Location
    #: Shares; a hash is in the one of its remainder.
    shares: int

    def __call__(self, share: int) -> Iterator[dict[str, Any]]:
        mine = np.sort(self._hashes(self.mine, share))
        twice = mine[1:][mine[1:] == mine[:-1]]
        loaded = self._hashes(self.loaded, share)
        place = np.minimum(np.searchsorted(mine, loaded), max(len(mine) - 1, 0))
        both = loaded[mine[place] == loaded] if len(mine) else loaded[:0]
        found = np.unique(np.concatenate([twice, both]))
        path = self.scratch / f"repeated-{uuid.uuid4()}.npy"
        np.save(path.local_path(), found)
        yield {"hashes": len(found), "path": path.name}

    def _hashes(self, names: tuple[str, ...], share: int) -> I64:
        found = [np.zeros(0, np.int64)]
        for name in names:
            hashes = keyed_hashes(self.scratch / name)
            found.append(hashes if self.shares == 1 else hashes[hashes % self.shares == share])
        return np.concatenate(found)


@dataclass(frozen=True)
class SuspectTask:
    """Copies the keys and places of rows whose hash is there twice, of one data file."""

    files: tuple[KeyedFile, ...]
    keys: tuple[str, ...]
    #: By day and name, the number of a landing file; None: rows of the table, which have `ds` in place of a place.
    numbers: Mapping[tuple[str, str], int] | None
    scratch: Location

    def __call__(self, number: int) -> Iterator[dict[str, Any]]:
        file = self.files[number]
        with np.load((self.scratch / file.hashes).local_path()) as saved:
            hashes, keyed = saved["hashes"], saved["keyed"]
        repeated = np.load((self.scratch / REPEATED).local_path(), mmap_mode="r")
        place = np.minimum(np.searchsorted(repeated, hashes), len(repeated) - 1)
        rows = np.flatnonzero((repeated[place] == hashes) & keyed)
        if not len(rows):
            return
        table = self._take(file, rows)
        folder = self.scratch / SUSPECTS[self.numbers is None]
        folder.make_dir()
        path = folder / f"{uuid.uuid4()}.parquet"
        pq.write_table(table, path.local_path(), store_schema=False)
        yield {"path": path.name}

    def _take(self, file: KeyedFile, rows: I64) -> pa.Table:
        place = [] if self.numbers is None else [SOURCE_FILE, SOURCE_LINE]
        parquet = pq.ParquetFile(file.path.local_path(), coerce_int96_timestamp_unit="us")
        taken, at = [], 0
        for group in range(parquet.num_row_groups):
            count = parquet.metadata.row_group(group).num_rows
            mine = rows[(rows >= at) & (rows < at + count)] - at
            at += count
            if len(mine):
                table = parquet.read_row_group(group, columns=[*self.keys, *place], use_threads=False)
                taken.append(table.take(pa.array(mine)))
        table = pa.concat_tables(taken)
        ds = pa.array([file.ds] * table.num_rows, pa.string())
        if self.numbers is None:
            return table.append_column("ds", ds)
        names = table.column(SOURCE_FILE).to_pylist()
        numbers = pa.array([self.numbers[file.ds, name] for name in names], pa.int32())
        line = table.column(SOURCE_LINE)
        table = table.select(list(self.keys))
        for name, column in (("_ds", ds), ("_file", numbers), ("_line", line)):
            table = table.append_column(name, column)
        return table


def keyed_hashes(path: Location) -> I64:
    """The hashes of rows that have a key."""
    with np.load(path.local_path()) as saved:
        hashes, keyed = saved["hashes"], saved["keyed"]
    found: I64 = hashes if keyed.all() else hashes[keyed]
    return found
