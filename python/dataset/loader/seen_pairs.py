"""Which pairs of two features a split's positive rows have: what users have seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from headrace.dataset.parquet.layout import RowGroup

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SeenPairs:
    """Pairs (user, item) of codes.

    keys: user * items + item, ascending, each once: int64 [pairs].
    items: codes of items.
    """

    keys: I64
    items: int

    @staticmethod
    def read(groups: Sequence[RowGroup], user: str, item: str, label: str, items: int) -> SeenPairs:
        """Those of the rows with a positive label; reads these three columns.

        Args:
            groups: the split's row groups.
            user: column of codes.
            item: column of codes.
            label: its column.
            items: codes of items.
        """
        found = []
        for g in groups:
            with pq.ParquetFile(g.path) as file:
                columns = file.read_row_group(g.index, columns=[user, item, label])
            positive = columns.column(label).to_numpy() > 0
            users, chosen = (columns.column(c).to_numpy().astype(np.int64)[positive] for c in (user, item))
            found.append(np.unique(users * items + chosen))
        return SeenPairs(np.unique(np.concatenate(found)) if found else np.empty(0, np.int64), items)

    def has(self, users: I64, items: I64) -> npt.NDArray[np.bool_]:
        """Whether a user [N] has seen the item beside it [N]."""
        wanted = users * self.items + items
        place = np.searchsorted(self.keys, wanted)
        found: npt.NDArray[np.bool_] = np.append(self.keys, -1)[place] == wanted
        return found
