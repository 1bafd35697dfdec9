"""Metrics of ranked lists at K: of candidate lists whose rows are on any ranks, and of places in a full ranking.

Only the places of a list's relevant items matter. In a candidate list ("sampled ranking") these are places among the
list's rows; in a full ranking among all items of the vocabulary (headrace.train.evaluation.full_ranking). Among equal
scores relevant items are placed last, so that a constant model gains nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq

from headrace.config.schema import DatasetSchema, Kind
from headrace.dataset.layout import SplitLayout
from headrace.train.evaluation.bootstrap import NO_REPLICATES, Bootstrap, sum_by_cell
from headrace.train.evaluation.ranks import (
    F64,
    I64,
    OVERALL,
    Array,
    Dimension,
    Ranks,
    ScoredRows,
    by_id,
    check_scores,
    sort_keys,
    unpacked,
)

LIST_METRICS = ("hr_at_k", "ndcg_at_k", "recall_at_k", "mrr_at_k", "map_at_k")


def full_name(metric: str, k: int) -> str:
    """Return the name of a metric of lists at k in a full ranking: `ndcg_at_20_full`."""
    return f"{metric.removesuffix('_at_k')}_at_{k}_full"


@dataclass(frozen=True)
class Hits:
    """The relevant items of lists.

    Attributes:
        list: position of each item's list, ascending, int64 [hits].
        place: place in the list from 0, ascending within a list, int64 [hits].
        relevant: number of relevant items of each list, int64 [lists].
    """

    list: I64
    place: I64
    relevant: I64


def metrics_of_places(hits: Hits, k: int) -> dict[str, F64]:
    """Return the metrics of each list that has a relevant item (NaN for others), float64 [lists] each.

    hr_at_k: 1 where a relevant item is among the first k (He et al., 2017). ndcg_at_k: binary gains, discount
    1 / log2(place + 2), over the best possible. recall_at_k: share of the relevant items among the first k. mrr_at_k:
    1 / (place + 1) of the first one among the first k, else 0. map_at_k: mean precision at those among the first k,
    over min(k, relevant items).
    """
    n = len(hits.relevant)
    order = np.arange(len(hits.list)) - np.searchsorted(hits.list, hits.list)  # number of earlier hits in the list
    near = hits.place < k
    list_of, place = hits.list[near], hits.place[near]

    def total(values: F64) -> F64:
        return np.bincount(list_of, weights=values, minlength=n).astype(np.float64)

    count = total(np.ones(len(list_of)))
    best = np.cumsum(1 / np.log2(np.arange(k) + 2))[np.clip(hits.relevant, 1, k) - 1]
    first = np.where(order[near] == 0, 1 / (place + 1), 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        metrics = {
            "hr_at_k": np.minimum(count, 1),
            "ndcg_at_k": total(1 / np.log2(place + 2)) / best,
            "recall_at_k": count / hits.relevant,
            "mrr_at_k": total(first),
            "map_at_k": total((order[near] + 1) / (place + 1)) / np.minimum(hits.relevant, k),
        }
    return {name: np.where(hits.relevant > 0, values, np.nan) for name, values in metrics.items()}


@dataclass(frozen=True)
class RankedLists:
    """Complete lists on this rank, or their first rows; best row first.

    Attributes:
        ids: ids of the lists, int64 [lists].
        list: position of each row's list in `ids`, int64 [n].
        place: place of each row from 0, int64 [n].
        items: item of each row, int64 [n], or None.
        hits: the relevant items, also those after the rows that are here.
        slices: for each dimension, the slice of each list, which is that of its first relevant row; -1 without one;
            int64 [lists].
    """

    ids: I64
    list: I64
    place: I64
    items: I64 | None
    hits: Hits
    slices: tuple[I64, ...]


def ranked_lists(ranks: Ranks, rows: ScoredRows, items: I64 | None = None) -> RankedLists:
    """Bring the rows of each list to one rank, and order them. Collective.

    Args:
        rows: this rank's rows; `users` are the ids of the lists.
        items: item of each row, int64 [n].

    Raises:
        UserError: a score is NaN.
    """
    check_scores(ranks, rows.scores)
    assert rows.users is not None
    more: list[Array] = [] if items is None else [items]
    ids, (keys, *columns) = by_id(ranks, rows.users, [sort_keys(rows), *more, *rows.slices])
    scores, labels = unpacked(keys)
    distinct, list_of = np.unique(ids, return_inverse=True)
    order = np.lexsort((labels, -scores, list_of))
    list_of, columns = list_of[order], [c[order] for c in columns]
    starts = np.flatnonzero(np.diff(list_of, prepend=-1))
    place = np.arange(len(list_of)) - starts[list_of]
    labels = labels[order]
    sorted_items = None if items is None else columns.pop(0)
    relevant = np.bincount(list_of[labels], minlength=len(distinct)).astype(np.int64)
    first = np.flatnonzero(labels)[::-1]  # reversed, so that a list's first hit is written last and stays
    slices = []
    for codes in columns:
        of_list = np.full(len(distinct), -1, np.int64)
        of_list[list_of[first]] = codes[first]
        slices.append(of_list)
    return RankedLists(
        distinct, list_of, place, sorted_items, Hits(list_of[labels], place[labels], relevant), tuple(slices)
    )


def ranking_metrics(
    ranks: Ranks,
    lists: RankedLists,
    k: int,
    *,
    dimensions: Sequence[Dimension] = (),
    bootstrap: Bootstrap = NO_REPLICATES,
) -> list[dict[str, F64]]:
    """Return the means of `LIST_METRICS` over lists with a relevant item: all, then by dimension. Collective.

    Returns:
        For all lists and for each dimension, by metric: float64 [1 + replicates, slices], NaN without such a list.
    """
    return mean_by_slice(ranks, metrics_of_places(lists.hits, k), lists, dimensions, bootstrap)


def mean_by_slice(
    ranks: Ranks, values: dict[str, F64], lists: RankedLists, dimensions: Sequence[Dimension], bootstrap: Bootstrap
) -> list[dict[str, F64]]:
    """Return means of values of lists, float64 [lists] with NaN for lists that do not count; see `ranking_metrics`."""
    counts = ~np.isnan(next(iter(values.values())))
    means = []
    for number, dimension in enumerate((OVERALL, *dimensions)):
        slice_of = np.zeros(len(lists.ids), np.int64) if number == 0 else lists.slices[number - 1]
        chosen = counts & (slice_of >= 0)
        sums = sum_by_cell(
            ranks,
            len(dimension.values),
            slice_of[chosen],
            lists.ids[chosen],
            {"lists": np.ones(int(chosen.sum()), np.int64)},
            {name: x[chosen] for name, x in values.items()},
            bootstrap,
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            means.append({name: sums[name] / sums["lists"] for name in values})
    return means


#: Metrics of the items of lists, which are sliced like those of ranking.
METRICS = ("popularity_at_k", "popularity_lift_at_k", "novelty_at_k")
#: Metric of all lists together.
COVERAGE = "coverage_at_k"


@dataclass(frozen=True)
class Occurrences:
    """Number of rows and of positive rows of each code of a feature in the split `train`. int64 [cardinality]."""

    rows: I64
    positives: I64


def count_occurrences(
    ranks: Ranks, layout: SplitLayout, schema: DatasetSchema, names: Collection[str]
) -> dict[str, Occurrences]:
    """Count the codes of features in a split, each rank in its share of the row groups. Collective."""
    if not names:
        return {}
    features = {f.name: f for f in schema.of(Kind.CATEGORICAL) if f.name in names}
    counts_of = {name: np.zeros((2, f.cardinality or 0), np.int64) for name, f in features.items()}
    world = ranks.world
    for group in layout.row_groups[world.rank :: world.size]:
        with pq.ParquetFile(group.path.local_path()) as file:
            table = file.read_row_group(group.index, columns=[*features, schema.label.name])
        positive = table[schema.label.name].to_numpy() > 0
        for name, counts in counts_of.items():
            codes = table[name].to_numpy()
            counts[0] += np.bincount(codes, minlength=counts.shape[1])
            counts[1] += np.bincount(codes[positive], minlength=counts.shape[1])
    return {name: Occurrences(*ranks.add_up(counts)) for name, counts in counts_of.items()}


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
    """Return the metrics of the items among the first k of each list.

    popularity_at_k: positive training rows of an item, mean over the places of a list and then over lists (average
    recommendation popularity: Yin et al., 2012). popularity_lift_at_k: that over the popularity of the items of the
    positive training rows, less 1; above 0 the model favours popular items (Abdollahpouri et al., 2020).
    novelty_at_k: mean of -log2 of the item's share of the positive training rows, in bits; of an item that has none as
    if it had one (Zhou et al., 2010). coverage_at_k: share of the vocabulary's items that is in any list.

    Args:
        lists: lists with `items`, which are codes.
        positives: number of positive training rows of each code, int64 [cardinality].
        first_code: code of the first item of the vocabulary.

    Returns:
        for all lists and for each dimension, by metric: float64 [1 + replicates, slices]; and coverage_at_k.
    """
    assert lists.items is not None
    near = lists.place < k
    list_of, items = lists.list[near], lists.items[near]
    size = np.bincount(list_of, minlength=len(lists.ids))

    def mean(values: F64) -> F64:
        return np.bincount(list_of, weights=values, minlength=len(lists.ids)) / size

    total = max(int(positives.sum()), 1)
    popularity = mean(positives[items].astype(np.float64))
    usual = float(sum(n * n for n in positives.tolist())) / total
    by_list = {"popularity_at_k": popularity, "novelty_at_k": mean(-np.log2(np.maximum(positives[items], 1) / total))}
    means = mean_by_slice(ranks, by_list, lists, dimensions, bootstrap)
    for values in means:
        lift = values["popularity_at_k"] / usual - 1 if usual else np.full(values["popularity_at_k"].shape, np.nan)
        values["popularity_lift_at_k"] = lift
    times_shown = np.zeros(len(positives), np.int64)
    times_shown[items] = 1
    distinct = np.count_nonzero(ranks.add_up(times_shown)[first_code:])
    known = len(positives) - first_code
    return means, distinct / known if known > 0 else None
