"""Errors of predicted numbers against scikit-learn, on one, two and three ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn import metrics as reference

from headrace.errors import UserError
from headrace.train.evaluation.bootstrap import Bootstrap
from headrace.train.evaluation.click import regression_metrics
from headrace.train.evaluation.ranks import Dimension, Ranks, ScoredRows
from tests.evaluation_support import on_any_ranks, rows_of

BOOTSTRAP = Bootstrap(replicates=20, seed=5)


def test_errors_equal_scikit_learn_with_slices_and_replicates() -> None:
    rng = np.random.default_rng(0)
    n = 300
    observed = (rng.normal(size=n) * 50 + 1e3).astype(np.float32)
    predicted = observed + rng.normal(size=n).astype(np.float32)
    users, part = rng.integers(0, 20, n), rng.integers(-1, 2, n)
    # A row's observed number travels as a slice of its own: `part_of` knows scores, labels, users and slices.
    rows = rows_of(predicted, np.zeros(n), users, [part, np.arange(n)])

    def evaluate(ranks: Ranks, local_rows: ScoredRows) -> Any:
        codes, row = local_rows.slices
        return regression_metrics(
            ranks,
            local_rows.scores,
            observed[row],
            users=local_rows.users,
            slices=[codes],
            dimensions=[Dimension("part", ("a", "b"))],
            bootstrap=BOOTSTRAP,
        )

    (overall, sliced), counts = on_any_ranks(rows, evaluate)
    assert counts == [[n], [int((part == i).sum()) for i in range(2)]]
    for values, column, chosen in [(overall, 0, part > -2), (sliced, 0, part == 0), (sliced, 1, part == 1)]:
        for replicate in (0, 1, 20):
            times = BOOTSTRAP.counts(users, replicate)[chosen]
            y, p = np.repeat(observed[chosen], times), np.repeat(predicted[chosen], times)
            y, p = y.astype(float), p.astype(float)
            assert values["rmse"][replicate, column] == pytest.approx(
                reference.root_mean_squared_error(y, p), rel=1e-12
            )
            assert values["mae"][replicate, column] == pytest.approx(reference.mean_absolute_error(y, p), rel=1e-12)
            assert values["r2"][replicate, column] == pytest.approx(reference.r2_score(y, p), abs=1e-9)


def test_equal_numbers_have_no_r2() -> None:
    observed = np.full(7, 0.1, np.float32)
    ((metrics,), _) = regression_metrics(Ranks(), observed + 1, observed)
    assert metrics["rmse"][0, 0] == pytest.approx(1)
    assert np.isnan(metrics["r2"][0, 0])


@pytest.mark.parametrize("prediction", [np.nan, np.inf])
def test_predictions_that_are_not_finite_are_refused(prediction: float) -> None:
    with pytest.raises(UserError, match="1 of 2 predictions are not finite"):
        regression_metrics(Ranks(), np.array([1, prediction], np.float32), np.ones(2, np.float32))
