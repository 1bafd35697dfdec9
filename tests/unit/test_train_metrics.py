"""Metrics against scikit-learn and against definitions spelled out."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference

from headrace.train.evaluation.metrics import auc, calibration_bins, click_metrics, log_loss, ranking_metrics, sigmoid


@pytest.mark.parametrize("decimals", [1, 2, 6])
@pytest.mark.parametrize("rate", [0.02, 0.5])
def test_auc_and_log_loss_equal_scikit_learn(decimals: int, rate: float) -> None:
    rng = np.random.default_rng(decimals)
    labels = (rng.random(5_000) < rate).astype(np.float32)
    scores = np.round(np.clip(rng.normal(0.4 + 0.1 * labels, 0.2), 0.001, 0.999), decimals)  # coarse: many ties
    assert auc(labels, scores) == pytest.approx(reference.roc_auc_score(labels, scores), abs=1e-12)
    kept = np.clip(scores, 0.001, 0.999)
    assert log_loss(labels, kept) == pytest.approx(reference.log_loss(labels, kept), rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2, max_size=30))
def test_auc_is_the_share_of_pairs_in_order(rows: list[tuple[bool, int]]) -> None:
    labels = np.array([r[0] for r in rows], np.float32)
    scores = np.array([r[1] for r in rows], np.float32)
    pairs = [(p > n) + 0.5 * (p == n) for p in scores[labels > 0] for n in scores[labels == 0]]
    found = auc(labels, scores)
    if not pairs:
        assert found is None
    else:
        assert found == pytest.approx(np.mean(pairs))


def test_extreme_values_stay_finite() -> None:
    p = sigmoid(np.array([-1000.0, -30.0, 0.0, 30.0, 1000.0], np.float32))
    np.testing.assert_allclose(p, [0, 1 / (1 + math.exp(30)), 0.5, 1 / (1 + math.exp(-30)), 1], atol=1e-300)
    assert math.isfinite(log_loss(np.array([1, 0]), np.array([0.0, 1.0])))


def test_click_metrics() -> None:
    found = click_metrics(np.array([1, 0, 0, 0]), np.array([0.5, 0.2, 0.2, 0.3]))
    assert found["base_rate"] == 0.25
    assert found["calibration"] == pytest.approx(0.3 / 0.25)
    assert found["auc"] == 1.0
    one_class = click_metrics(np.zeros(4), np.full(4, 0.1))
    assert (one_class["auc"], one_class["calibration"], one_class["base_rate"]) == (None, None, 0.0)


@pytest.mark.parametrize(
    "values", [lambda r, n: r.random(n), lambda r, n: np.round(r.random(n), 1), lambda r, n: np.full(n, 0.5)]
)
@pytest.mark.parametrize("n", [1, 7, 1_000])
def test_calibration_bins_hold_each_row_once(values: Callable[[np.random.Generator, int], np.ndarray], n: int) -> None:
    rng = np.random.default_rng(n)
    p = values(rng, n)
    y = (rng.random(n) < p).astype(np.float32)
    bins = calibration_bins(y, p, bins=10)
    assert 1 <= len(bins) <= 10
    assert sum(b.rows for b in bins) == n
    assert sum(b.rows * b.predicted for b in bins) == pytest.approx(p.sum())
    assert sum(b.rows * b.observed for b in bins) == pytest.approx(y.sum())
    assert [b.predicted for b in bins] == sorted({b.predicted for b in bins})
    if n == 1_000 and len(set(p)) == n:
        assert [b.rows for b in bins] == [100] * 10


def test_calibration_bins_of_a_calibrated_model_lie_on_the_diagonal() -> None:
    rng = np.random.default_rng(0)
    p = rng.random(200_000)
    y = rng.random(200_000) < p
    for b in calibration_bins(y.astype(np.float32), p):
        assert b.observed == pytest.approx(b.predicted, abs=0.015)


def test_ranking_equals_the_leave_one_out_protocol() -> None:
    rng = np.random.default_rng(5)
    users, k = 300, 10
    scores = rng.normal(size=(users, 100))
    labels = np.zeros((users, 100))
    labels[:, 0] = 1
    hits, gains = [], []
    for u in range(users):
        place = int((scores[u] > scores[u, 0]).sum())
        hits.append(place < k)
        gains.append(1 / math.log2(place + 2) if place < k else 0.0)
    order = rng.permutation(users * 100)
    groups = np.repeat(np.arange(users), 100)[order]
    found = ranking_metrics(groups, labels.reshape(-1)[order], scores.reshape(-1)[order], k)
    assert found["hr_at_k"] == pytest.approx(np.mean(hits))
    assert found["ndcg_at_k"] == pytest.approx(np.mean(gains))


def test_ranking_with_several_positives_equals_scikit_learn() -> None:
    rng = np.random.default_rng(6)
    labels = (rng.random((50, 20)) < 0.2).astype(float)
    labels[:3] = 0  # groups without a positive do not count
    scores = rng.normal(size=(50, 20))
    kept = labels.sum(1) > 0
    found = ranking_metrics(np.repeat(np.arange(50), 20), labels.reshape(-1), scores.reshape(-1), 5)
    assert found["ndcg_at_k"] == pytest.approx(reference.ndcg_score(labels[kept], scores[kept], k=5))


def test_a_constant_model_gains_nothing_by_ties() -> None:
    labels = np.zeros(100)
    labels[0] = 1
    found = ranking_metrics(np.zeros(100, np.int64), labels, np.zeros(100), 10)
    assert found == {"hr_at_k": 0.0, "ndcg_at_k": 0.0}
