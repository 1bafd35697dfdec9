"""What is said of evaluated models: of each alone, and of one beside another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from headrace.gate.evaluate import ModelResult
from headrace.gate.predictions import coarse_counts
from headrace.models.predictor import needed_models
from headrace.psi import psi
from headrace.storage import Location
from headrace.train.evaluation.paired import difference


def told_of(
    folder: Location,
    result: ModelResult,
    splits: Sequence[str],
    batch_rows: int,
    seconds: float | None,
    asked: Sequence[str] = (),
) -> dict[str, Any]:
    """What is said of a model. `bytes` is of all that it needs to be opened: of a model that holds changed rows alone,
    those that it lies upon, too.

    Args:
        folder: the saved model.
        result: what came out of it.
        splits: that were measured, the first of single rows.
        batch_rows: rows of a timed batch.
        seconds: of such a batch; None: none was timed.
        asked: metrics that are undefined where nothing could be measured.

    Raises:
        UserError: a model that it lies upon is gone.
    """
    metrics: dict[str, Any] = dict.fromkeys(asked)
    intervals: dict[str, Any] = {}
    for split in splits:  # metrics of lists have names of their own
        if split in result.evaluations:
            metrics |= result.evaluations[split].metrics
            intervals |= result.evaluations[split].intervals
    first = result.evaluations.get(splits[0])
    return {
        "metrics": metrics,
        "intervals": intervals,
        "calibration_bins": first.calibration_bins if first else [],
        "finite": result.finite,
        "known": {name: list(counts) for name, counts in result.known.items()},
        "bytes": sum(f.size() for needed in needed_models(folder) for f in needed.files()),
        "batch_ms": None if seconds is None else round(1e3 * seconds, 4),
        "rows_per_second": None if not seconds else round(batch_rows / seconds, 1),
    }


def beside(splits: Sequence[str], mine: ModelResult, other: ModelResult, confidence: float) -> dict[str, Any]:
    """The model beside the champion: differences of metrics, by slice too, and of predictions."""
    differences: dict[str, Any] = {}
    slices: list[dict[str, Any]] = []
    for split in splits:
        if split not in mine.evaluations or split not in other.evaluations:
            continue
        a, b = mine.evaluations[split], other.evaluations[split]
        for metric, value in a.metrics.items():
            differences[metric] = _difference(
                value, b.metrics.get(metric), a.replicates.get(metric), b.replicates.get(metric), confidence
            )
        for left, right in zip(a.slices, b.slices, strict=True):
            slices.append(
                {
                    "split": split,
                    "slice": left["slice"],
                    "value": left["value"],
                    "rows": left["rows"],
                    "metrics": left["metrics"],
                    "champion": right["metrics"],
                    "differences": {
                        metric: _difference(
                            value,
                            right["metrics"].get(metric),
                            left["replicates"].get(metric),
                            right["replicates"].get(metric),
                            confidence,
                        )
                        for metric, value in left["metrics"].items()
                    },
                }
            )
    expected, actual = coarse_counts(np.array(other.scores, np.int64), np.array(mine.scores, np.int64))
    return {
        "differences": differences,
        "slices": slices,
        "score_psi": psi(expected, actual),
        "score_bins": {"champion": expected, "model": actual},
    }


def _difference(
    mine: float | None, other: float | None, my_draws: Any, other_draws: Any, confidence: float
) -> dict[str, float | None] | None:
    """A difference with its paired interval; without one where nothing is drawn; None where a value is undefined."""
    if mine is None or other is None:
        return None
    found = difference(mine, other, my_draws or (), other_draws or (), confidence)
    if found is not None:
        return asdict(found)
    return {"value": mine - other, "low": None, "high": None, "p": None}
