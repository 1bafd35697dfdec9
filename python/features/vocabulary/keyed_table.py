"""Keyed tables: what was learned of each value, looked up for batches of rows."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.vocabulary.lookup import Lookup
from headrace.schema import FIRST_CODE

#: The column of a keyed table that says which value a row is of: string, no null, none twice.
KEY = "key"


class KeyedTable:
    """A table of values by key in memory, found as codes are (headrace.features.vocabulary.lookup).

    For those that are too large: headrace.features.vocabulary.large_keyed_tables.
    """

    def __init__(self, table: pa.Table) -> None:
        """`table` has the column `key` and columns of int64 or float64 without nulls (nulls: a value that is missing).

        Rows are put in order of their keys, so that equal tables are equal files.
        """
        self._table = table.sort_by(KEY).combine_chunks()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def table(self) -> pa.Table:
        """All of it."""
        return self._table

    @property
    def text_bytes(self) -> int:
        """Bytes of all keys."""
        return int(self._table.column(KEY).nbytes)

    @property
    def schema(self) -> pa.Schema:
        """Of `table`."""
        return self._table.schema

    @property
    def values(self) -> tuple[str, ...]:
        """Names of the columns besides the key."""
        return tuple(name for name in self.schema.names if name != KEY)

    @cached_property
    def lookup(self) -> Lookup:
        """From a key to its row and FIRST_CODE."""
        codes = np.arange(FIRST_CODE, FIRST_CODE + len(self))
        return Lookup(pa.table({"value": self.table.column(KEY), "code": pa.array(codes, pa.int64())}))

    def rows(self, keys: pa.Array) -> npt.NDArray[np.int64]:
        """The row of each key (text, or integers or booleans by their spelling), -1 where there is none or it is null.

        [n] -> int64 [n].
        """
        return np.maximum(self.lookup.codes(keys).astype(np.int64) - FIRST_CODE, -1)

    def take(self, column: str, rows: npt.NDArray[np.int64], missing: float | int | None = None) -> pa.Array:
        """Values of a column at `rows`, `missing` (None: null) where that is -1."""
        found = self._taken(column, rows)
        if missing is None:
            return found
        return pc.if_else(pa.array(rows < 0), pa.scalar(missing, found.type), found)

    def _taken(self, column: str, rows: npt.NDArray[np.int64]) -> pa.Array:
        """Values of a column at `rows`, null where that is -1."""
        return self.table.column(column).combine_chunks().take(pa.array(rows, mask=rows < 0))


def keyed_of(found: pa.Table | KeyedTable) -> KeyedTable:
    """A keyed table that is given as such or as its rows."""
    return found if isinstance(found, KeyedTable) else KeyedTable(found)
