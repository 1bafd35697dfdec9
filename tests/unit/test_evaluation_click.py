"""Metrics of clicks and of numbers, against scikit-learn and NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference

from headrace.comm.base import run_ranks
from headrace.errors import UserError
from headrace.train.evaluation import auc, bootstrap
from headrace.train.evaluation.bootstrap import Bootstrap
from headrace.train.evaluation.click import BASIC, FURTHER, Bin, click_metrics, regression_metrics, value_of
from headrace.train.evaluation.ranks import Dimension, Ranks, ScoredRows, scores_of, sigmoid, sort_keys, unpacked
from tests.evaluation_support import on_any_ranks, part_of, rows_of

#: Scores with ties, of both signs, both zeros, the smallest and the largest.
SCORES = st.one_of(
    st.integers(-3, 3).map(lambda i: i / 2),
    st.floats(width=32, allow_nan=False),
    st.sampled_from([0.0, -0.0, 40.0, -90.0, 1e-45, 3e38, math.inf, -math.inf]),
)
ROWS = st.lists(st.tuples(SCORES, st.booleans(), st.integers(0, 4), st.integers(-1, 2)), max_size=40)


def evaluated(ranks: Ranks, rows: ScoredRows, replicates: int = 0) -> Any:
    dimensions = [Dimension(f"d{i}", ("a", "b", "c")) for i in range(len(rows.slices))]
    tables = click_metrics(ranks, rows, dimensions=dimensions, metrics=FURTHER, bootstrap=Bootstrap(replicates, seed=3))
    return [(f.values, f.rows, f.bins) for f in tables]


def assert_metrics(metrics: dict[str, float | None], y: np.ndarray, scores: np.ndarray) -> None:
    """Compare with scikit-learn, and with formulas over all rows."""
    p = np.clip(sigmoid(scores), 1e-7, 1 - 1e-7)
    y = y.astype(float)
    if not len(y):
        assert set(metrics.values()) == {None}
        return
    both = 0 < y.sum() < len(y)
    # scikit-learn takes no infinite scores; their order is what counts.
    _, place = np.unique(scores, return_inverse=True)
    assert metrics["auc"] == (pytest.approx(reference.roc_auc_score(y, place), abs=1e-12) if both else None)
    precision = pytest.approx(reference.average_precision_score(y, place), abs=1e-12) if y.any() else None
    assert metrics["pr_auc"] == precision
    loss = reference.log_loss(y, p, labels=[0, 1])
    assert metrics["log_loss"] == pytest.approx(loss, rel=1e-9)
    assert metrics["base_rate"] == pytest.approx(y.mean(), rel=1e-15)
    assert metrics["calibration"] == (pytest.approx(sigmoid(scores).sum() / y.sum(), rel=1e-12) if y.any() else None)
    rate = y.mean()
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate) if both else None
    assert metrics["normalized_entropy"] == (pytest.approx(loss / entropy, rel=1e-9) if entropy else None)
    assert metrics["calibration_error"] == pytest.approx(calibration_error(y, scores), abs=1e-12)
    assert metrics["error_rate"] == pytest.approx(reference.zero_one_loss(y, sigmoid(scores) > 0.5), abs=1e-12)


def metrics_of(labels: np.ndarray, probabilities: np.ndarray) -> tuple[dict[str, float | None], list[Bin]]:
    """Return the basic metrics and the calibration of rows of one rank, scored by probabilities."""
    (table,) = click_metrics(
        Ranks(), ScoredRows.from_scores(probabilities, labels), probability=lambda p: p.astype(float)
    )
    return {name: value_of(table.values[name]) for name in BASIC}, table.bins[0]


def calibration_error(y: np.ndarray, scores: np.ndarray, bins: int = 15) -> float:
    """Compute it row by row: each bin begins at the first score that is equal to that of the cut."""
    order = np.argsort(scores, kind="stable")
    s, p, y = scores[order], sigmoid(scores)[order], y[order]
    begins = sorted({int(np.flatnonzero(s == s[len(s) * i // bins])[0]) for i in range(bins)})
    ends = [*begins[1:], len(s)]
    return sum(abs(p[a:b].sum() - y[a:b].sum()) for a, b in zip(begins, ends, strict=True)) / len(s)


@contextmanager
def at_once(rows: int) -> Iterator[None]:
    """Go through the rows in ranges of so many."""
    with patch.object(auc, "ROWS_AT_ONCE", rows), patch.object(bootstrap, "ROWS_AT_ONCE", rows):
        yield


@settings(max_examples=60, deadline=None)
@given(ROWS, st.sampled_from([1, 3, 1 << 20]))
def test_metrics_equal_scikit_learn_on_any_number_of_ranks(
    drawn: list[tuple[float, bool, int, int]], rows_at_once: int
) -> None:
    scores, labels, users, codes = (np.array([r[i] for r in drawn]) for i in range(4))
    rows = rows_of(scores, labels, users.astype(int), [codes.astype(int)])
    with at_once(rows_at_once):
        overall, sliced = on_any_ranks(rows, evaluated)
    assert overall[1] == [len(drawn)]
    assert_metrics({n: value_of(v) for n, v in overall[0].items()}, rows.labels, rows.scores)
    for code in range(3):
        in_slice = rows.slices[0] == code
        assert sliced[1][code] == in_slice.sum()
        assert_metrics(
            {n: value_of(v, code) for n, v in sliced[0].items()}, rows.labels[in_slice], rows.scores[in_slice]
        )


@pytest.mark.parametrize("decimals", [0, 1, 2, 6])
@pytest.mark.parametrize("rate", [0.02, 0.5])
def test_many_rows_and_ties(decimals: int, rate: float) -> None:
    rng = np.random.default_rng(decimals)
    labels = rng.random(5_000) < rate
    rows = rows_of(np.round(rng.normal(labels - 2.0), decimals), labels)
    ((values, counts, bins),) = on_any_ranks(rows, evaluated)
    with at_once(700):
        ((in_ranges, *_),) = evaluated(Ranks(), rows)
    assert in_ranges.keys() == values.keys()
    assert all(in_ranges[name].tolist() == values[name].tolist() for name in values)
    assert counts == [5_000]
    assert_metrics({n: value_of(v) for n, v in values.items()}, rows.labels, rows.scores)
    assert sum(b.rows for b in bins[0]) == 5_000


def test_one_score_for_all_is_a_coin_and_lies_evenly_on_the_ranks() -> None:
    from headrace.train.evaluation.ranks import by_range

    rows = rows_of(np.zeros(1_000), np.arange(1_000) % 4 == 0)
    ((values, _, _),) = on_any_ranks(rows, evaluated)
    assert (values["auc"][0, 0], values["pr_auc"][0, 0]) == (0.5, 0.25)
    held = run_ranks(
        3, lambda c: len(by_range(Ranks(c), sort_keys(part_of(rows, np.arange(1_000) % 3 == c.world.rank)))[0])
    )
    assert sum(held) == 1_000
    assert max(held) < 400


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-5, 5), max_size=60), st.integers(1, 4))
def test_ranges_hold_all_rows_in_order(drawn: list[int], size: int) -> None:
    from headrace.train.evaluation.ranks import by_range

    keys = np.array(drawn, np.int64)
    payload = np.arange(len(keys)) * 10
    owner = np.random.default_rng(0).integers(0, size, len(keys))
    by_rank = run_ranks(
        size, lambda c: by_range(Ranks(c), keys[owner == c.world.rank], [payload[owner == c.world.rank]])
    )
    np.testing.assert_array_equal(np.concatenate([k for k, _ in by_rank]), np.sort(keys))
    received = np.concatenate([c[0] for _, c in by_rank]).astype(int)
    np.testing.assert_array_equal(np.sort(received), payload)
    np.testing.assert_array_equal(keys[received // 10], np.sort(keys))


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_sort_keys_have_the_order_of_scores(drawn: list[float]) -> None:
    scores = np.array(drawn, np.float32)
    order, labels = unpacked(sort_keys(rows_of(scores, np.ones(len(scores)))))
    assert labels.all()
    np.testing.assert_array_equal(scores_of(order), scores)
    np.testing.assert_array_equal(np.sign(np.subtract.outer(order, order)), np.sign(comparison(scores)))


def comparison(scores: np.ndarray) -> np.ndarray:
    return (scores[:, None] > scores[None]).astype(int) - (scores[:, None] < scores[None]).astype(int)


@pytest.mark.parametrize("size", [1, 3])
def test_nan_is_refused_by_all_ranks(size: int) -> None:
    rows = rows_of([0.1, math.nan, 0.3], [1, 0, 1])

    def refused(ranks: Ranks, part: ScoredRows) -> str:
        with pytest.raises(UserError) as e:
            click_metrics(ranks, part)
        return str(e.value)

    messages = run_ranks(size, lambda c: refused(Ranks(c), part_of(rows, np.arange(3) % size == c.world.rank)))
    assert all("1 of 3 predictions are NaN" in text for text in messages)


def test_scores_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        ScoredRows.from_scores(np.zeros(3), np.zeros(3))


def test_extreme_values_stay_finite() -> None:
    p = sigmoid(np.array([-1000.0, -30.0, 0.0, 30.0, 1000.0], np.float32))
    np.testing.assert_allclose(p, [0, 1 / (1 + math.exp(30)), 0.5, 1 / (1 + math.exp(-30)), 1], atol=1e-300)
    metrics, _ = metrics_of(np.array([1, 0]), np.array([0.0, 1.0], np.float32))
    assert math.isfinite(metrics["log_loss"] or math.nan)


def test_metrics_of_probabilities() -> None:
    metrics, _ = metrics_of(np.array([1, 0, 0, 0]), np.array([0.5, 0.2, 0.2, 0.3], np.float32))
    assert metrics["base_rate"] == 0.25
    assert metrics["calibration"] == pytest.approx(0.3 / 0.25)
    assert metrics["auc"] == 1.0
    one_class, _ = metrics_of(np.zeros(4), np.full(4, 0.1, np.float32))
    assert (one_class["auc"], one_class["calibration"], one_class["base_rate"]) == (None, None, 0.0)


@pytest.mark.parametrize(
    "values", [lambda r, n: r.random(n), lambda r, n: np.round(r.random(n), 1), lambda r, n: np.full(n, 0.5)]
)
@pytest.mark.parametrize("n", [1, 7, 1_000])
def test_calibration_bins_hold_each_row_once(values: Callable[[np.random.Generator, int], np.ndarray], n: int) -> None:
    rng = np.random.default_rng(n)
    p = values(rng, n).astype(np.float32)
    y = (rng.random(n) < p).astype(np.float32)
    _, bins = metrics_of(y, p)
    assert 1 <= len(bins) <= 15
    assert sum(b.rows for b in bins) == n
    assert sum(b.rows * b.predicted for b in bins) == pytest.approx(p.sum(dtype=float))
    assert sum(b.rows * b.observed for b in bins) == pytest.approx(y.sum())
    assert [b.predicted for b in bins] == sorted({b.predicted for b in bins})
    if n == 1_000 and len(set(p)) == n:
        assert {b.rows for b in bins} == {66, 67}


def test_calibration_bins_of_a_calibrated_model_lie_on_the_diagonal() -> None:
    rng = np.random.default_rng(0)
    p = rng.random(200_000).astype(np.float32)
    _, bins = metrics_of(rng.random(200_000) < p, p)
    for b in bins:
        assert b.observed == pytest.approx(b.predicted, abs=0.02)


def test_replicates_equal_rows_that_are_repeated() -> None:
    """A replicate is the metrics of rows that are there as often as their user was drawn."""
    rng = np.random.default_rng(4)
    n, users = 300, rng.integers(0, 25, 300)
    labels = rng.random(n) < 0.3
    rows = rows_of(np.round(rng.normal(labels * 1.0), 1), labels, users, [rng.integers(-1, 3, n)])
    replicates = 6
    replicated = on_any_ranks(rows, lambda ranks, part: evaluated(ranks, part, replicates))
    bootstrap = Bootstrap(replicates, seed=3)
    for replicate in range(1, 1 + replicates):
        drawn = np.repeat(np.arange(n), bootstrap.counts(rows.users, replicate))
        assert len(drawn) != n
        again = evaluated(Ranks(), part_of(rows, drawn))
        for (values, _, _), (expected, _, _) in zip(replicated, again, strict=True):
            for name in values:
                if name == "calibration_error":  # its bins are those of the rows as they are
                    continue
                np.testing.assert_allclose(values[name][replicate], expected[name][0], rtol=1e-12, err_msg=name)


def test_draws_are_poisson_and_a_function_of_the_user() -> None:
    bootstrap = Bootstrap(50, seed=9)
    users = np.arange(20_000)
    drawn = np.stack(list(bootstrap.all_counts(users)))
    assert (drawn[0] == 1).all()
    shares = np.bincount(drawn[1:].reshape(-1), minlength=8)[:8] / drawn[1:].size
    expected = [math.exp(-1) / math.factorial(k) for k in range(8)]
    np.testing.assert_allclose(shares, expected, atol=2e-3)
    # Neither users nor replicates go together.
    assert abs(np.corrcoef(drawn[1, :-1], drawn[1, 1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(drawn[1], drawn[2])[0, 1]) < 0.03
    some = np.array([17, 3, 17_000])
    np.testing.assert_array_equal(bootstrap.counts(some, 7), drawn[7, some])
    assert (Bootstrap(50, seed=8).counts(users, 7) != drawn[7]).any()


def test_an_interval_covers_what_it_should() -> None:
    """Nine in ten intervals of 90 %, each of one sample's log losses, hold the value of the population."""
    rng = np.random.default_rng(11)
    population = rng.normal(-1.0, 1.0, 200_000)
    clicked = rng.random(200_000) < sigmoid(population)
    expected = value_of(evaluated(Ranks(), rows_of(population, clicked))[0][0]["log_loss"])
    inside = 0
    for sample in range(100):
        picked = rng.choice(200_000, 300, replace=False)
        rows = rows_of(population[picked], clicked[picked], np.arange(300))
        bootstrap = Bootstrap(100, seed=sample, confidence=0.9)
        (table,) = click_metrics(Ranks(), rows, bootstrap=bootstrap)
        interval = bootstrap.interval(table.values["log_loss"][:, 0])
        assert interval is not None
        inside += interval[0] <= (expected or 0) <= interval[1]
    assert 80 <= inside <= 97


def test_no_interval_without_values() -> None:
    bootstrap = Bootstrap(4)
    assert bootstrap.interval(np.array([0.5])) is None
    assert bootstrap.interval(np.array([0.5, math.nan, math.nan, math.nan, 0.5])) is None
    assert bootstrap.interval(np.array([0.5, 0.2, math.nan, 0.2, 0.2])) == (0.2, 0.2)


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
