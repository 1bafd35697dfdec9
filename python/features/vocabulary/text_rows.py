"""Where texts are in a column of distinct texts: a hash table over the column's own memory.

In C++ (native/cpp/dictionary.cpp) where `make native` has built it, which lets other threads run; else by pandas over
64-bit hashes, with the same results.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from headrace.dataset import native
from headrace.udfs.xxhash64 import xxhash64_strings

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
        """The row of each text, -1 where it is not there. Texts without nulls. int32 [n]."""
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
