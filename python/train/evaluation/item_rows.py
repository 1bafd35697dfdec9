"""The features of each item of a vocabulary, as the newest row of a split has them. Collective."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow.parquet as pq

from headrace.dataset.parquet.layout import SplitLayout
from headrace.dataset.parquet.lists import pad
from headrace.errors import UserError
from headrace.models.retrieval import ItemFeatures
from headrace.schema import DatasetSchema, Kind
from headrace.train.evaluation.ranks import Array, Ranks


def collect_item_features(
    ranks: Ranks, layout: SplitLayout, schema: DatasetSchema, item: str, names: Sequence[str], order_by: str | None
) -> ItemFeatures:
    """Read a split, each rank its share of the row groups; all ranks get all items.

    Args:
        names: features of items.
        order_by: a carried column's name in the dataset: a greater number is newer. None: the split's order.

    Raises:
        UserError: a feature that the dataset does not have.
    """
    if not names:
        return ItemFeatures(item)
    known = {f.name: f for f in (*schema.of(Kind.CONTINUOUS), *schema.of(Kind.CATEGORICAL))}
    for name in names:
        if name not in known:
            raise UserError(f"the model's items have the feature '{name}', which the dataset does not have")
    features = [known[name] for name in names]
    cardinality = known[item].cardinality or 0
    newest = np.full((cardinality, 2), -np.inf)  # order, position: numbers below 2^53
    columns: list[Array] = [
        np.zeros((cardinality, f.length), np.float32 if f.kind is Kind.CONTINUOUS else np.int64) for f in features
    ]

    def keep(codes: Array, age: Array, found: Sequence[Array]) -> None:
        """Of rows, those that are newer than what is there."""
        order = np.lexsort((age[:, 1], age[:, 0], codes))
        last = order[np.flatnonzero(np.diff(codes[order], append=-1))]
        before, now = newest[codes[last]], age[last]
        newer = (now[:, 0] > before[:, 0]) | ((now[:, 0] == before[:, 0]) & (now[:, 1] > before[:, 1]))
        last = last[newer]
        newest[codes[last]] = age[last]
        for column, values in zip(columns, found, strict=True):
            column[codes[last]] = values[last]

    world, before = ranks.world, np.cumsum([0, *(g.rows for g in layout.row_groups)])
    for i in range(world.rank, len(layout.row_groups), world.size):
        group = layout.row_groups[i]
        with pq.ParquetFile(group.path.local_path()) as file:
            table = file.read_row_group(group.index, columns=[item, *names, *([order_by] if order_by else [])])
        found = []
        for f in features:
            if f.is_list:
                matrix = np.zeros((table.num_rows, f.length), table[f.name].type.value_type.to_pandas_dtype())
                pad(table[f.name], matrix, f.name)
                found.append(matrix)
            else:
                found.append(table[f.name].to_numpy()[:, None])
        order = np.zeros(table.num_rows)
        if order_by is not None:
            order = np.nan_to_num(table[order_by].to_numpy().astype(np.float64), nan=-np.inf)
        position = before[i] + np.arange(table.num_rows)
        keep(table[item].to_numpy(), np.stack([order, position], axis=1), found)
    # The ranks tell each other what each knows of some items at a time.
    there = np.flatnonzero(newest[:, 1] >= 0)
    for rank in range(world.size):
        mine = there if rank == world.rank else there[:0]
        codes, age, *found = [ranks.gather_rows(x) for x in (mine, newest[mine], *(c[mine] for c in columns))]
        keep(codes, age, found)
    return ItemFeatures(item, dict(zip(names, columns, strict=True)))
