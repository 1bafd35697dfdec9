"""Losses against loops in NumPy that spell the formulas out: values, and gradients by differences of these."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.models import losses
from headrace.models.losses import (
    binary_cross_entropy,
    bpr,
    cosine_contrastive,
    focal,
    in_batch_softmax,
    lambda_rank,
    rank_net,
    sampled_softmax,
    squared_error,
)

Loop = Callable[..., float]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def check(loss: Callable[..., torch.Tensor], loop: Loop, inputs: Sequence[np.ndarray]) -> None:
    """The value, and the gradient by each input: central differences of the loop."""
    tensors = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in inputs]
    value = loss(*tensors)
    assert value.shape == ()
    assert value.item() == pytest.approx(loop(*inputs), rel=1e-9, abs=1e-9)
    value.backward()
    for number, (x, tensor) in enumerate(zip(inputs, tensors, strict=True)):
        expected = np.zeros_like(x)
        for index in np.ndindex(x.shape):
            moved = []
            for step in (1e-6, -1e-6):
                changed = [y.copy() for y in inputs]
                changed[number][index] += step
                moved.append(loop(*changed))
            expected[index] = (moved[0] - moved[1]) / 2e-6
        grad = np.zeros_like(x) if tensor.grad is None else tensor.grad.numpy()
        np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-6)


RNG = np.random.default_rng(3)
LOGITS, LABELS = RNG.normal(size=7) * 3, np.array([0.0, 1, 1, 0, 1, 0, 0])
WEIGHTS = np.array([1.0, 0.5, 0, 2, 3, 1, 0.25])
NEGATIVES = RNG.normal(size=(7, 4))
WEIGHTED = pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weighted"])


def weight_options(weights: np.ndarray | None) -> dict[str, Any]:
    return {"weights": None if weights is None else torch.tensor(weights)}


def times(weights: np.ndarray | None, row: int) -> float:
    return 1.0 if weights is None else float(weights[row])


@WEIGHTED
def test_binary_cross_entropy(weights: np.ndarray | None) -> None:
    def loop(logits: np.ndarray) -> float:
        return sum(
            -times(weights, i) * math.log(sigmoid(x) if y else sigmoid(-x))
            for i, (x, y) in enumerate(zip(logits, LABELS, strict=True))
        )

    check(lambda x: binary_cross_entropy(x, torch.tensor(LABELS), **weight_options(weights)), loop, [LOGITS])


@WEIGHTED
@pytest.mark.parametrize(("gamma", "alpha"), [(0.0, None), (2.0, None), (0.5, 0.25)])
def test_focal(weights: np.ndarray | None, gamma: float, alpha: float | None) -> None:
    def loop(logits: np.ndarray) -> float:
        total = 0.0
        for i, (x, y) in enumerate(zip(logits, LABELS, strict=True)):
            p = sigmoid(x) if y else sigmoid(-x)
            share = 1.0 if alpha is None else alpha if y else 1 - alpha
            total -= times(weights, i) * share * (1 - p) ** gamma * math.log(p)
        return total

    check(lambda x: focal(x, torch.tensor(LABELS), **weight_options(weights), gamma=gamma, alpha=alpha), loop, [LOGITS])


def test_focal_of_sure_predictions_is_finite() -> None:
    logits = torch.tensor([200.0, -200.0, 200.0], requires_grad=True)
    loss = focal(logits, torch.tensor([1.0, 0.0, 0.0]))
    loss.backward()
    assert loss.item() == pytest.approx(200)
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


@WEIGHTED
def test_squared_error(weights: np.ndarray | None) -> None:
    def loop(x: np.ndarray) -> float:
        return sum(times(weights, i) * (v - t) ** 2 for i, (v, t) in enumerate(zip(x, LABELS, strict=True)))

    check(lambda x: squared_error(x, torch.tensor(LABELS), **weight_options(weights)), loop, [LOGITS])


@WEIGHTED
def test_bpr(weights: np.ndarray | None) -> None:
    def loop(positives: np.ndarray, negatives: np.ndarray) -> float:
        return sum(-times(weights, i) * math.log(sigmoid(positives[i] - n)) / 4 for i in range(7) for n in negatives[i])

    check(lambda p, n: bpr(p, n, **weight_options(weights)), loop, [LOGITS, NEGATIVES])


@WEIGHTED
def test_cosine_contrastive(weights: np.ndarray | None) -> None:
    positives, negatives = np.tanh(LOGITS), np.tanh(NEGATIVES)

    def loop(positives: np.ndarray, negatives: np.ndarray) -> float:
        total = 0.0
        for i in range(7):
            excess = sum(max(0.0, n - 0.3) for n in negatives[i]) / 4
            total += times(weights, i) * ((1 - positives[i]) + 2.5 * excess)
        return total

    check(
        lambda p, n: cosine_contrastive(p, n, **weight_options(weights), margin=0.3, negative_weight=2.5),
        loop,
        [positives, negatives],
    )


@WEIGHTED
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
def test_sampled_softmax(weights: np.ndarray | None, shared: bool, corrected: bool) -> None:
    rng = np.random.default_rng(8)
    q_positive, q_negative = rng.random(7), rng.random(4) if shared else rng.random((7, 4))
    hits = rng.random((7, 4)) < 0.3

    def loop(positives: np.ndarray, negatives: np.ndarray) -> float:
        total = 0.0
        for i in range(7):
            target_logit = positives[i] - (math.log(q_positive[i]) if corrected else 0)
            below = math.exp(target_logit)
            for j in range(4):
                q = q_negative[j] if shared else q_negative[i, j]
                if not hits[i, j]:
                    below += math.exp(negatives[i, j]) / (q if corrected else 1)
            total -= times(weights, i) * math.log(math.exp(target_logit) / below)
        return total

    log_q = (torch.tensor(q_positive).log(), torch.tensor(q_negative).log()) if corrected else None
    check(
        lambda p, n: sampled_softmax(p, n, **weight_options(weights), log_q=log_q, hits=torch.tensor(hits)),
        loop,
        [LOGITS, NEGATIVES],
    )


@WEIGHTED
@pytest.mark.parametrize("piece", [1, 12, 2**18])
def test_sampled_softmax_of_shared_negatives(
    weights: np.ndarray | None, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_PIECE", piece)
    rng = np.random.default_rng(8)
    queries, negatives = rng.normal(size=(7, 3)) * 3, rng.normal(size=(5, 3))
    targets, ids = np.array([4, 1, 9, 4, 2, 0, 2]), np.array([4, 3, 2, 4, 1])

    def loop(queries: np.ndarray, positives: np.ndarray, negatives: np.ndarray) -> float:
        total = 0.0
        for i in range(7):
            negative_terms = [math.exp(queries[i] @ negatives[j]) for j in range(5) if ids[j] != targets[i]]
            total -= times(weights, i) * math.log(
                math.exp(positives[i]) / (math.exp(positives[i]) + sum(negative_terms))
            )
        return total

    hits = losses.same_ids(torch.tensor(targets), torch.tensor(ids))
    expected = [(i, j) for i in range(7) for j in range(5) if targets[i] == ids[j]]
    assert sorted(zip(*(x.tolist() for x in hits), strict=True)) == expected
    check(
        lambda q, p, n: 1.0 * losses.shared_sampled_softmax(q, p, n, **weight_options(weights), hits=hits),
        loop,
        [queries, LOGITS, negatives],
    )
    none = losses.shared_sampled_softmax(
        torch.zeros(2, 3), torch.ones(2), torch.zeros(0, 3), hits=(torch.zeros(0).long(), torch.zeros(0).long())
    )
    assert none == 0


@WEIGHTED
@pytest.mark.parametrize("corrected", [False, True])
def test_in_batch_softmax(weights: np.ndarray | None, corrected: bool) -> None:
    rng = np.random.default_rng(9)
    queries, items, targets = rng.normal(size=(7, 3)), rng.normal(size=(9, 3)), rng.integers(0, 9, 7)
    ids, q = np.array([5, 5, 2, 7, 5, 1, 2, 0, 3]), rng.random(9)

    def loop(queries: np.ndarray, items: np.ndarray) -> float:
        total = 0.0
        for i in range(7):
            terms = [
                math.exp(queries[i] @ items[j] / 0.7) / (q[j] if corrected else 1)
                for j in range(9)
                if j == targets[i] or not corrected or ids[j] != ids[targets[i]]
            ]
            target_term = math.exp(queries[i] @ items[targets[i]] / 0.7) / (q[targets[i]] if corrected else 1)
            total -= times(weights, i) * math.log(target_term / sum(terms))
        return total

    more = {"log_q": torch.tensor(q).log(), "item_ids": torch.tensor(ids)} if corrected else {}
    check(
        lambda a, b: in_batch_softmax(a, b, torch.tensor(targets), **weight_options(weights), temperature=0.7, **more),
        loop,
        [queries, items],
    )


def softplus(x: float) -> float:
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


LISTS = st.lists(st.lists(st.tuples(st.integers(-20, 20), st.integers(0, 3)), max_size=5), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(LISTS, st.sampled_from([None, 1, 2]), st.booleans())
def test_losses_of_lists(lists: list[list[tuple[int, int]]], k: int | None, weighted: bool) -> None:
    # No two scores of a list alike: at ties places jump, and differences say nothing.
    scores = np.array([s / 7 + i * 0.013 for rows in lists for i, (s, _) in enumerate(rows)])
    labels = np.array([y for rows in lists for _, y in rows], np.int64)
    ends = np.cumsum([0, *map(len, lists)])
    weights = np.arange(1.0, 1 + len(lists)) if weighted else None

    def change(list_: range, i: int, j: int, scores: np.ndarray) -> float:
        ranked = sorted(list_, key=lambda r: -scores[r])
        best = sorted((2.0 ** labels[r] - 1 for r in list_), reverse=True)

        def discount(place: int) -> float:
            return 1 / math.log2(place + 2) if k is None or place < k else 0.0

        ideal = sum(gain * discount(place) for place, gain in enumerate(best))
        gains = 2.0 ** labels[i] - 2.0 ** labels[j]
        return abs(gains * (discount(ranked.index(i)) - discount(ranked.index(j)))) / ideal

    def loop(scores: np.ndarray, lambdas: bool) -> float:
        total = 0.0
        for number, (a, b) in enumerate(pairwise(ends)):
            for i in range(a, b):
                for j in range(a, b):
                    if labels[i] > labels[j]:
                        weight = times(weights, number) * (change(range(a, b), i, j, scores) if lambdas else 1)
                        total += weight * softplus(scores[j] - scores[i])
        return total

    offsets, grades = torch.tensor(ends), torch.tensor(labels)
    check(lambda s: rank_net(s, grades, offsets, **weight_options(weights)), lambda s: loop(s, False), [scores])
    check(lambda s: lambda_rank(s, grades, offsets, **weight_options(weights), k=k), lambda s: loop(s, True), [scores])


def test_a_list_without_gain_adds_nothing_finite() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    loss = lambda_rank(scores, torch.tensor([0, 0, 0]), torch.tensor([0, 2, 3]))
    loss.backward()
    assert loss.item() == 0
    assert scores.grad is not None
    assert (scores.grad == 0).all()


def test_weights_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weights are \[1\] for rows \[7\]"):
        squared_error(torch.zeros(7), torch.zeros(7), torch.ones(1))
