"""The ceiling: AUC against scikit-learn and against counting pairs; probabilities against the clicks they gave."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from headrace.config import Generate
from headrace.generate.click_model import ClickModel, events, probability
from headrace.generate.truth import auc, auc_of_histogram, histogram


@pytest.mark.parametrize("distinct", [2, 7, 100_000])
def test_auc_equals_scikit_learns_with_and_without_ties(distinct: int) -> None:
    rng = np.random.default_rng(distinct)
    score = rng.integers(0, distinct, size=3_000).astype(np.float64)
    label = rng.random(3_000) < 1 / (1 + np.exp(-(score / distinct - 0.5)))
    assert auc(score, label) == pytest.approx(roc_auc_score(label, score), abs=1e-12)


def test_expected_auc_equals_counting_all_pairs() -> None:
    rng = np.random.default_rng(4)
    p = np.round(rng.random(60), 1)
    pairs = wins = 0.0
    for i in range(60):
        for j in range(60):
            # i clicked, j did not; a row is no pair with itself only where it cannot be both, so both sides keep it.
            weight = p[i] * (1 - p[j])
            pairs += weight
            wins += weight * (1.0 if p[i] > p[j] else 0.5 if p[i] == p[j] else 0.0)
    assert auc(p, p) == pytest.approx(wins / pairs, abs=1e-12)


def test_one_class_has_no_auc() -> None:
    assert auc(np.array([1.0, 2.0]), np.array([True, True])) is None
    assert auc(np.array([]), np.array([], dtype=bool)) is None


def test_histograms_add_up_to_the_auc_of_all_rows() -> None:
    rng = np.random.default_rng(5)
    logit = rng.normal(-1.5, 1.5, size=50_000)
    logit[:3] = [-40.0, 40.0, 16.0]  # beyond the bins
    label = (rng.random(50_000) < probability(logit)).astype(np.float64)
    parts = [histogram(logit[a : a + 10_000], label[a : a + 10_000]) for a in range(0, 50_000, 10_000)]
    total = parts[0] + parts[1] + parts[2] + parts[3] + parts[4]
    assert total.positive.sum() == label.sum()
    assert total.negative.sum() == 50_000 - label.sum()
    assert auc_of_histogram(total) == pytest.approx(auc(logit, label), abs=1e-5)


def test_clicks_follow_their_probabilities() -> None:
    n = 200_000
    e = events(ClickModel(Generate(base_rate=0.1), 3), np.zeros(n, dtype=np.int64), np.arange(n))
    p = probability(e.logit)
    assert p.mean() == pytest.approx(0.1, abs=0.002)
    edges = np.quantile(p, np.linspace(0, 1, 21))
    place = np.clip(np.searchsorted(edges, p, side="right") - 1, 0, 19)
    for k in range(20):
        inside = place == k
        expected, spread = p[inside].sum(), np.sqrt((p[inside] * (1 - p[inside])).sum())
        assert abs(e.clicked[inside].sum() - expected) < 4.5 * spread


def test_an_event_is_the_same_alone_and_among_others() -> None:
    model = ClickModel(Generate(late=0.3), 3)
    day, row = np.repeat(np.arange(4, 8), 500), np.tile(np.arange(500), 4)
    together = events(model, day, row)
    pick = np.array([3, 777, 1999])
    single_events = [events(model, day[i : i + 1], row[i : i + 1]) for i in pick]
    for i, single in zip(pick, single_events, strict=True):
        assert single.event_id[0] == together.event_id[i]
        assert single.users.id[single.user_row[0]] == together.users.id[together.user_row[i]]
        assert single.items.id[single.item_row[0]] == together.items.id[together.item_row[i]]
        assert single.logit[0] == pytest.approx(together.logit[i], rel=1e-12)
        assert single.clicked[0] == together.clicked[i]
        assert (single.day[0], single.lag[0], single.millisecond[0]) == (
            together.day[i],
            together.lag[i],
            together.millisecond[i],
        )


def test_late_events_land_within_the_late_days_and_nothing_happens_before_the_first_day() -> None:
    n = 5_000
    for day in (0, 1, 10):
        e = events(ClickModel(Generate(late=0.5), 3), np.full(n, day), np.arange(n))
        assert set(e.lag.tolist()) == set(range(min(day, 3) + 1))
        assert e.day.min() >= 0
    assert set(events(ClickModel(Generate(late=1.0), 0), np.full(n, 5), np.arange(n)).lag.tolist()) == {0}
