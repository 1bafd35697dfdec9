"""Input 11: days on which all labels are alike. Metrics that need both are left out; none is invented."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.comm.base import run_ranks
from headrace.train.evaluation.click import FURTHER, click_metrics, value_of
from headrace.train.evaluation.ranks import Ranks
from tests.evaluation_support import part_of, rows_of


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_labels_that_are_all_alike(label: int, ranks: int) -> None:
    scores = np.random.default_rng(1).normal(-1, 1, 300).astype(np.float32)
    rows = rows_of(scores, np.full(300, label))

    def evaluate(world: Ranks) -> dict[str, float | None]:
        local_rows = part_of(rows, np.arange(300) % ranks == world.world.rank)
        (metrics,) = click_metrics(world, local_rows, metrics=FURTHER)
        return {name: value_of(values) for name, values in metrics.values.items()}

    p = 1 / (1 + np.exp(-scores.astype(np.float64)))
    for metrics in run_ranks(ranks, lambda collective: evaluate(Ranks(collective))):
        assert metrics["auc"] is None
        assert metrics["normalized_entropy"] is None
        assert metrics["base_rate"] == label
        assert metrics["log_loss"] == pytest.approx(-np.log(p if label else 1 - p).mean(), rel=1e-6)
        assert metrics["calibration"] == (pytest.approx(p.sum() / 300, rel=1e-6) if label else None)
