"""Errors of predicted numbers: exact, and the same on any number of ranks. Collective."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.train.evaluation.bootstrap import F64, NO_REPLICATES, Bootstrap
from headrace.train.evaluation.ranks import I64, Ranks
from headrace.train.evaluation.rows import F32, Dimension, check_scores
from headrace.train.evaluation.sums import sums_by_slice

METRICS = ("rmse", "mae", "r2")


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
    """Errors of all rows, then of the slices of each dimension.

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
    found, counts = [], []
    for sums in sums_by_slice(ranks, columns, users, slices, dimensions, bootstrap):
        with np.errstate(invalid="ignore", divide="ignore"):
            n = sums["rows"]
            spread = sums["yy"] - sums["y"] ** 2 / n
            # Of equal numbers the difference is what the division rounded.
            spread = np.where(spread > 1e-12 * sums["yy"], spread, np.nan)
            found.append(
                {"rmse": np.sqrt(sums["squares"] / n), "mae": sums["sizes"] / n, "r2": 1 - sums["squares"] / spread}
            )
        counts.append(sums["rows"][0].astype(int).tolist())
    return found, counts
