"""Generated clicks can be learned: the best possible AUC, and what models reach of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix, hstack
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from headrace.config import Generate, load_spec
from headrace.config.workspace import Workspace
from headrace.lake.generate import days_between, generate
from headrace.lake.generate.click_model import ClickModel, events, probability
from headrace.lake.generate.population import TAGS
from headrace.lake.generate.truth import auc, auc_of_histogram, histogram


def read(folder: Path) -> pd.DataFrame:
    frames = [pd.read_csv(p, dtype={"user_id": "Int64", "item_id": "Int64"}) for p in sorted(folder.glob("*.csv.gz"))]
    return pd.concat(frames, ignore_index=True).drop_duplicates("event_id")


def design(days: pd.DataFrame, levels: dict[str, pd.Index]) -> csr_matrix:
    """One-hot ids and categories and their products, tags, and the numbers: what a linear model can make of a row."""
    parts = []
    for name, index in levels.items():
        codes = index.get_indexer(days[name].fillna("null" if days[name].dtype == object else 0))
        known = codes >= 0
        shape = (len(days), len(index))
        parts.append(csr_matrix((np.ones(known.sum()), (np.flatnonzero(known), codes[known])), shape=shape))
    tags = days["item_tags"].fillna("").str.get_dummies("|").reindex(columns=TAGS, fill_value=0)
    numbers = np.column_stack(
        [
            np.log(days["item_price"].fillna(20.0)) / 2,
            np.log(days["user_activity"].fillna(4.0)),
            np.exp(-days["item_age_days"].fillna(100.0) / 10),
            days["user_age"].fillna(38) / 20,
        ]
    )
    return hstack([*parts, csr_matrix(tags.to_numpy(dtype=float)), csr_matrix(numbers)], format="csr")


def crossed(days: pd.DataFrame) -> pd.DataFrame:
    group = np.searchsorted([25, 35, 45, 60], days["user_age"].fillna(38), side="right").astype(str)
    return days.assign(
        by_country=days["item_category"].fillna("null") + "/" + days["user_country"].fillna("null"),
        by_age=days["item_category"].fillna("null") + "/" + group,
        by_device=days["item_category"].fillna("null") + "/" + days["device"].fillna("null"),
        by_hour=days["device"].fillna("null") + "/" + days["hour"].astype(str),
    )


def test_a_linear_model_comes_near_the_ceiling_and_not_above_it(ws: Workspace) -> None:
    spec = load_spec(
        "clicks",
        [
            "generate.rows_per_day=15000",
            "generate.users=400",
            "generate.items=150",
            "generate.formats=[csv]",
            "generate.malformed=0",
            "generate.taste=0",
        ],
    )
    truths = generate(spec, ws, days_between("2026-01-01", "2026-01-05"))
    frames = [crossed(read(ws.landing("clicks").local_path() / t.ds)) for t in truths]
    train, last = pd.concat(frames[:-1], ignore_index=True), frames[-1]
    last = last[last["ts"].str.startswith(truths[-1].ds)]
    assert truths[-1].valid_rows <= len(last) <= truths[-1].valid_rows + 100  # repeats of the day before's late rows
    columns = ("user_id", "item_id", "item_category", "by_country", "by_age", "by_device", "by_hour")
    levels = {c: pd.Index(train[c].fillna("null" if train[c].dtype == object else 0).unique()) for c in columns}
    model = LogisticRegression(C=0.3, max_iter=300).fit(design(train, levels), train["clicked"])
    reached = roc_auc_score(last["clicked"], model.decision_function(design(last, levels)))
    ceiling = truths[-1].auc_ceiling
    assert ceiling is not None
    assert 0.78 < ceiling < 0.87
    share = (reached - 0.5) / (ceiling - 0.5)
    assert 0.9 < share < 1.0


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
