"""Rows whose key may be there twice, found by hashes alone: only they are compared with each other
(headrace.lake.ingest.deduplicate).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.lake.delta.data_files import SOURCE_FILE, SOURCE_LINE
from headrace.lake.ingest.hash_files import I64, Mask, hashes_of_share, load_hashes, save_array, save_hashes
from headrace.lake.ingest.key_hash import key_hashes
from headrace.lake.sources.frame import GOOD
from headrace.storage import Location

#: The hashes that may be there twice, in the folder of a load: int64, sorted.
REPEATED = "repeated.npy"


@dataclass(frozen=True)
class KeyedFile:
    """A Parquet file with key columns."""

    path: Location
    #: The day of its rows.
    ds: str = ""
    #: Whether it has rows that Spark has typed, good and bad ones.
    is_typed: bool = False
    #: The name of the hashes of its rows (headrace.lake.ingest.hash_files).
    hashes: str = ""


@dataclass(frozen=True)
class HashTask:
    """Hashes the keys of data files; yields the names of the hashes."""

    files: tuple[KeyedFile, ...]
    keys: tuple[str, ...]
    folder: Location

    def __call__(self, number: int) -> Iterator[dict[str, Any]]:
        mine = self.files[number]
        file = pq.ParquetFile(mine.path.local_path(), coerce_int96_timestamp_unit="us")
        # A data file that is older than a column has no keys.
        groups = file.num_row_groups if set(self.keys) <= set(file.schema_arrow.names) else 0
        found: list[I64] = []
        keyed: list[Mask] = []
        for group in range(groups):
            state = ["_state"] if mine.is_typed else []
            table = file.read_row_group(group, columns=[*self.keys, *state], use_threads=False)
            if mine.is_typed:
                table = table.filter(pc.equal(table.column("_state"), GOOD))
            if table.num_rows:
                hashes, whole = key_hashes([table.column(k) for k in self.keys])
                found.append(hashes)
                keyed.append(whole)
        yield {"file": number, "hashes": save_hashes(self.folder, found, keyed)}


@dataclass(frozen=True)
class RepeatTask:
    """Finds the hashes of one share of all: there twice among rows to load, or there and in the table."""

    mine: tuple[str, ...]
    loaded: tuple[str, ...]
    folder: Location
    #: Ranges of hashes of one length: memory is that of the largest, about as many hashes in each.
    shares: int

    def __call__(self, share: int) -> Iterator[dict[str, Any]]:
        mine = np.concatenate([np.zeros(0, np.int64), *(self._hashes(name, share) for name in self.mine)])
        mine.sort()
        found = [mine[1:][mine[1:] == mine[:-1]]]
        for name in self.loaded if len(mine) else ():
            loaded = self._hashes(name, share)
            place = np.minimum(np.searchsorted(mine, loaded), len(mine) - 1)
            found.append(loaded[mine[place] == loaded])
        repeated = np.unique(np.concatenate(found))
        path = self.folder / f"repeated-{uuid.uuid4()}.npy"
        save_array(path, repeated)
        yield {"hashes": len(repeated), "path": path.name}

    def _hashes(self, name: str, share: int) -> I64:
        return hashes_of_share(self.folder, name, share, self.shares)


@dataclass(frozen=True)
class SuspectTask:
    """Copies the keys and places of rows whose hash is there twice, of one data file."""

    files: tuple[KeyedFile, ...]
    keys: tuple[str, ...]
    #: By day and name, the number of a landing file; None: rows of the table, which have `ds` in place of a place.
    numbers: Mapping[tuple[str, str], int] | None
    folder: Location
    #: Of the data files that are written now; older ones may have narrower types.
    schema: pa.Schema

    def __call__(self, number: int) -> Iterator[dict[str, Any]]:
        file = self.files[number]
        hashes, keyed = load_hashes(self.folder, file.hashes)
        repeated = np.load((self.folder / REPEATED).local_path(), mmap_mode="r")
        place = np.minimum(np.searchsorted(repeated, hashes), len(repeated) - 1)
        rows = np.flatnonzero((repeated[place] == hashes) & keyed)
        if not len(rows):
            return
        table = self._take(file, rows)
        path = self.folder / f"suspects-{uuid.uuid4()}.parquet"
        with path.new_file() as local:
            pq.write_table(table, local, store_schema=False)
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
        for k, name in enumerate(self.keys):
            table = table.set_column(k, name, table.column(name).cast(self.schema.field(name).type))
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
