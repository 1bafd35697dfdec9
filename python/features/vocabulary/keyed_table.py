"""Keyed tables in memory: what was learned of each value, looked up for batches of rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.vocabulary.lookup import Lookup
from headrace.schema import FIRST_CODE

#: The column of a keyed table that says which value a row is of: string, no null, none twice.
KEY = "key"


class KeyedTable:
    """A table of values by key, found as codes are (headrace.features.vocabulary.lookup)."""

    def __init__(self, table: pa.Table) -> None:
        """`table` has the column `key` and columns of int64 or float64 without nulls (nulls: a value that is missing).

        Rows are put in order of their keys, so that equal tables are equal files.
        """
        self.table: pa.Table = table.sort_by(KEY).combine_chunks()
        key = self.table.column(KEY)
        #: From a key to its row and FIRST_CODE.
        self.lookup = Lookup(
            pa.table({"value": key, "code": pa.array(np.arange(FIRST_CODE, FIRST_CODE + len(key)), pa.int64())})
        )

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def values(self) -> tuple[str, ...]:
        """Names of the columns besides the key."""
        return tuple(name for name in self.table.column_names if name != KEY)

    def rows(self, keys: pa.Array) -> npt.NDArray[np.int64]:
        """The row of each key (text, or integers or booleans by their spelling), -1 where there is none or it is null.

        [n] -> int64 [n].
        """
        return np.maximum(self.lookup.codes(keys).astype(np.int64) - FIRST_CODE, -1)

    def take(self, column: str, rows: npt.NDArray[np.int64], missing: float | int | None = None) -> pa.Array:
        """Values of a column at `rows`, `missing` (None: null) where that is -1."""
        index = pa.array(rows, mask=rows < 0)
        found = self.table.column(column).combine_chunks().take(index)
        if missing is None:
            return found
        return pc.if_else(pa.array(rows < 0), pa.scalar(missing, found.type), found)
