"""Lists that are drawn by a temperature: against Plackett and Luce's probabilities, caps and shares."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.score import Rerank
from headrace.score.rerank.reranker import rerank
from headrace.score.rerank.select import RankedItems, Rule
from tests.rerank_support import DS, caps, lambdas, make_rules, of_user, only, shares, some_lists


def plackett_luce(scores: np.ndarray, temperature: float, k: int) -> dict[tuple[int, ...], float]:
    """The probability of each list of k, by Luce's rule of choice."""
    probabilities = {}
    for order in itertools.permutations(range(len(scores)), k):
        p, left = 1.0, list(range(len(scores)))
        for item in order:
            p *= math.exp(scores[item] / temperature) / sum(math.exp(scores[i] / temperature) for i in left)
            left.remove(item)
        probabilities[order] = p
    return probabilities


def test_lists_by_a_temperature_are_those_of_plackett_and_luce() -> None:
    """The frequency of every list; and inverse propensities estimate what other policies earn."""
    users, k, temperature = 60_000, 3, 0.4
    scores = np.array([0.9, 0.7, 0.4, 0.35, 0.1], np.float32)
    lists = RankedItems(np.arange(users, dtype=np.uint64), np.arange(users + 1) * 5, np.tile(scores, users))
    reranked = rerank(lists, Rerank.model_validate({"explore": {"temperature": temperature}}), k, DS)
    shown_items, propensities = (reranked.rows % 5).reshape(users, k), reranked.propensity.reshape(users, k)
    seen = Counter(map(tuple, shown_items.tolist()))
    exact = plackett_luce(scores.astype(float), temperature, k)
    assert sum(exact.values()) == pytest.approx(1)
    for order, p in exact.items():
        assert abs(seen[order] / users - p) < 4.5 * np.sqrt(p * (1 - p) / users)
    # The product of a list's propensities is its probability.
    expected = np.array([exact[tuple(order)] for order in shown_items.tolist()])
    assert propensities.prod(1) == pytest.approx(expected, rel=1e-9)
    assert (
        reranked.rule.reshape(users, k)[:, 0].tolist()
        == np.where(shown_items[:, 0] == 0, Rule.SCORE, Rule.EXPLORE).tolist()
    )
    rng = np.random.default_rng(5)
    truth = np.array([0.1, 0.5, 0.3, 0.8, 0.6])  # clicks of each item; the scores have them the other way round
    clicked = rng.random((users, k)) < truth[shown_items]
    # At the first position: of a policy that likes what is clicked.
    policy = np.exp(3 * truth) / np.exp(3 * truth).sum()
    weighted = policy[shown_items[:, 0]] / propensities[:, 0] * clicked[:, 0]
    error = weighted.std() / np.sqrt(users)
    assert abs(weighted.mean() - policy @ truth) < 3 * error < 0.05
    # Of lists: of the same model with another temperature.
    target_policy = plackett_luce(scores.astype(float), 2.0, k)
    value = sum(p * truth[list(order)].sum() for order, p in target_policy.items())
    weights = np.array([target_policy[tuple(order)] for order in shown_items.tolist()]) / propensities.prod(1)
    weighted = weights * clicked.sum(1)
    error = weighted.std() / np.sqrt(users)
    assert abs(weighted.mean() - value) < 3 * error < 0.05
    assert abs(clicked.sum(1).mean() - value) > 10 * error


@settings(max_examples=60, deadline=None)
@given(
    some_lists(),
    caps,
    shares,
    shares,
    lambdas,
    st.sampled_from([0.01, 0.3, 50.0]),
    st.sampled_from([None, 1, 3]),
    st.integers(1, 9),
)
def test_a_temperature_keeps_caps_and_shares(
    lists: RankedItems,
    caps: dict[str, int],
    fresh: float | None,
    new: float | None,
    relevance: float | None,
    temperature: float,
    pool: int | None,
    k: int,
) -> None:
    settings = {"explore": {"temperature": temperature, "pool": pool}}
    reranked = rerank(lists, make_rules(caps, fresh, new, 0.0, relevance, **settings), k, DS)
    for user in range(len(lists.users)):
        rows, _, propensity = of_user(lists, reranked, user)
        assert len(set(rows)) == len(rows)
        assert all(0 < p <= 1 for p in propensity)
        for column, most in caps.items():
            counts = Counter(v for v in lists.values[column][rows].tolist() if v >= 0)
            assert max(counts.values(), default=0) <= most
        user_alone = rerank(only(lists, user), make_rules(caps, fresh, new, 0.0, relevance, **settings), k, DS)
        assert (user_alone.rows + lists.offsets[user]).tolist() == rows
        if not caps:
            for share, members in ((fresh, lists.fresh), (new, lists.new)):
                assert members is not None
                available = int(members[lists.offsets[user] : lists.offsets[user + 1]].sum())
                for end in range(1, len(rows) + 1) if share and not (fresh and new) else ():
                    assert members[rows[:end]].sum() >= min(int((share or 0) * end + 1e-9), available)
        if pool is not None and not (caps or fresh or new):
            assert all(row - lists.offsets[user] < k + pool for row in rows)
