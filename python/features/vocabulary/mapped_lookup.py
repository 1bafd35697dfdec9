"""A vocabulary in files that all processes of a host map, for those whose index would cost each of them gigabytes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.features.vocabulary.lookup import SCHEMA, Codes, Lookup
from headrace.schema import FIRST_CODE, OOV_CODE
from headrace.storage import Location
from headrace.udfs.xxhash64 import xxhash64_strings

_VALUES, _HASHES, _ROWS = "values.arrow", "hashes", "rows"
#: Of a record batch: a text column's offsets have 32 bits.
_CHUNK_ROWS = 1 << 20


class MappedLookup(Lookup):
    """A vocabulary whose values lie in mapped files, found by binary search in their sorted hashes."""

    @staticmethod
    def write(lookup: Lookup, folder: Location) -> None:
        """Put a vocabulary's files into a folder."""
        _write(lookup.table.to_batches(_CHUNK_ROWS), len(lookup), folder)

    @staticmethod
    def write_file(file: Path, folder: Location) -> None:
        """The same of a file (value, code), a row group in memory at a time; 16 bytes a value are."""
        parquet = pq.ParquetFile(file)
        groups = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
        if any(rows != _CHUNK_ROWS for rows in groups[:-1]) or max(groups, default=0) > _CHUNK_ROWS:
            MappedLookup.write(Lookup(parquet.read()), folder)
            return
        tables = (parquet.read_row_group(i).cast(SCHEMA).combine_chunks() for i in range(len(groups)))
        _write((b for table in tables for b in table.to_batches()), sum(groups), folder)

    def __init__(self, folder: Location) -> None:
        """`folder`: see `write`."""
        file = pa.ipc.open_file(pa.memory_map(str((folder / _VALUES).local_path())))
        self._batches = [file.get_batch(i) for i in range(file.num_record_batches)]
        count = sum(b.num_rows for b in self._batches)
        self._sorted, self._rows = (_numbers(folder / name, count) for name in (_HASHES, _ROWS))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def table(self) -> pa.Table:
        """All of it."""
        return pa.Table.from_batches(self._batches, SCHEMA)

    @cached_property
    def cardinality(self) -> int:
        """See Lookup."""
        return int(pc.max(self.table["code"]).as_py()) + 1 if len(self) else FIRST_CODE

    def of_distinct(self, values: pa.StringArray) -> Codes:
        """See Lookup."""
        found = np.full(len(values), OOV_CODE, np.int32)
        hashes = np.asarray(xxhash64_strings(values), np.int64) if len(values) else np.empty(0, np.int64)
        at = np.searchsorted(self._sorted, hashes)
        open_ = np.flatnonzero(at < len(self))
        # Several values may have one hash: the next in order is looked at until the hash is another.
        while len(open_):
            open_ = open_[self._sorted[at[open_]] == hashes[open_]]
            rows = self._rows[at[open_]]
            same = self._equal(rows, values.take(pa.array(open_)))
            found[open_[same]] = self._code(rows[same])
            open_ = open_[~same]
            at[open_] += 1
            open_ = open_[at[open_] < len(self)]
        return found

    def _of_integers(self, values: pa.Array) -> Codes:
        return self._of_strings(values.cast(pa.string()))

    def _equal(self, rows: npt.NDArray[np.int64], values: pa.StringArray) -> npt.NDArray[np.bool_]:
        there = self._taken("value", rows)
        return np.asarray(pc.equal(there, values).to_numpy(zero_copy_only=False), np.bool_)

    def _code(self, rows: npt.NDArray[np.int64]) -> Codes:
        return np.asarray(self._taken("code", rows).to_numpy(zero_copy_only=False), np.int32)

    def _taken(self, column: str, rows: npt.NDArray[np.int64]) -> pa.Array:
        """Values of some rows, by batch."""
        which = rows // _CHUNK_ROWS
        order = np.argsort(which, kind="stable")
        pieces = [
            self._batches[c].column(column).take(pa.array(rows[order][which[order] == c] - c * _CHUNK_ROWS))
            for c in np.unique(which).tolist()
        ]
        if not pieces:
            return pa.array([], SCHEMA.field(column).type)
        back = np.empty(len(rows), np.int64)
        back[order] = np.arange(len(rows))
        return pa.concat_arrays(pieces).take(pa.array(back))


def _numbers(file: Location, count: int) -> npt.NDArray[np.int64]:
    if not count:
        return np.empty(0, np.int64)
    return np.asarray(np.memmap(file.local_path(), np.int64, "r", shape=(count,)))


def _write(batches: Iterable[pa.RecordBatch], count: int, folder: Location) -> None:
    """`batches`: of _CHUNK_ROWS values each, but the last."""
    hashes, start = np.empty(count, np.int64), 0
    with (folder / _VALUES).new_file() as path, pa.OSFile(str(path), "wb") as sink:
        with pa.ipc.new_file(sink, SCHEMA) as writer:
            for batch in batches:
                writer.write_batch(batch)
                hashes[start : start + batch.num_rows] = xxhash64_strings(batch.column(0))
                start += batch.num_rows
    order = np.argsort(hashes, kind="stable")
    for name, numbers in ((_HASHES, hashes[order]), (_ROWS, order)):
        with (folder / name).new_file() as path:
            np.asarray(numbers, np.int64).tofile(path)
