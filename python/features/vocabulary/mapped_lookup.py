"""A vocabulary in files that all processes of a host map, for those whose index would cost each of them gigabytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.features.vocabulary import mapped_chunks
from headrace.features.vocabulary.lookup import SCHEMA, Codes, Lookup
from headrace.features.vocabulary.mapped_chunks import MappedChunks
from headrace.schema import FIRST_CODE, OOV_CODE
from headrace.storage import Location
from headrace.udfs.xxhash64 import xxhash64_strings

_VALUES, _HASHES, _ROWS = "values.arrow", "hashes", "rows"


class MappedLookup(Lookup):
    """A vocabulary whose values lie in mapped files, found by binary search in their sorted hashes."""

    @staticmethod
    def write(batches: Iterable[pa.RecordBatch], count: int, folder: Location) -> None:
        """Put a vocabulary's files into a folder; of its values, 16 bytes each are in memory.

        Args:
            batches: value and code (SCHEMA).
            count: rows of all of them.
            folder: is there.
        """
        hashes, start = np.empty(count, np.int64), 0

        def hashed() -> Iterator[pa.RecordBatch]:
            nonlocal start
            for batch in batches:
                hashes[start : start + batch.num_rows] = xxhash64_strings(batch.column(0))
                start += batch.num_rows
                yield batch

        mapped_chunks.write(hashed(), SCHEMA, folder / _VALUES)
        order = np.argsort(hashes, kind="stable")
        for name, numbers in ((_HASHES, hashes[order]), (_ROWS, order)):
            with (folder / name).new_file() as path:
                np.asarray(numbers, np.int64).tofile(path)

    @staticmethod
    def write_file(file: Path, folder: Location) -> None:
        """`write` of a file (value, code)."""
        batches = (pa.Table.from_batches([b]).cast(SCHEMA) for b in mapped_chunks.of_file(file, SCHEMA.names))
        MappedLookup.write((b for t in batches for b in t.to_batches()), pq.read_metadata(file).num_rows, folder)

    def __init__(self, folder: Location) -> None:
        """`folder`: see `write`."""
        self._chunks = MappedChunks(folder / _VALUES)
        count = len(self._chunks)
        self._sorted, self._rows = (_numbers(folder / name, count) for name in (_HASHES, _ROWS))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def text_bytes(self) -> int:
        """See Lookup."""
        return sum(int(batch.column("value").nbytes) for batch in self._chunks.batches)

    @property
    def table(self) -> pa.Table:
        """All of it."""
        return pa.Table.from_batches(self._chunks.batches, SCHEMA)

    @cached_property
    def cardinality(self) -> int:
        """See Lookup."""
        return int(pc.max(self.table["code"]).as_py()) + 1 if len(self) else FIRST_CODE

    def of_distinct(self, values: pa.StringArray) -> Codes:
        """See Lookup."""
        found = np.full(len(values), OOV_CODE, np.int32)
        hashes = np.asarray(xxhash64_strings(values), np.int64) if len(values) else np.empty(0, np.int64)
        # In their order each search begins in the pages, and mostly in the cache lines, of the one before.
        order = np.argsort(hashes)
        hashes = hashes[order]
        at = np.searchsorted(self._sorted, hashes)
        open_ = np.flatnonzero(at < len(self))
        # Several values may have one hash: the next in order is looked at until the hash is another.
        while len(open_):
            open_ = open_[self._sorted[at[open_]] == hashes[open_]]
            rows = self._rows[at[open_]]
            same = self._equal(rows, values.take(pa.array(order[open_])))
            found[order[open_[same]]] = self._code(rows[same])
            open_ = open_[~same]
            at[open_] += 1
            open_ = open_[at[open_] < len(self)]
        return found

    def _of_integers(self, values: pa.Array) -> Codes:
        return self._of_strings(values.cast(pa.string()))

    def _equal(self, rows: npt.NDArray[np.int64], values: pa.StringArray) -> npt.NDArray[np.bool_]:
        there = self._chunks.take("value", rows)
        return np.asarray(pc.equal(there, values).to_numpy(zero_copy_only=False), np.bool_)

    def _code(self, rows: npt.NDArray[np.int64]) -> Codes:
        return np.asarray(self._chunks.take("code", rows).to_numpy(zero_copy_only=False), np.int32)


def _numbers(file: Location, count: int) -> npt.NDArray[np.int64]:
    if not count:
        return np.empty(0, np.int64)
    return np.asarray(np.memmap(file.local_path(), np.int64, "r", shape=(count,)))
