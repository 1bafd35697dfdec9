"""Areas under the ROC and the precision-recall curve of rows that are sorted over all ranks.

Both need the number of rows above each row. So each rank sums up its rows of equal scores ("runs"). The ranks exchange
the totals of their ranges and the runs at their ends, which may continue on the next rank, and each rank adds the
contribution of its part. A rank with many rows treats them range by range, like several ranks. Counts are integers,
weighted by the counts of a bootstrap's replicate, so the sums are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.features.learn import exact_sums
from headrace.train.evaluation.bootstrap import NO_REPLICATES, ROWS_AT_ONCE, Bootstrap, sum_by_cell
from headrace.train.evaluation.ranks import (
    F64,
    I64,
    OVERALL,
    Bools,
    Dimension,
    Ranks,
    ScoredRows,
    by_id,
    check_scores,
    sort_keys,
    unpacked,
)

#: Columns of a segment's summary: rows; positives, negatives; twice the pairs in order, ties half; the order of the
#: scores of the first and of the last run, and their positives and negatives.
_ROWS, _POSITIVES, _NEGATIVES, _PAIRS = range(4)
_FIRST, _FIRST_POSITIVES, _FIRST_NEGATIVES = range(4, 7)
_LAST, _LAST_POSITIVES, _LAST_NEGATIVES = range(7, 10)
_COLUMNS = 10


@dataclass(frozen=True)
class SortedRows:
    """This rank's rows, sorted by segment and then by score: all int64 [n], labels bool [n].

    `users`: position in `distinct_users`; both are None without replicates.
    """

    segments: int
    segment: I64
    order: I64
    labels: Bools
    users: I64 | None = None
    distinct_users: I64 | None = None

    def part(self, rows: slice) -> SortedRows:
        """Return consecutive rows."""
        users = None if self.users is None else self.users[rows]
        return replace(self, segment=self.segment[rows], order=self.order[rows], labels=self.labels[rows], users=users)

    def weights(self, bootstrap: Bootstrap, replicate: int) -> I64 | None:
        """Return the weight of each row in a replicate; None: 1."""
        if replicate == 0:
            return None
        assert self.users is not None
        assert self.distinct_users is not None
        return bootstrap.counts(self.distinct_users, replicate)[self.users]


class Runs:
    """Runs of `rows`: consecutive rows of one segment with equal scores. They do not depend on weights."""

    def __init__(self, rows: SortedRows) -> None:
        n = len(rows.order)
        begins = np.ones(n, bool)
        begins[1:] = (rows.order[1:] != rows.order[:-1]) | (rows.segment[1:] != rows.segment[:-1])
        self.starts = np.flatnonzero(begins)
        self.rows = rows
        self.segment, self.order = rows.segment[self.starts], rows.order[self.starts]
        #: The first and last run of each segment that has rows.
        self.first = np.flatnonzero(np.diff(self.segment, prepend=-1))
        self.last = np.append(self.first[1:], len(self.starts))[: len(self.first)] - 1
        self.present = self.segment[self.first]

    def counts(self, weights: I64 | None) -> tuple[I64, I64]:
        """Return the positives and negatives of each run, int64 [runs] each."""
        if not len(self.starts):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        weighted = self.rows.labels if weights is None else weights * self.rows.labels
        positives = np.add.reduceat(weighted, self.starts, dtype=np.int64)
        if weights is None:
            return positives, np.diff(np.append(self.starts, len(self.rows.order))) - positives
        return positives, np.add.reduceat(weights, self.starts) - positives

    def sum_before(self, counts: I64) -> I64:
        """Return the sum of the counts of earlier runs in the same segment, for each run."""
        excluded = np.cumsum(counts) - counts
        lengths = np.diff(np.append(self.first, len(self.starts)))
        return excluded - np.repeat(excluded[self.first], lengths)

    def per_segment(self, counts: I64) -> I64:
        """Return sums by segment, for segments that have rows."""
        return np.add.reduceat(counts, self.first) if len(self.first) else np.zeros(0, np.int64)

    def summary(self, weights: I64 | None) -> I64:
        """Return the summary of each segment, int64 [segments, _COLUMNS]. A rank's rows are below 2^30, so that pairs
        fit.
        """
        summary = np.zeros((self.rows.segments, _COLUMNS), np.int64)
        positives, negatives = self.counts(weights)
        summary[:, _ROWS] = np.bincount(self.rows.segment, minlength=self.rows.segments)
        for column, counts in (
            (_POSITIVES, positives),
            (_NEGATIVES, negatives),
            (_PAIRS, positives * (2 * self.sum_before(negatives) + negatives)),
        ):
            summary[self.present, column] = self.per_segment(counts)
        for runs, column in ((self.first, _FIRST), (self.last, _LAST)):
            summary[self.present, column] = self.order[runs]
            summary[self.present, column + 1] = positives[runs]
            summary[self.present, column + 2] = negatives[runs]
        return summary


def curve_areas(ranks: Ranks, rows: SortedRows, bootstrap: Bootstrap, with_precision: bool = False) -> dict[str, F64]:
    """Return `auc` and, on request, `pr_auc` (average precision) by segment; NaN where undefined. Collective.

    Args:
        rows: sorted over the ranks: inside a segment no rank's scores are below those of the rank before it.

    Returns:
        float64 [1 + replicates, segments] each; index 0 is the value of the unweighted rows.
    """
    ranges = _ranges(rows, bootstrap)
    local_summaries = np.stack([_summaries(rows.part(part), bootstrap) for part in ranges])
    gathered = ranks.gather_rows(local_summaries)
    areas = {"auc": _area(gathered)}
    if with_precision:
        first = int(ranks.gather(np.array([len(local_summaries)]))[: ranks.world.rank].sum())
        parts = {first + i: rows.part(part) for i, part in enumerate(ranges)}
        areas["pr_auc"] = _average_precision(ranks, parts, gathered, bootstrap)
    return areas


def _ranges(rows: SortedRows, bootstrap: Bootstrap) -> list[slice]:
    """Return the ranges to sum up, at least one; with replicates only one, since weights are drawn for all users."""
    n = len(rows.order)
    step = max(n, 1) if bootstrap.replicates else ROWS_AT_ONCE
    return [slice(start, start + step) for start in range(0, max(n, 1), step)]


def _summaries(rows: SortedRows, bootstrap: Bootstrap) -> I64:
    """Return the summaries of each replicate, int64 [1 + replicates, segments, _COLUMNS]."""
    runs = Runs(rows)
    return np.stack([runs.summary(rows.weights(bootstrap, r)) for r in range(1 + bootstrap.replicates)])


def _area(gathered: I64) -> F64:
    """Return the AUC from the summaries of all ranks' ranges, int64 [ranges, 1 + replicates, segments, _COLUMNS]."""
    positives, negatives = gathered[..., _POSITIVES], gathered[..., _NEGATIVES]
    # Python's integers, since all ranks together may have more than 2^63 pairs.
    pairs = gathered[..., _PAIRS].astype(object).sum(0)
    for rank in range(len(gathered)):
        local = gathered[rank]
        below = negatives[:rank].sum(0).astype(object)
        pairs += 2 * below * positives[rank]
        # Negatives of earlier and later ranges that tie with this range's first and last run count half.
        pairs -= local[..., _FIRST_POSITIVES].astype(object) * _tied_before(gathered, rank, _LAST_NEGATIVES)
        pairs += local[..., _LAST_POSITIVES].astype(object) * _tied_behind(gathered, rank, _FIRST_NEGATIVES)
    all_pairs = 2 * positives.sum(0).astype(object) * negatives.sum(0)
    return _ratio(pairs, all_pairs)


def _tied_before(gathered: I64, rank: int, column: int) -> I64:
    """Sum a column over earlier ranks whose last run has the score of this rank's first run."""
    local, earlier = gathered[rank], gathered[:rank]
    tied = (earlier[..., _ROWS] > 0) & (local[..., _ROWS] > 0) & (earlier[..., _LAST] == local[..., _FIRST])
    tied_sum: I64 = (earlier[..., column] * tied).sum(0)
    return tied_sum


def _tied_behind(gathered: I64, rank: int, column: int) -> I64:
    """Sum a column over later ranks whose first run has the score of this rank's last run."""
    local, later = gathered[rank], gathered[rank + 1 :]
    tied = (later[..., _ROWS] > 0) & (local[..., _ROWS] > 0) & (later[..., _FIRST] == local[..., _LAST])
    tied_sum: I64 = (later[..., column] * tied).sum(0)
    return tied_sum


def _average_precision(ranks: Ranks, parts: Mapping[int, SortedRows], gathered: I64, bootstrap: Bootstrap) -> F64:
    """Return the average precision: the sum over thresholds of (recall - recall of the next higher one) * precision.

    Args:
        parts: this rank's ranges, by their number among all.
        gathered: see `_area`.
    """
    segments = gathered.shape[2]
    rows = int(gathered[:, :, :, [_POSITIVES, _NEGATIVES]].sum((0, 2, 3)).max())
    places = exact_sums.places(1 / max(rows, 1), max(rows, 1))
    sums = np.zeros((1 + bootstrap.replicates, len(places), segments), np.int64)
    for number, part in parts.items():
        _add_precisions(sums, places, Runs(part), number, gathered, bootstrap)
    totals = ranks.add_up(sums)
    n = totals.shape[0] * segments
    summed = exact_sums.floats({p: totals[:, i].reshape(-1) for i, p in enumerate(places)}, n).reshape(-1, segments)
    positives = gathered[..., _POSITIVES].sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        precision: F64 = np.where(positives > 0, summed / positives, np.nan)
    return precision


def _add_precisions(sums: I64, places: range, runs: Runs, number: int, gathered: I64, bootstrap: Bootstrap) -> None:
    """Add the contribution of a range's runs to `sums` of exact digits, int64 [1 + replicates, places, segments]."""
    segments = gathered.shape[2]
    above = gathered[number + 1 :].sum(0)
    tied_behind = _tied_behind(gathered, number, _FIRST_POSITIVES)
    # A run that began in an earlier range is counted there.
    continues = np.zeros(segments, bool)
    for earlier in gathered[:number, 0]:
        continues |= (earlier[:, _ROWS] > 0) & (earlier[:, _LAST] == gathered[number, 0, :, _FIRST])
    lengths = np.diff(np.append(runs.first, len(runs.starts)))
    for replicate in range(1 + bootstrap.replicates):
        positives, negatives = runs.counts(runs.rows.weights(bootstrap, replicate))
        at_least = []
        for counts, column in ((positives, _POSITIVES), (negatives, _NEGATIVES)):
            total = runs.per_segment(counts) + above[replicate, runs.present, column]
            at_least.append(np.repeat(total, lengths) - runs.sum_before(counts))
        run_positives = positives.copy()
        run_positives[runs.last] += tied_behind[replicate, runs.present]
        run_positives[runs.first[continues[runs.present]]] = 0
        terms = run_positives * (at_least[0] / np.maximum(at_least[0] + at_least[1], 1))
        digits, _ = exact_sums.grouped(terms, runs.segment, segments, places, squares=False)
        sums[replicate] += np.stack([digits[place] for place in places])


def _ratio(above: npt.NDArray[Any], below: npt.NDArray[Any]) -> F64:
    """Return the quotients of Python integers, each rounded once; NaN over 0."""
    quotients = [a / b if b else np.nan for a, b in zip(above.reshape(-1), below.reshape(-1), strict=True)]
    return np.array(quotients, np.float64).reshape(above.shape)


def user_metrics(
    ranks: Ranks, rows: ScoredRows, *, dimensions: Sequence[Dimension] = (), bootstrap: Bootstrap = NO_REPLICATES
) -> list[dict[str, F64]]:
    """Return the mean AUC of users with rows of both classes: over all rows, then by dimension.

    gauc: weighted by the user's rows (Zhu et al., 2017; Zhou et al., 2018). user_auc: each user counts once.

    Returns:
        for all rows and for each dimension, by metric: float64 [1 + replicates, slices], NaN without such a user.

    Raises:
        UserError: a score is NaN.
    """
    check_scores(ranks, rows.scores)
    assert rows.users is not None
    ids, (keys, *codes) = by_id(ranks, rows.users, [sort_keys(rows), *rows.slices])
    distinct, index = np.unique(ids, return_inverse=True)
    metrics = []
    for dimension, code in zip((OVERALL, *dimensions), (np.zeros(len(keys), np.int64), *codes), strict=True):
        order = np.lexsort((keys, index, code))
        order = order[np.searchsorted(code[order], 0) :]
        metrics.append(
            _of_slices(ranks, len(dimension.values), code[order], index[order], distinct, keys[order], bootstrap)
        )
    return metrics


def _of_slices(
    ranks: Ranks, slices: int, code: I64, index: I64, distinct: I64, keys: I64, bootstrap: Bootstrap
) -> dict[str, F64]:
    """Return the rows by slice, user (a position in `distinct`) and score."""
    order, labels = unpacked(keys)
    begins = np.ones(len(code), bool)
    begins[1:] = (code[1:] != code[:-1]) | (index[1:] != index[:-1])
    first = np.flatnonzero(begins)
    group = np.cumsum(begins) - 1
    runs = Runs(SortedRows(len(first), group, order, labels))
    positives, negatives = runs.counts(None)
    in_order = runs.per_segment(positives * (2 * runs.sum_before(negatives) + negatives))
    positives, negatives = runs.per_segment(positives), runs.per_segment(negatives)
    has_both = (positives > 0) & (negatives > 0)
    auc = in_order[has_both] / (2 * positives[has_both] * negatives[has_both])
    rows = (positives + negatives)[has_both]
    sums = sum_by_cell(
        ranks,
        slices,
        code[first][has_both],
        distinct[index[first]][has_both],
        {"users": np.ones(len(rows), np.int64), "rows": rows},
        {"auc": auc, "weighted": auc * rows},
        bootstrap,
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        return {"gauc": sums["weighted"] / sums["rows"], "user_auc": sums["auc"] / sums["users"]}
