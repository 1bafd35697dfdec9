"""Evaluations of the same rows on one rank and on several."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.comm.base import run_ranks
from headrace.train.evaluation.ranks import Ranks, ScoredRows

Evaluate = Callable[[Ranks, ScoredRows], Any]


def rows_of(scores: Any, labels: Any, users: Any = None, slices: Any = (), dtype: Any = np.float32) -> ScoredRows:
    """Rows from anything that NumPy takes."""
    user_ids = None if users is None else np.asarray(users, np.int64)
    codes = tuple(np.asarray(s, np.int64) for s in slices)
    return ScoredRows(np.asarray(scores, dtype), np.asarray(labels) > 0, user_ids, codes)


def part_of(rows: ScoredRows, selected: np.ndarray) -> ScoredRows:
    users = None if rows.users is None else rows.users[selected]
    return ScoredRows(rows.scores[selected], rows.labels[selected], users, tuple(s[selected] for s in rows.slices))


def on_any_ranks(rows: ScoredRows, evaluate: Evaluate, sizes: tuple[int, ...] = (2, 3)) -> Any:
    """Return one rank's result, after each of several ranks has found the same, to the bit, however rows lie."""
    expected = evaluate(Ranks(), rows)
    for size in sizes:
        # Uneven shares, among them an empty one now and then.
        owner = np.random.default_rng(size).choice(size, len(rows.scores), p=[0.7] + [0.3 / (size - 1)] * (size - 1))
        results = run_ranks(size, lambda c, owner=owner: evaluate(Ranks(c), part_of(rows, owner == c.world.rank)))
        for of_rank in results:
            assert_equal(of_rank, expected)
    return expected


def assert_equal(actual: Any, expected: Any) -> None:
    """Equal to the bit, NaN being NaN."""
    if isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name in expected:
            assert_equal(actual[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for a, b in zip(actual, expected, strict=True):
            assert_equal(a, b)
    else:
        assert actual == expected


def list_metrics(rows: Sequence[tuple[Any, ...]], k: int) -> dict[str, float] | None:
    """The metrics of one list of (score, relevant, ...), place by place; None without a relevant item."""
    ranked = sorted(rows, key=lambda r: (-r[0], r[1]))
    relevant = sum(r[1] for r in rows)
    if not relevant:
        return None
    gain = hits = precision = 0.0
    first = 0.0
    for place, row in enumerate(ranked[:k], 1):
        if row[1]:
            hits += 1
            gain += 1 / math.log2(place + 1)
            precision += hits / place
            first = first or 1 / place
    best = sum(1 / math.log2(place + 1) for place in range(1, 1 + min(k, relevant)))
    return {
        "hr_at_k": float(hits > 0),
        "ndcg_at_k": gain / best,
        "recall_at_k": hits / relevant,
        "mrr_at_k": first,
        "map_at_k": precision / min(k, relevant),
    }
