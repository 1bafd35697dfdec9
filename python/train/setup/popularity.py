"""How often the codes of a dataset are looked up, from a sample of its rows: what the planner knows of hot rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headrace.dataset.parquet.layout import open_split
from headrace.embeddings.planner.popularity import Popularity
from headrace.embeddings.sharding_plan import Lookup, Table
from headrace.schema import DatasetSchema
from headrace.storage import Location

#: Rows that are looked at, at most, and row groups that they are from.
_ROWS, _ROW_GROUPS = 200_000, 8


def sampled_popularity(
    dataset: Location, schema: DatasetSchema, tables: Sequence[Table], lookups: Sequence[Lookup]
) -> dict[str, Popularity]:
    """By table, popularity in row groups spread over the split `train`. The same files, the same answer.

    Args:
        dataset: its folder.
        schema: its schema.
        tables: of the model.
        lookups: of them, those whose codes are the rows' own.

    Raises:
        UserError: there is no such split, or a file is damaged.
    """
    groups = open_split(dataset, "train", schema).row_groups
    chosen = groups[:: max(1, -(-len(groups) // _ROW_GROUPS))]
    each = max(1, _ROWS // max(1, len(chosen)))
    counts = {t.name: np.zeros(0, dtype=np.int64) for t in tables}
    for group in chosen:
        with pq.ParquetFile(group.path) as file:
            read = file.read_row_group(group.index, sorted({x.feature for x in lookups})).slice(0, each)
        for x in lookups:
            column = read.column(x.feature)
            found = np.bincount((pc.list_flatten(column) if x.is_list else column).to_numpy())
            if x.is_list and len(found):
                found[0] = 0  # a null's code is not looked up
            counts[x.table] = _add(counts[x.table], found)
    return {t.name: Popularity.sampled(counts[t.name], t.rows) for t in tables if counts[t.name].any()}


def _add(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    longer, shorter = (one, other) if len(one) > len(other) else (other, one)
    total = longer.astype(np.int64)
    total[: len(shorter)] += shorter
    return total
