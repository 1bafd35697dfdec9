"""Metrics of predicted clicks, and errors of predicted numbers: exact, and the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.train.evaluation.auc import SortedRows, curve_areas
from headrace.train.evaluation.bootstrap import NO_REPLICATES, Bootstrap, sum_columns, sums_by_slice
from headrace.train.evaluation.ranks import (
    F32,
    F64,
    I64,
    OVERALL,
    Dimension,
    Ranks,
    ScoredRows,
    by_range,
    check_scores,
    scores_of,
    sigmoid,
    sort_keys,
    unpacked,
)

#: Function from scores float32 [n] to probabilities float64 [n].
Probability = Callable[[npt.NDArray[Any]], F64]
#: Smallest distance of probabilities from 0 and 1 in logarithms (float32's resolution next to 1).
_EPSILON = 1e-7
#: Number of calibration bins, of nearly equal size.
BINS = 15
#: Metrics that are always computed.
BASIC = ("auc", "log_loss", "calibration", "base_rate")
#: Metrics that are computed on request.
FURTHER = ("pr_auc", "normalized_entropy", "calibration_error", "error_rate")

#: Metrics that need probabilities, and have no meaning for scores that only order rows.
OF_PROBABILITIES = ("log_loss", "calibration", "normalized_entropy", "calibration_error", "error_rate")


@dataclass(frozen=True)
class Bin:
    """Calibration bin: mean prediction, share of clicks, and number of rows with similar predictions."""

    predicted: float
    observed: float
    rows: int


@dataclass(frozen=True)
class ClickMetrics:
    """Metrics of the slices of one dimension.

    Attributes:
        values: by metric float64 [1 + replicates, slices], with the unweighted rows at 0; NaN where undefined.
        rows: number of rows of each slice.
        bins: calibration bins of each slice, lowest predictions first.
    """

    values: dict[str, F64]
    rows: list[int]
    bins: list[list[Bin]]


def click_metrics(
    ranks: Ranks,
    rows: ScoredRows,
    *,
    dimensions: Sequence[Dimension] = (),
    metrics: Collection[str] = (),
    bootstrap: Bootstrap = NO_REPLICATES,
    probability: Probability = sigmoid,
) -> list[ClickMetrics]:
    """Return the metrics of all rows, then of the slices of each dimension.

    auc: area under the ROC curve, ties count half. pr_auc: average precision. log_loss: mean negative log-likelihood,
    nats. normalized_entropy: log loss over that of always predicting the slice's base rate (He et al., 2014).
    calibration: sum of predictions / sum of labels. calibration_error: expected error over `BINS` parts of nearly equal
    size (Naeini et al., 2015; parts by quantile: Nguyen and O'Connor, 2015). error_rate: share of the rows that are
    positive with a probability of at most 0.5, or negative with a higher one. base_rate: share of positives.

    Args:
        rows: this rank's rows, with `users` if there are replicates.
        dimensions: dimensions of `rows.slices`.
        metrics: requested metrics of `FURTHER`, besides `BASIC`.
        bootstrap: replicates over users.
        probability: function from scores to probabilities.

    Raises:
        UserError: a score is NaN.
    """
    check_scores(ranks, rows.scores)
    users = [] if rows.users is None or not bootstrap.replicates else [rows.users]
    keys, columns = by_range(ranks, sort_keys(rows), [*users, *rows.slices])
    order, labels = unpacked(keys)
    del keys
    ids, index = (None, None) if not users else np.unique(columns.pop(0), return_inverse=True)
    metrics_of_dimensions = []
    for dimension, codes in zip((OVERALL, *dimensions), (None, *columns), strict=True):
        if codes is None:
            sorted_rows = SortedRows(1, np.zeros(len(order), np.int64), order, labels, index, ids)
        else:
            chosen = np.argsort(codes, kind="stable")
            chosen = chosen[np.searchsorted(codes[chosen], 0) :]
            users_of_rows = None if index is None else index[chosen]
            sorted_rows = SortedRows(
                len(dimension.values), codes[chosen], order[chosen], labels[chosen], users_of_rows, ids
            )
        metrics_of_dimensions.append(_of_segments(ranks, sorted_rows, metrics, bootstrap, probability))
    return metrics_of_dimensions


def _of_segments(
    ranks: Ranks, rows: SortedRows, metrics: Collection[str], bootstrap: Bootstrap, probability: Probability
) -> ClickMetrics:
    values = curve_areas(ranks, rows, bootstrap, "pr_auc" in metrics)
    users = None if rows.users is None or rows.distinct_users is None else rows.distinct_users[rows.users]

    def columns(part: slice) -> tuple[dict[str, I64], dict[str, F64]]:
        p, y = probability(scores_of(rows.order[part])), rows.labels[part]
        clipped = np.clip(p, _EPSILON, 1 - _EPSILON)
        counted = {"rows": np.ones(len(y), np.int64), "clicks": y.astype(np.int64)}
        if "error_rate" in metrics:
            counted["wrong"] = ((p > 0.5) != y).astype(np.int64)
        return counted, {"predicted": p, "loss": -np.where(y, np.log(clipped), np.log1p(-clipped))}

    sums = sum_columns(ranks, rows.segments * BINS, _cells_of(ranks, rows), users, columns, bootstrap)
    cells = {name: s.reshape(-1, rows.segments, BINS) for name, s in sums.items()}
    totals = {name: s.sum(2) for name, s in cells.items()}
    n, clicks = totals["rows"], totals["clicks"]
    with np.errstate(invalid="ignore", divide="ignore"):
        base_rate = clicks / n
        values["log_loss"] = totals["loss"] / n
        values["calibration"] = np.where(clicks > 0, totals["predicted"] / clicks, np.nan)
        values["base_rate"] = base_rate
        if "normalized_entropy" in metrics:
            entropy = -(base_rate * np.log(base_rate) + (1 - base_rate) * np.log1p(-base_rate))
            values["normalized_entropy"] = np.where((clicks > 0) & (clicks < n), values["log_loss"] / entropy, np.nan)
        if "calibration_error" in metrics:
            values["calibration_error"] = np.abs(cells["predicted"] - cells["clicks"]).sum(2) / n
        if "error_rate" in metrics:
            values["error_rate"] = totals["wrong"] / n
    bins = [
        [
            Bin(float(sum_p / count), float(hits / count), int(count))
            for sum_p, hits, count in zip(*(cells[c][0, segment] for c in ("predicted", "clicks", "rows")), strict=True)
            if count
        ]
        for segment in range(rows.segments)
    ]
    return ClickMetrics(values, n[0].astype(int).tolist(), bins)


def _cells_of(ranks: Ranks, rows: SortedRows) -> I64:
    """Return each row's part of its segment: `BINS` of nearly equal size, equal scores together; those of segment s are
    numbered from s * BINS on. int64 [n].
    """
    counts = np.bincount(rows.segment, minlength=rows.segments)
    gathered = ranks.gather(counts)
    rows_before = gathered[: ranks.world.rank].sum(0)[:, None]
    cuts = gathered.sum(0)[:, None] * np.arange(1, BINS) // BINS
    is_local = (cuts >= rows_before) & (cuts < rows_before + counts[:, None])
    starts = np.cumsum(counts) - counts
    lowest = np.zeros(cuts.shape, np.int64)
    lowest[is_local] = rows.order[(starts[:, None] + cuts - rows_before)[is_local]]
    lowest = ranks.add_up(lowest)
    cells = np.zeros(len(rows.order), np.int64)
    for segment in np.flatnonzero(counts):
        local = slice(starts[segment], starts[segment] + counts[segment])
        cells[local] = np.searchsorted(lowest[segment], rows.order[local], side="right")
        cells[local] += segment * BINS
    return cells


def value_of(values: F64, segment: int = 0) -> float | None:
    """Return a metric of the unweighted rows, from float64 [1 + replicates, segments]; None where it is undefined."""
    value = float(values[0, segment])
    return None if np.isnan(value) else value


ERROR_METRICS = ("rmse", "mae", "r2")


def regression_metrics(
    ranks: Ranks,
    predicted: F32,
    observed: F32,
    *,
    users: I64 | None = None,
    slices: Sequence[I64] = (),
    dimensions: Sequence[Dimension] = (),
    bootstrap: Bootstrap = NO_REPLICATES,
) -> tuple[list[dict[str, F64]], list[list[int]]]:
    """Return the errors of all rows, then of the slices of each dimension.

    rmse: square root of the mean squared error. mae: mean absolute error. r2: coefficient of determination, 1 less the
    squared error over that of the slice's own mean; NaN where all observed numbers are equal.

    Args:
        predicted: float32 [n], of this rank's rows.
        observed: float32 [n].
        users: whom a replicate counts a row with, int64 [n]; None only without replicates.
        slices: for each dimension the position of the row's value, -1 where it is none; int64 [n].

    Returns:
        For all rows and for each dimension, by metric: float64 [1 + replicates, slices]; and the rows of each slice.

    Raises:
        UserError: a prediction is not finite.
    """
    check_scores(ranks, predicted, finite=True)
    y, error = observed.astype(np.float64), predicted.astype(np.float64) - observed
    columns: dict[str, npt.NDArray[np.float64]] = {"squares": error**2, "sizes": np.abs(error), "y": y, "yy": y * y}
    metrics, counts = [], []
    for sums in sums_by_slice(ranks, columns, users, slices, dimensions, bootstrap):
        with np.errstate(invalid="ignore", divide="ignore"):
            n = sums["rows"]
            spread = sums["yy"] - sums["y"] ** 2 / n
            # For equal numbers the spread is only a rounding error of the division.
            spread = np.where(spread > 1e-12 * sums["yy"], spread, np.nan)
            metrics.append(
                {"rmse": np.sqrt(sums["squares"] / n), "mae": sums["sizes"] / n, "r2": 1 - sums["squares"] / spread}
            )
        counts.append(sums["rows"][0].astype(int).tolist())
    return metrics, counts
