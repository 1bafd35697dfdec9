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
        mine = part_of(rows, np.arange(300) % ranks == world.world.rank)
        (found,) = click_metrics(world, mine, metrics=FURTHER)
        return {name: value_of(values) for name, values in found.values.items()}

    p = 1 / (1 + np.exp(-scores.astype(np.float64)))
    for found in run_ranks(ranks, lambda collective: evaluate(Ranks(collective))):
        assert found["auc"] is None
        assert found["normalized_entropy"] is None
        assert found["base_rate"] == label
        assert found["log_loss"] == pytest.approx(-np.log(p if label else 1 - p).mean(), rel=1e-6)
        assert found["calibration"] == (pytest.approx(p.sum() / 300, rel=1e-6) if label else None)
