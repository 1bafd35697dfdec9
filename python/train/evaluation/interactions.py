"""Which items the users of a split have met, read row group by row group, each rank its share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow.parquet as pq

from headrace.dataset.parquet.layout import SplitLayout
from headrace.schema import DatasetSchema
from headrace.train.evaluation.ranks import I64, Ranks
from headrace.train.evaluation.slices import check_no_nulls, ids_here


def interactions(
    ranks: Ranks, layout: SplitLayout, schema: DatasetSchema, user: str, item: str
) -> Iterator[tuple[I64, I64]]:
    """(user, code of the item) of the positive rows of a split: parts of int64 [n] each. Collective at its end.

    Every rank gets equally many parts, some of them empty.

    Args:
        user: the carried column's name in the dataset.
        item: a categorical feature of one code a row.

    Raises:
        UserError: rows without a user.
    """
    rank, size, nulls = ranks.world.rank, ranks.world.size, 0
    for first in range(0, len(layout.row_groups), size):
        if first + rank >= len(layout.row_groups):
            yield np.zeros(0, np.int64), np.zeros(0, np.int64)
            continue
        group = layout.row_groups[first + rank]
        with pq.ParquetFile(group.path.local_path()) as file:
            table = file.read_row_group(group.index, columns=[user, item, schema.label.name])
        positive = table[schema.label.name].to_numpy() > 0
        ids, missing = ids_here(table[user].to_numpy()[positive], user, schema)
        nulls += missing
        yield ids, table[item].to_numpy()[positive].astype(np.int64)
    check_no_nulls(ranks, nulls, user)
