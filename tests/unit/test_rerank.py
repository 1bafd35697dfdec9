"""Lists by rules: against plain loops over one user's items, and chance against everything that can happen."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.config.evaluation import OffPolicy
from headrace.config.score import Rerank
from headrace.score.rerank.reranker import reasons, rerank
from headrace.score.rerank.select import RankedItems, Rule
from headrace.train.evaluation.policy import Actions, Policy, off_policy_metrics
from headrace.train.evaluation.ranks import Ranks, sigmoid
from tests.rerank_support import DS, caps, lambdas, make_rules, of_user, only, shares, some_lists


def slow(lists: RankedItems, rules: Rerank, k: int, user: int) -> tuple[list[int], list[int]]:
    """One user's list by loops over sets: rows, and rules."""
    items = range(int(lists.offsets[user]), int(lists.offsets[user + 1]))
    assert lists.fresh is not None
    assert lists.new is not None
    value = {i: float(lists.scores[i]) for i in items}
    boost = rules.freshness.boost if rules.freshness else 0.0
    for i in items:
        if lists.fresh[i]:
            value[i] += boost * abs(value[i])
    diversity = rules.diversity
    if diversity is not None and value:
        low, high = min(value.values()), max(value.values())
        value = {i: (v - low) / (high - low) if high > low else 0.0 for i, v in value.items()}

    def alike(i: int, j: int) -> float:
        assert diversity is not None
        columns = [lists.values[c] for c in diversity.by]
        return sum(bool(c[i] == c[j] >= 0) for c in columns) / len(columns)

    def fits(i: int, chosen: list[int]) -> bool:
        for column, most in rules.caps.items():
            cells = lists.values[column]
            if cells[i] >= 0 and sum(cells[j] == cells[i] for j in chosen) >= most:
                return False
        return True

    share_rules: list[tuple[int, float, set[int]]] = []
    if rules.freshness and rules.freshness.share:
        share_rules.append((Rule.FRESH, rules.freshness.share, {i for i in items if lists.fresh[i]}))
    if rules.new_items:
        share_rules.append((Rule.NEW_ITEM, rules.new_items.share, {i for i in items if lists.new[i]}))
    chosen: list[int] = []
    chosen_rules: list[int] = []
    while len(chosen) < k:
        possible = [i for i in items if i not in chosen and fits(i, chosen)]
        if not possible:
            break
        waits = set()
        for column, most in rules.caps.items():
            column_values = lists.values[column]
            room = {
                v: most - sum(column_values[j] == v for j in chosen) if v >= 0 else 99 for v in column_values[possible]
            }
            for _, share, members in share_rules:
                lack = int(share * min(k, len(items)) + 1e-9) - len(members & set(chosen))
                sizes = Counter(column_values[i] for i in members & set(possible))
                if 0 < lack >= sum(min(size, room[v]) for v, size in sizes.items()):
                    waits |= {
                        i
                        for i in possible
                        if i not in members and 0 < sizes[column_values[i]] >= room[column_values[i]]
                    }
        possible = [i for i in possible if i not in waits] or possible
        marginal = {}
        for i in possible:
            marginal[i] = value[i]
            if diversity is not None:
                nearest = max((alike(i, j) for j in chosen), default=0.0)
                marginal[i] = diversity.relevance * value[i] - (1 - diversity.relevance) * nearest
        best = max(possible, key=lambda i: (marginal[i], -i))
        rule = Rule.FRESH if boost and lists.fresh[best] and best - items.start >= k else Rule.SCORE
        must: dict[int, set[int]] = {}
        for end in range(len(chosen) + 1, k + 1):
            lacks = {}
            for name, share, members in share_rules:
                missing = max(int(share * end + 1e-9) - len(members & set(chosen)), 0)
                lacks[name] = min(missing, len(members & set(possible)))
            if sum(lacks.values()) >= end - len(chosen):
                must = {name: members for name, _, members in share_rules if lacks[name]}
                break
        narrow = [i for i in possible if any(i in members for members in must.values())]
        pick = max(narrow, key=lambda i: (marginal[i], -i)) if narrow else best
        if pick != best:
            rule = max(name for name, members in must.items() if pick in members)
        chosen.append(pick)
        chosen_rules.append(rule)
    return chosen, chosen_rules


def test_a_cap_leaves_room_for_a_share() -> None:
    lists = RankedItems(
        users=np.array([1], np.uint64),
        offsets=np.array([0, 4]),
        scores=np.array([0.9, 0.8, 0.7, 0.6], np.float32),
        fresh=np.array([False, False, True, False]),
        values={"brand": np.array([0, 1, 0, 2])},
    )
    rules = Rerank.model_validate({"caps": {"brand": 1}, "freshness": {"days": 7, "share": 0.5}})
    assert rerank(lists, rules, 2, DS).rows.tolist() == [1, 2]


@settings(max_examples=150, deadline=None)
@given(some_lists(), st.integers(1, 3), st.sampled_from([0.25, 0.34, 0.5, 1.0]), lambdas, st.integers(1, 9))
def test_a_share_is_reached_as_far_as_a_cap_allows(
    lists: RankedItems, most: int, share: float, relevance: float | None, k: int
) -> None:
    reranked = rerank(lists, make_rules({"seller": most}, share, None, 0.0, relevance), k, DS)
    assert lists.fresh is not None
    for user in range(len(lists.users)):
        rows, _, _ = of_user(lists, reranked, user)
        items = range(int(lists.offsets[user]), int(lists.offsets[user + 1]))
        sellers = Counter(int(lists.values["seller"][i]) for i in items if lists.fresh[i])
        possible = sum(min(n, most) if seller >= 0 else n for seller, n in sellers.items())
        for n in range(len(rows) + 1):
            required = int(share * n + 1e-9)
            assert sum(lists.fresh[rows[:n]]) >= min(required, possible)


@settings(max_examples=60, deadline=None)
@given(some_lists(), caps, shares, shares, st.sampled_from([0.0, 0.5]), lambdas, st.integers(1, 9))
def test_lists_are_those_of_plain_loops(
    lists: RankedItems,
    caps: dict[str, int],
    fresh: float | None,
    new: float | None,
    boost: float,
    relevance: float | None,
    k: int,
) -> None:
    rules = make_rules(caps, fresh, new, boost, relevance)
    reranked = rerank(lists, rules, k, DS)
    for user in range(len(lists.users)):
        rows, rule, propensity = of_user(lists, reranked, user)
        assert (rows, rule) == slow(lists, rules, k, user)
        assert propensity == [1.0] * len(rows)


@settings(max_examples=60, deadline=None)
@given(
    some_lists(),
    caps,
    shares,
    shares,
    st.sampled_from([0.1, 0.5, 1.0]),
    st.sampled_from([None, 1, 3]),
    st.integers(1, 9),
)
def test_exploration_keeps_caps_and_shares(
    lists: RankedItems,
    caps: dict[str, int],
    fresh: float | None,
    new: float | None,
    epsilon: float,
    pool: int | None,
    k: int,
) -> None:
    rules = make_rules(caps, fresh, new, 0.0, None)
    unexplored = rerank(lists, rules, k, DS)
    explored = make_rules(caps, fresh, new, 0.0, None, explore={"epsilon": epsilon, "pool": pool})
    reranked = rerank(lists, explored, k, DS)
    assert (reranked.offsets == unexplored.offsets).all()
    for user in range(len(lists.users)):
        rows, rule, propensity = of_user(lists, reranked, user)
        planned = of_user(lists, unexplored, user)[0]
        # What the other users of a block have changes nothing.
        user_alone = rerank(only(lists, user), explored, k, DS)
        assert (user_alone.rows + lists.offsets[user]).tolist() == rows
        assert (user_alone.rule.tolist(), user_alone.propensity.tolist()) == (rule, propensity)
        assert len(set(rows)) == len(rows)
        assert all(0 < p <= 1 for p in propensity)
        for column, most in caps.items():
            counts = Counter(v for v in lists.values[column][rows].tolist() if v >= 0)
            assert max(counts.values(), default=0) <= most
        for share, members in ((fresh, lists.fresh), (new, lists.new)):
            assert members is not None
            for end in range(1, len(rows) + 1) if share else ():
                least = min(int((share or 0) * end + 1e-9), int(members[planned[:end]].sum()))
                assert members[rows[:end]].sum() >= least
        for row, reason, place in zip(rows, rule, planned, strict=True):
            assert (reason == Rule.EXPLORE) == (row != place)
        assert len(set(rows) - set(planned)) <= (pool or 99)


def test_marginal_relevance_by_vectors() -> None:
    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(60, 5))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    scores = np.concatenate([-np.sort(-rng.random(25)), -np.sort(-rng.random(35))]).astype(np.float32)
    offsets = np.array([0, 25, 60])
    lists = RankedItems(np.arange(2, dtype=np.uint64), offsets, scores, vectors=vectors)
    reranked = rerank(lists, Rerank.model_validate({"diversity": {"relevance": 0.4}}), 8, DS)
    cosine = vectors.astype(np.float64) @ vectors.T.astype(np.float64)
    for user in range(2):
        rows = of_user(lists, reranked, user)[0]
        items = np.arange(*offsets[user : user + 2])
        relevance = (scores[items] - scores[items].min()) / np.ptp(scores[items])
        for place, row in enumerate(rows):
            nearest = cosine[items][:, rows[:place]].max(1) if place else np.zeros(len(items))
            marginal = 0.4 * relevance - 0.6 * nearest
            marginal[np.isin(items, rows[:place])] = -np.inf
            assert items[marginal.argmax()] == row
        assert rows != items[:8].tolist()


def outcomes(planned: list[int], pool: list[int], epsilon: float) -> dict[tuple[int, int], float]:
    """The probability that an item stands at a position, by all that can be drawn: {(position, item): p}."""
    probabilities: Counter[tuple[int, int]] = Counter()
    for drawn in itertools.product([False, True], repeat=len(planned)):
        p = float(np.prod([epsilon if d else 1 - epsilon for d in drawn]))
        places = [i for i, d in enumerate(drawn) if d]
        orders = list(itertools.permutations([*pool, *(planned[i] for i in places)], len(places)))
        for order in orders:
            listed = list(planned)
            for place, item in zip(places, order, strict=True):
                listed[place] = item
            for place, item in enumerate(listed):
                probabilities[place, item] += p / len(orders)
    return dict(probabilities)


@pytest.mark.parametrize(("items", "k", "share"), [(6, 3, None), (4, 4, None), (3, 1, None), (7, 4, 0.5)])
def test_propensities_are_those_of_everything_that_can_be_drawn(items: int, k: int, share: float | None) -> None:
    users, epsilon = 40_000, 0.3
    new = np.tile(np.arange(items) == 1, users) if share else None
    lists = RankedItems(
        users=np.arange(users, dtype=np.uint64),
        offsets=np.arange(users + 1) * items,
        scores=np.tile(np.linspace(1, 0, items).astype(np.float32), users),
        new=new if new is not None else None,
        fresh=np.ones(users * items, bool),
    )
    # A protected position: the first new item, of which two are asked for and one is there.
    rules: dict[str, Any] = {"explore": {"epsilon": epsilon}, "new_items": {"share": share} if share else None}
    reranked = rerank(lists, Rerank.model_validate(rules), k, DS)
    shown_items = (reranked.rows % items).reshape(users, k)
    propensities = reranked.propensity.reshape(users, k)
    fixed = [1] if share else []
    free = [i for i in range(k) if i not in fixed]
    exact = outcomes(free, list(range(k, items)), epsilon)
    assert sum(exact.values()) == pytest.approx(len(free))
    for i, position in enumerate(free):
        seen: dict[int, float] = {}
        for item in range(items):
            has_item = shown_items[:, position] == item
            if item in fixed:
                assert not has_item.any()
                continue
            p = seen[item] = exact[i, item]
            if has_item.any():
                assert propensities[has_item, position] == pytest.approx(p, rel=1e-12)
            assert abs(has_item.mean() - p) < 4.5 * np.sqrt(p * (1 - p) / users) + 1e-12
        assert sum(seen.values()) == pytest.approx(1)
    for position in fixed:
        assert (shown_items[:, position] == position).all()
        assert (propensities[:, position] == 1).all()


def test_the_value_of_another_policy_is_estimated_without_bias() -> None:
    """Lists with our propensities give off_policy's IPS estimate of another policy, compared with its true value."""
    rng = np.random.default_rng(5)
    users, items, k = 30_000, 8, 3
    taste = rng.normal(size=(users, items))
    # What the model of yesterday knew of it is not much.
    scores = sigmoid(0.5 * taste + rng.normal(size=(users, items)))
    order = np.argsort(-scores, axis=1)
    lists = RankedItems(
        users=np.arange(users, dtype=np.uint64),
        offsets=np.arange(users + 1) * items,
        scores=np.take_along_axis(scores, order, 1).ravel().astype(np.float32),
        values={"seller": (order % 4).ravel()},
    )
    # Of each seller there are two items: the cap binds nobody but the pool's rule.
    rules = Rerank.model_validate({"explore": {"epsilon": 0.4}, "caps": {"seller": 2}})
    reranked = rerank(lists, rules, k, DS)
    user, position = np.repeat(np.arange(users), k), np.tile(np.arange(k), users)
    item = order.ravel()[reranked.rows]
    truth = sigmoid(taste - 1.5) * 0.8 ** np.arange(k)[:, None, None]  # [position, user, item]
    clicked = (rng.random(len(item)) < truth[position, user, item]).astype(np.float64)
    policy = Policy(OffPolicy(propensity="propensity", action="item"), Actions("item", np.arange(items)))
    choices = policy.choose(item, lambda values: 2 * taste[user, values["item"]])
    share = np.exp(2 * taste)
    share /= share.sum(1, keepdims=True)
    value = (share[user] * truth[position, user]).sum(1).mean()

    def estimate(propensity: np.ndarray) -> float:
        return float(off_policy_metrics(Ranks(), choices, propensity, clicked, clicked)[0]["ips"][0, 0])

    weighted = choices.chosen / reranked.propensity * clicked
    by_user = weighted.reshape(users, k).mean(1)
    error = by_user.std() / np.sqrt(users)
    assert error < 0.05 * value
    assert abs(estimate(reranked.propensity) - value) < 3 * error
    # Other numbers are far away: the clicks of the log itself, and those by what epsilon alone would say.
    assert abs(clicked.mean() - value) > 10 * error
    naive = np.where(reranked.rule == Rule.EXPLORE, 0.4 / (items - k), 0.6)
    assert abs(estimate(naive) - value) > 5 * error


@settings(max_examples=80, deadline=None)
@given(some_lists(), caps, shares, shares, st.integers(1, 3))
def test_lists_that_break_a_rule_are_counted_and_what_is_called_impossible_is(
    lists: RankedItems, caps: dict[str, int], fresh: float | None, new: float | None, k: int
) -> None:
    assert lists.fresh is not None
    assert lists.new is not None
    totals: Counter[tuple[str, str]] = Counter()
    counted: Counter[str] = Counter()
    for user in range(len(lists.users)):
        user_lists = only(lists, user)
        if user_lists.offsets[1] > 7:
            continue
        reranked = rerank(user_lists, make_rules(caps, fresh, new, 0.0, None), k, DS)
        rows, n = reranked.rows.tolist(), int(user_lists.offsets[1])
        allowed = [
            order
            for order in itertools.permutations(range(n), len(rows))
            if all(
                max(Counter(v for v in user_lists.values[c][list(order)].tolist() if v >= 0).values(), default=0)
                <= most
                for c, most in caps.items()
            )
        ]

        def misses(order: Sequence[int], share: float, members: np.ndarray) -> bool:
            beginnings = range(1, len(order) + 1)
            return any(sum(members[list(order[:end])]) < int(share * end + 1e-9) for end in beginnings)

        totals.update(reranked.unmet)
        for name, share, members in (("freshness", fresh, user_lists.fresh), ("new_items", new, user_lists.new)):
            if share is None:
                continue
            counted[name] += misses(rows, share, members)
            if reranked.unmet[name, "impossible"]:
                assert all(misses(order, share, members) for order in allowed)
            # One cap and one share: what is not met is impossible.
            if len(caps) <= 1 and not (fresh and new):
                assert reranked.unmet[name, "impossible"] == reranked.unmet[name, "lists"]
        counted["caps"] += bool(caps) and len(rows) < min(k, n)
        if reranked.unmet["caps", "impossible"]:
            longer = itertools.combinations(range(n), len(rows) + 1)
            assert all(
                any(
                    max(Counter(v for v in user_lists.values[c][list(order)].tolist() if v >= 0).values(), default=0)
                    > most
                    for c, most in caps.items()
                )
                for order in longer
            ), "a longer list keeps the caps"
    assert {name: totals[name, "lists"] for name in counted} == counted


def test_users_and_days_are_drawn_apart() -> None:
    lists = RankedItems(
        np.array([3, 9], np.uint64), np.array([0, 9, 18]), np.tile(np.linspace(1, 0, 9), 2).astype(np.float32)
    )
    rules = Rerank.model_validate({"explore": {"epsilon": 1}})
    both_users = rerank(lists, rules, 5, DS)
    second_user = rerank(RankedItems(lists.users[1:], np.array([0, 9]), lists.scores[9:]), rules, 5, DS)
    assert (both_users.rows[5:] - 9).tolist() == second_user.rows.tolist() != both_users.rows[:5].tolist()
    assert rerank(lists, rules, 5, "2026-01-06").rows.tolist() != both_users.rows.tolist()
    seeded = Rerank.model_validate({"explore": {"epsilon": 1, "seed": 2}})
    assert rerank(lists, seeded, 5, DS).rows.tolist() != both_users.rows.tolist()


def test_reasons_name_the_rule_and_the_sources() -> None:
    rule = np.array([Rule.SCORE, Rule.EXPLORE, Rule.NEW_ITEM, Rule.FRESH, Rule.SCORE], np.uint8)
    masks = np.array([0b101, 0b010, 0b111, 0, 0])
    texts = reasons(rule, masks, ["similar", "popular", "recent"])
    assert texts.to_pylist() == [
        "similar,recent",
        "explore,popular",
        "new_item,similar,popular,recent",
        "fresh",
        "score",
    ]
    assert reasons(rule, None, []).to_pylist() == ["score", "explore", "new_item", "fresh", "score"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"freshness": {"days": 3}}, "a `boost`, a `share`, or both"),
        ({"freshness": {"days": 3, "share": 0.6}, "new_items": {"share": 0.5}}, r"are 1\.1 together"),
        ({"diversity": {"by": []}}, "names columns"),
        ({"explore": {"epsilon": 0}}, "greater than 0"),
        ({"explore": {}}, "one of `epsilon` and `temperature`"),
        ({"explore": {"epsilon": 0.1, "temperature": 1}}, "one of `epsilon` and `temperature`"),
        ({"caps": {"seller": 0}}, "greater than or equal to 1"),
    ],
)
def test_rules_that_cannot_hold_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Rerank.model_validate(section)
