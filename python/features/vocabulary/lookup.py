"""Vocabularies to look into: in memory, in a file, or in files that all processes of a host map."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.compute import pc
from headrace.config.schema import FIRST_CODE, NULL_CODE, OOV_CODE
from headrace.dataset import native
from headrace.dataset.layout import column_bytes
from headrace.features.functions.arrays import one_chunk
from headrace.storage import Location
from headrace.udfs.arrow import xxhash64_strings

Rows = npt.NDArray[np.int32]


class TextRows:
    """The rows of a column by their texts. Threads may look up at once."""

    def __init__(self, values: pa.StringArray) -> None:
        """`values`: no null, none twice."""
        self._values = values
        self._lib = native.library()
        if self._lib is None:
            # 64 bits a value: millions need no Python object each.
            self._hashes: pd.Index[int] = pd.Index(xxhash64_strings(values), dtype="int64")
            return
        offsets, data = _texts(values)
        self._table = self._lib.headrace_text_rows(offsets, data, len(values))
        if not self._table:
            raise MemoryError(f"no memory for a table of {len(values)} texts")
        weakref.finalize(self, self._lib.headrace_text_rows_free, self._table)

    def __reduce__(self) -> tuple[Any, ...]:
        return TextRows, (self._values,)

    def find(self, texts: pa.StringArray) -> Rows:
        """Return the row of each text, -1 where it is not there. Texts without nulls. int32 [n]."""
        if not len(texts) or not len(self._values):
            return np.full(len(texts), -1, np.int32)
        if self._lib is None:
            return self._by_hash(texts)
        rows = np.empty(len(texts), np.int32)
        offsets, data = _texts(texts)
        self._lib.headrace_text_rows_find(self._table, offsets, data, len(texts), rows.ctypes.data)
        return rows

    def _by_hash(self, texts: pa.StringArray) -> Rows:
        if not self._hashes.is_unique:  # two values with one hash: exact, but the set is built each time
            return np.asarray(pc.fill_null(pc.index_in(texts, self._values), -1), np.int32)
        rows = np.asarray(self._hashes.get_indexer(pd.Index(xxhash64_strings(texts))), np.int32)
        # Same hash is not yet same value.
        hit = np.flatnonzero(rows >= 0)
        same = pc.equal(self._values.take(pa.array(rows[hit])), texts.take(pa.array(hit)))
        rows[hit[~same.to_numpy(zero_copy_only=False)]] = -1
        return rows


def _texts(values: pa.StringArray) -> tuple[int, int | None]:
    """Addresses of the offsets and the data; None: no text has a byte."""
    _, offsets, data = values.buffers()
    return offsets.address + 4 * values.offset, None if data is None else data.address


#: Of a record batch: a text column's offsets have 32 bits.
_BATCH_ROWS = 1 << 20


def table_batches(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """Return a table's rows in batches for `write_batches`."""
    yield from table.to_batches(_BATCH_ROWS)


def file_batches(file: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Return columns of a Parquet file in batches for `write_batches`; a row group in memory at a time."""
    parquet = pq.ParquetFile(file)
    for group in range(parquet.num_row_groups):
        yield from table_batches(parquet.read_row_group(group, list(columns)))


def write_batches(batches: Iterable[pa.RecordBatch], schema: pa.Schema, file: Location) -> None:
    """Put batches into a file of `schema`."""
    with file.new_file() as path, pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


class MappedChunks:
    """The columns of a file that `write_batches` wrote, mapped."""

    def __init__(self, file: Location) -> None:
        """Map it."""
        opened = pa.ipc.open_file(pa.memory_map(str(file.local_path())))
        self.schema: pa.Schema = opened.schema
        self.batches: list[pa.RecordBatch] = [opened.get_batch(i) for i in range(opened.num_record_batches)]
        self._ends = np.cumsum([b.num_rows for b in self.batches], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def take(self, column: str, rows: npt.NDArray[np.int64]) -> pa.Array:
        """Return values of some rows of a column."""
        if not len(rows):
            return pa.array([], self.schema.field(column).type)
        batch_index = np.searchsorted(self._ends, rows, "right")
        order = np.argsort(batch_index, kind="stable")
        pieces = []
        for positions in np.split(order, np.flatnonzero(np.diff(batch_index[order])) + 1):
            batch = self.batches[batch_index[positions[0]]]
            start = int(self._ends[batch_index[positions[0]]]) - batch.num_rows
            pieces.append(batch.column(column).take(pa.array(rows[positions] - start)))
        back = np.empty(len(rows), np.int64)
        back[order] = np.arange(len(rows))
        return pa.concat_arrays(pieces).take(pa.array(back))


Codes = npt.NDArray[np.int32]

#: Of a vocabulary's table.
SCHEMA = pa.schema([pa.field("value", pa.string(), nullable=False), pa.field("code", pa.int64(), nullable=False)])


class Lookup:
    """One pinned vocabulary. Its indexes are built when first asked for and serve all later batches."""

    def __init__(self, table: pa.Table) -> None:
        """`table` has columns value (string) and code (int64), no value and no code twice."""
        self.table = table.select(SCHEMA.names).cast(SCHEMA).combine_chunks()
        self._values: pa.StringArray = one_chunk(self.table.column("value"))
        self._codes = self.table.column("code").to_numpy().astype(np.int32)

    def __len__(self) -> int:
        return len(self._codes)

    @property
    def text_bytes(self) -> int:
        """Bytes of all values."""
        return int(self._values.nbytes)

    @property
    def cardinality(self) -> int:
        """The highest code and one: rows of the embedding table, the two special codes included."""
        return int(self._codes.max()) + 1 if len(self._codes) else FIRST_CODE

    def values_of(self, codes: Collection[int]) -> dict[int, str]:
        """Return the values of codes; codes without a value are left out."""
        return _values_of(self.table, codes)

    def codes(self, values: pa.Array) -> Codes:
        """Return codes of strings, integers or booleans [n]: 0 for null, 1 for unknown values. int32 [n]."""
        if pa.types.is_string(values.type):
            return self._of_strings(values)
        if pa.types.is_boolean(values.type):
            return self._of_strings(pc.if_else(values, "true", "false"))
        return self._of_integers(values)

    @property
    def distinct(self) -> DistinctLookup:
        """The same for values of which none is there twice, so that they need not be made distinct first."""
        return DistinctLookup(self)

    def _of_strings(self, values: pa.StringArray) -> Codes:
        # A value is looked up once for all its rows in the batch.
        encoded = values.dictionary_encode()
        distinct_codes = np.append(self.of_distinct(encoded.dictionary), np.int32(NULL_CODE))
        rows: npt.NDArray[np.int32] = pc.fill_null(encoded.indices, len(distinct_codes) - 1).to_numpy(
            zero_copy_only=False
        )
        return distinct_codes[rows]

    def of_distinct(self, values: pa.StringArray) -> Codes:
        """Return codes of strings without nulls. [n] -> int32 [n]."""
        # -1 is the last: of what is not there.
        return np.append(self._codes, np.int32(OOV_CODE))[self._by_text.find(values)]

    def _of_integers(self, values: pa.Array) -> Codes:
        keys, codes = self.integers
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        numbers = pc.fill_null(values.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
        position = np.asarray(keys.get_indexer(pd.Index(numbers)), np.int64)
        integer_codes = np.where(position >= 0, codes[np.maximum(position, 0)], OOV_CODE) if len(codes) else OOV_CODE
        return np.where(valid, integer_codes, NULL_CODE).astype(np.int32)

    @cached_property
    def _by_text(self) -> TextRows:
        return TextRows(self._values)

    @cached_property
    def integers(self) -> tuple[pd.Index[int], Codes]:
        """The values that are integers spelled as Spark spells them ('7', not '07': that one is only a text)."""
        shape = pc.match_substring_regex(self._values, r"^(0|-?[1-9][0-9]{0,18})$")
        rows = np.flatnonzero(shape.to_numpy(zero_copy_only=False))
        texts = self._values.take(pa.array(rows))
        # 19 digits may still be beyond 64 bits.
        long = np.flatnonzero(pc.greater_equal(pc.utf8_length(texts), 19).to_numpy(zero_copy_only=False))
        too_large = [i for i in long if not -(2**63) <= int(texts[int(i)].as_py()) < 2**63]
        rows = np.delete(rows, too_large)
        numbers = self._values.take(pa.array(rows)).cast(pa.int64()).to_numpy(zero_copy_only=False)
        return pd.Index(numbers, dtype="int64"), self._codes[rows]


def _values_of(table: pa.Table, codes: Collection[int]) -> dict[int, str]:
    matches = table.filter(pc.is_in(table.column("code"), pa.array(codes, pa.int64())))
    return dict(zip(matches.column("code").to_pylist(), matches.column("value").to_pylist(), strict=True))


def lookup_of(vocabulary: pa.Table | Lookup) -> Lookup:
    """Return a vocabulary that is given as its table or as one that is ready."""
    return vocabulary if isinstance(vocabulary, Lookup) else Lookup(vocabulary)


class FileLookup(Lookup):
    """A vocabulary too large for a worker's memory: looked up in its file, a row group at a time.

    Each batch of values costs a read of the whole file, so it is for batches of many distinct values (`once`).
    """

    def __init__(self, path: Path, folder: object = None) -> None:
        """Open it.

        Args:
            path: as `FittedWorkflow.save` writes it, in order of code.
            folder: what removes the file when it is gone.
        """
        self.path, self._folder = path, folder
        metadata = pq.read_metadata(path)
        self._rows, self._groups = metadata.num_rows, metadata.num_row_groups
        self._text_bytes = sum(column_bytes(metadata, "value"))
        self._highest = FIRST_CODE - 1
        if self._rows:
            last = pq.ParquetFile(path).read_row_group(self._groups - 1, columns=["code"])
            self._highest = pc.max(last.column("code")).as_py()

    def __len__(self) -> int:
        return int(self._rows)

    @property
    def table(self) -> pa.Table:
        """All of it, read anew."""
        return pq.read_table(self.path)

    def values_of(self, codes: Collection[int]) -> dict[int, str]:
        file = pq.ParquetFile(self.path)
        values: dict[int, str] = {}
        for group in range(self._groups):
            values |= _values_of(file.read_row_group(group, columns=SCHEMA.names), codes)
        return values

    @property
    def text_bytes(self) -> int:
        return self._text_bytes

    @property
    def cardinality(self) -> int:
        return self._highest + 1

    def of_distinct(self, values: pa.StringArray) -> Codes:
        codes = np.full(len(values), OOV_CODE, np.int32)
        for batch in file_batches(self.path, SCHEMA.names):
            group_codes = Lookup(pa.Table.from_batches([batch])).of_distinct(values)
            codes = np.where(group_codes == OOV_CODE, codes, group_codes)
        return codes

    def _of_integers(self, values: pa.Array) -> Codes:
        return self._of_strings(values.cast(pa.string()))


@dataclass(frozen=True)
class DistinctLookup:
    """`Lookup.once`."""

    lookup: Lookup

    def codes(self, values: pa.Array) -> Codes:
        """Return the same as `Lookup.codes`."""
        if isinstance(self.lookup, FileLookup) and not pa.types.is_boolean(values.type):
            values = values.cast(pa.string())
        if not pa.types.is_string(values.type):
            return self.lookup.codes(values)
        if not values.null_count:
            return self.lookup.of_distinct(values)
        out = np.full(len(values), NULL_CODE, np.int32)
        if values.null_count == 1 and not values[-1].is_valid:  # no text is copied
            out[:-1] = self.lookup.of_distinct(values[:-1])
            return out
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        out[valid] = self.lookup.of_distinct(values.drop_null())
        return out


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

        write_batches(hashed(), SCHEMA, folder / _VALUES)
        order = np.argsort(hashes, kind="stable")
        for name, numbers in ((_HASHES, hashes[order]), (_ROWS, order)):
            with (folder / name).new_file() as path:
                np.asarray(numbers, np.int64).tofile(path)

    @staticmethod
    def write_file(file: Path, folder: Location) -> None:
        """`write` of a file (value, code)."""
        batches = (pa.Table.from_batches([b]).cast(SCHEMA) for b in file_batches(file, SCHEMA.names))
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
        codes = np.full(len(values), OOV_CODE, np.int32)
        hashes = np.asarray(xxhash64_strings(values), np.int64) if len(values) else np.empty(0, np.int64)
        # In their order each search begins in the pages, and mostly in the cache lines, of the one before.
        order = np.argsort(hashes)
        hashes = hashes[order]
        positions = np.searchsorted(self._sorted, hashes)
        open_ = np.flatnonzero(positions < len(self))
        # Several values may have one hash: the next in order is looked at until the hash is another.
        while len(open_):
            open_ = open_[self._sorted[positions[open_]] == hashes[open_]]
            rows = self._rows[positions[open_]]
            same = self._equal(rows, values.take(pa.array(order[open_])))
            codes[order[open_[same]]] = self._code(rows[same])
            open_ = open_[~same]
            positions[open_] += 1
            open_ = open_[positions[open_] < len(self)]
        return codes

    def _of_integers(self, values: pa.Array) -> Codes:
        return self._of_strings(values.cast(pa.string()))

    def _equal(self, rows: npt.NDArray[np.int64], values: pa.StringArray) -> npt.NDArray[np.bool_]:
        candidates = self._chunks.take("value", rows)
        return np.asarray(pc.equal(candidates, values).to_numpy(zero_copy_only=False), np.bool_)

    def _code(self, rows: npt.NDArray[np.int64]) -> Codes:
        return np.asarray(self._chunks.take("code", rows).to_numpy(zero_copy_only=False), np.int32)


def _numbers(file: Location, count: int) -> npt.NDArray[np.int64]:
    if not count:
        return np.empty(0, np.int64)
    return np.asarray(np.memmap(file.local_path(), np.int64, "r", shape=(count,)))
