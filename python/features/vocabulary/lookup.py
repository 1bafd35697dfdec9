"""Vocabularies in memory: from a batch of values to their codes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.dataset.parquet.column_bytes import column_bytes
from headrace.features.functions.arrays import one_chunk
from headrace.features.vocabulary import mapped_chunks
from headrace.features.vocabulary.text_rows import TextRows
from headrace.schema import FIRST_CODE, NULL_CODE, OOV_CODE

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
        """What codes stand for; those that no value has are left out."""
        return _values_of(self.table, codes)

    def codes(self, values: pa.Array) -> Codes:
        """Codes of strings, integers or booleans: 0 for null, 1 for what the vocabulary lacks. [n] -> int32 [n]."""
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
        found = np.append(self.of_distinct(encoded.dictionary), np.int32(NULL_CODE))
        rows: npt.NDArray[np.int32] = pc.fill_null(encoded.indices, len(found) - 1).to_numpy(zero_copy_only=False)
        return found[rows]

    def of_distinct(self, values: pa.StringArray) -> Codes:
        """Codes of strings without nulls. [n] -> int32 [n]."""
        # -1 is the last: of what is not there.
        return np.append(self._codes, np.int32(OOV_CODE))[self._by_text.find(values)]

    def _of_integers(self, values: pa.Array) -> Codes:
        keys, codes = self.integers
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        numbers = pc.fill_null(values.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
        position = np.asarray(keys.get_indexer(pd.Index(numbers)), np.int64)
        found = np.where(position >= 0, codes[np.maximum(position, 0)], OOV_CODE) if len(codes) else OOV_CODE
        return np.where(valid, found, NULL_CODE).astype(np.int32)

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
        beyond = [i for i in long if not -(2**63) <= int(texts[int(i)].as_py()) < 2**63]
        rows = np.delete(rows, beyond)
        numbers = self._values.take(pa.array(rows)).cast(pa.int64()).to_numpy(zero_copy_only=False)
        return pd.Index(numbers, dtype="int64"), self._codes[rows]


def _values_of(table: pa.Table, codes: Collection[int]) -> dict[int, str]:
    found = table.filter(pc.is_in(table.column("code"), pa.array(codes, pa.int64())))
    return dict(zip(found.column("code").to_pylist(), found.column("value").to_pylist(), strict=True))


def lookup_of(found: pa.Table | Lookup) -> Lookup:
    """A vocabulary that is given as its table or as one that is ready."""
    return found if isinstance(found, Lookup) else Lookup(found)


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
        found: dict[int, str] = {}
        for group in range(self._groups):
            found |= _values_of(file.read_row_group(group, columns=SCHEMA.names), codes)
        return found

    @property
    def text_bytes(self) -> int:
        return self._text_bytes

    @property
    def cardinality(self) -> int:
        return self._highest + 1

    def of_distinct(self, values: pa.StringArray) -> Codes:
        found = np.full(len(values), OOV_CODE, np.int32)
        for batch in mapped_chunks.of_file(self.path, SCHEMA.names):
            mine = Lookup(pa.Table.from_batches([batch])).of_distinct(values)
            found = np.where(mine == OOV_CODE, found, mine)
        return found

    def _of_integers(self, values: pa.Array) -> Codes:
        return self._of_strings(values.cast(pa.string()))


@dataclass(frozen=True)
class DistinctLookup:
    """`Lookup.once`."""

    lookup: Lookup

    def codes(self, values: pa.Array) -> Codes:
        """As `Lookup.codes`."""
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
