"""Metrics within users, of ranked lists and of what is recommended, against loops over users and items."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference

from headrace.train.evaluation.auc import user_metrics
from headrace.train.evaluation.bootstrap import Bootstrap
from headrace.train.evaluation.ranking import LIST_METRICS, catalogue_metrics, ranked_lists, ranking_metrics
from headrace.train.evaluation.ranks import Dimension, Ranks, ScoredRows
from tests.evaluation_support import list_metrics, on_any_ranks, part_of, rows_of

ROWS = st.lists(
    st.tuples(st.integers(-3, 3).map(float), st.booleans(), st.integers(-2, 5), st.integers(-1, 1), st.integers(2, 9)),
    max_size=50,
)
DIMENSIONS = [Dimension("half", ("a", "b"))]


def drawn_rows(drawn: list[Any]) -> ScoredRows:
    return rows_of(*([r[i] for r in drawn] for i in range(3)), [[r[3] for r in drawn]])


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_auc_of_users_equals_a_loop(drawn: list[Any]) -> None:
    tables = on_any_ranks(drawn_rows(drawn), lambda ranks, part: user_metrics(ranks, part, dimensions=DIMENSIONS))
    for values, codes in ((tables[0], [None]), (tables[1], [0, 1])):
        for column, code in enumerate(codes):
            by_user = defaultdict(list)
            for row in drawn:
                if code is None or row[3] == code:
                    by_user[row[2]].append(row)
            both = [r for r in by_user.values() if len({x[1] for x in r}) == 2]
            areas = [reference.roc_auc_score([x[1] for x in r], [x[0] for x in r]) for r in both]
            sizes = [len(r) for r in both]
            if not both:
                assert math.isnan(values["gauc"][0, column])
                assert math.isnan(values["user_auc"][0, column])
                continue
            assert values["gauc"][0, column] == pytest.approx(np.average(areas, weights=sizes), rel=1e-12)
            assert values["user_auc"][0, column] == pytest.approx(np.mean(areas), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(1, 5))
def test_ranked_lists_equal_a_loop(drawn: list[Any], k: int) -> None:
    def evaluate(ranks: Ranks, part: ScoredRows) -> Any:
        return ranking_metrics(ranks, ranked_lists(ranks, part), k, dimensions=DIMENSIONS)

    # All rows of a list are of one slice.
    drawn = [(*r[:3], r[2] % 2, r[4]) for r in drawn]
    tables = on_any_ranks(drawn_rows(drawn), evaluate)
    by_list = defaultdict(list)
    for row in drawn:
        by_list[row[2]].append(row)
    for table, column, chosen in ((tables[0], 0, {0, 1}), (tables[1], 0, {0}), (tables[1], 1, {1})):
        metrics_of_lists = [
            m for key, r in by_list.items() if key % 2 in chosen and (m := list_metrics(r, k)) is not None
        ]
        for name in LIST_METRICS:
            expected = (
                pytest.approx(np.mean([m[name] for m in metrics_of_lists]), rel=1e-12) if metrics_of_lists else None
            )
            value = table[name][0, column]
            assert (None if math.isnan(value) else value) == expected, name


def test_ranking_with_several_positives_equals_scikit_learn() -> None:
    rng = np.random.default_rng(6)
    labels = rng.random((50, 20)) < 0.2
    labels[:3] = False  # lists without a positive do not count
    scores = rng.normal(size=(50, 20)).astype(np.float32)
    has_positive = labels.sum(1) > 0
    rows = rows_of(scores.reshape(-1), labels.reshape(-1), np.repeat(np.arange(50), 20))
    (table,) = ranking_metrics(Ranks(), ranked_lists(Ranks(), rows), 5)
    assert table["ndcg_at_k"][0, 0] == pytest.approx(
        reference.ndcg_score(labels[has_positive], scores[has_positive], k=5)
    )


def test_a_constant_model_gains_nothing_by_ties() -> None:
    labels = np.arange(100) == 0
    (table,) = ranking_metrics(Ranks(), ranked_lists(Ranks(), rows_of(np.zeros(100), labels, np.zeros(100))), 10)
    assert {float(v[0, 0]) for v in table.values()} == {0.0}


def test_replicates_draw_users_and_lists() -> None:
    rng = np.random.default_rng(1)
    n, bootstrap = 400, Bootstrap(5, seed=2)
    labels, users = rng.random(n) < 0.4, rng.integers(0, 30, n)
    rows = rows_of(np.round(rng.normal(labels * 1.0), 1), labels, users, [users % 2])

    def of_users(ranks: Ranks, part: ScoredRows) -> Any:
        return user_metrics(ranks, part, dimensions=DIMENSIONS, bootstrap=bootstrap)

    def of_lists(ranks: Ranks, part: ScoredRows) -> Any:
        return ranking_metrics(ranks, ranked_lists(ranks, part), 3, dimensions=DIMENSIONS, bootstrap=bootstrap)

    alone = [of_users(Ranks(), part_of(rows, users == u))[0]["user_auc"][0, 0] for u in range(30)]
    hits = [of_lists(Ranks(), part_of(rows, users == u))[0]["hr_at_k"][0, 0] for u in range(30)]
    areas = on_any_ranks(rows, of_users)
    ranked = on_any_ranks(rows, of_lists)
    assert len({float(v) for v in areas[0]["user_auc"][:, 0]}) == 6
    for replicate in range(6):
        counts = bootstrap.counts(np.arange(30), replicate)
        for values, replicated, name in ((alone, areas, "user_auc"), (hits, ranked, "hr_at_k")):
            assert replicated[0][name][replicate, 0] == pytest.approx(np.average(values, weights=counts), rel=1e-12)
            assert replicated[1][name][replicate, 1] == pytest.approx(
                np.average(values[1::2], weights=counts[1::2]), rel=1e-12
            )


@settings(max_examples=40, deadline=None)
@given(ROWS, st.integers(1, 4), st.lists(st.integers(0, 5), min_size=12, max_size=12))
def test_what_is_recommended_equals_a_loop(drawn: list[Any], k: int, positives: list[int]) -> None:
    # One score each: which of equals is shown is not said.
    drawn = [(float(i * 7 % 53), *r[1:]) for i, r in enumerate(drawn)]
    rows, items = drawn_rows(drawn), np.array([r[4] for r in drawn], np.int64)
    rows = ScoredRows(rows.scores, rows.labels, rows.users, (*rows.slices, items))

    def evaluate(ranks: Ranks, part: ScoredRows) -> Any:
        part_of_users = ScoredRows(part.scores, part.labels, part.users)
        lists = ranked_lists(ranks, part_of_users, part.slices[1])
        return catalogue_metrics(ranks, lists, np.array(positives), 2, k)

    (table,), coverage = on_any_ranks(rows, evaluate)
    by_list = defaultdict(list)
    for row in drawn:
        by_list[row[2]].append(row)
    recommended = [[r[4] for r in sorted(list_rows, reverse=True)[:k]] for list_rows in by_list.values()]
    assert coverage == len({i for items in recommended for i in items}) / 10
    if not recommended:
        assert math.isnan(table["popularity_at_k"][0, 0])
        return
    popularity = np.mean([np.mean([positives[i] for i in items]) for items in recommended])
    assert table["popularity_at_k"][0, 0] == pytest.approx(popularity, rel=1e-12)
    total = sum(positives)
    novelty = np.mean(
        [np.mean([-math.log2(max(positives[i], 1) / max(total, 1)) for i in items]) for items in recommended]
    )
    assert table["novelty_at_k"][0, 0] == pytest.approx(novelty, rel=1e-12, abs=1e-12)
    if total:
        usual = np.average(positives, weights=positives)
        assert table["popularity_lift_at_k"][0, 0] == pytest.approx(popularity / usual - 1, rel=1e-9, abs=1e-12)
    else:
        assert math.isnan(table["popularity_lift_at_k"][0, 0])
