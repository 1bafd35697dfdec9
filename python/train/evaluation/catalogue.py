"""What is recommended, whether it is liked or not: how much of the catalogue, how popular, how new. Collective."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq

from headrace.dataset.parquet.layout import SplitLayout
from headrace.schema import DatasetSchema, Kind
from headrace.train.evaluation.bootstrap import F64, NO_REPLICATES, Bootstrap
from headrace.train.evaluation.ranking import RankedLists, mean_by_slice
from headrace.train.evaluation.ranks import I64, Ranks
from headrace.train.evaluation.rows import Dimension

#: Of lists, and sliced as those of ranking are.
METRICS = ("popularity_at_k", "popularity_lift_at_k", "novelty_at_k")
#: Of all lists together.
COVERAGE = "coverage_at_k"


@dataclass(frozen=True)
class Occurrences:
    """How often each code of a feature is in the split `train`: in rows, and in positive rows. int64 [cardinality]."""

    rows: I64
    positives: I64


def count_occurrences(
    ranks: Ranks, layout: SplitLayout, schema: DatasetSchema, names: Collection[str]
) -> dict[str, Occurrences]:
    """Count the codes of features in a split, each rank in its share of the row groups. Collective."""
    if not names:
        return {}
    features = {f.name: f for f in schema.of(Kind.CATEGORICAL) if f.name in names}
    found = {name: np.zeros((2, f.cardinality or 0), np.int64) for name, f in features.items()}
    world = ranks.world
    for group in layout.row_groups[world.rank :: world.size]:
        with pq.ParquetFile(group.path.local_path()) as file:
            table = file.read_row_group(group.index, columns=[*features, schema.label.name])
        positive = table[schema.label.name].to_numpy() > 0
        for name, counts in found.items():
            codes = table[name].to_numpy()
            counts[0] += np.bincount(codes, minlength=counts.shape[1])
            counts[1] += np.bincount(codes[positive], minlength=counts.shape[1])
    return {name: Occurrences(*ranks.add_up(counts)) for name, counts in found.items()}


def catalogue_metrics(
    ranks: Ranks,
    lists: RankedLists,
    positives: I64,
    first_code: int,
    k: int,
    *,
    dimensions: Sequence[Dimension] = (),
    bootstrap: Bootstrap = NO_REPLICATES,
) -> tuple[list[dict[str, F64]], float | None]:
    """Metrics of the items among the first k of each list.

    popularity_at_k: positive training rows of an item, mean over the places of a list and then over lists (average
    recommendation popularity: Yin et al., 2012). popularity_lift_at_k: that over the popularity of the items of the
    positive training rows, less 1; above 0 the model favours popular items (Abdollahpouri et al., 2020).
    novelty_at_k: mean of -log2 of the item's share of the positive training rows, in bits; of an item that has none as
    if it had one (Zhou et al., 2010). coverage_at_k: share of the vocabulary's items that is in any list.

    Args:
        lists: with `items`, which are codes.
        positives: of each code, int64 [cardinality].
        first_code: of the first item of the vocabulary.

    Returns:
        For all lists and for each dimension, by metric: float64 [1 + replicates, slices]; and coverage_at_k.
    """
    assert lists.items is not None
    near = lists.place < k
    of, items = lists.list[near], lists.items[near]
    size = np.bincount(of, minlength=len(lists.ids))

    def mean(values: F64) -> F64:
        return np.bincount(of, weights=values, minlength=len(lists.ids)) / size

    total = max(int(positives.sum()), 1)
    popularity = mean(positives[items].astype(np.float64))
    usual = float(sum(n * n for n in positives.tolist())) / total
    by_list = {"popularity_at_k": popularity, "novelty_at_k": mean(-np.log2(np.maximum(positives[items], 1) / total))}
    found = mean_by_slice(ranks, by_list, lists, dimensions, bootstrap)
    for values in found:
        lift = values["popularity_at_k"] / usual - 1 if usual else np.full(values["popularity_at_k"].shape, np.nan)
        values["popularity_lift_at_k"] = lift
    shown = np.zeros(len(positives), np.int64)
    shown[items] = 1
    distinct = np.count_nonzero(ranks.add_up(shown)[first_code:])
    known = len(positives) - first_code
    return found, distinct / known if known > 0 else None
