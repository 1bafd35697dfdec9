"""Lists of some users that rules change, drawn by hypothesis, and their parts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import strategies as st

from headrace.config.score import Rerank
from headrace.score.rerank.select import RankedItems, Reranked

DS = "2026-01-05"


@st.composite
def some_lists(draw: st.DrawFn) -> RankedItems:
    """Users with 0 to 14 items; scores of few values, so that many are equal."""
    lengths = draw(st.lists(st.integers(0, 14), min_size=1, max_size=4))
    n = sum(lengths)

    def column(values: st.SearchStrategy[Any]) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=n, max_size=n)))

    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    scores = column(st.integers(-8, 16)).astype(np.float32) / 16
    for a, b in itertools.pairwise(offsets.tolist()):
        scores[a:b] = -np.sort(-scores[a:b])
    return RankedItems(
        users=np.arange(len(lengths), dtype=np.uint64) + np.uint64(draw(st.integers(0, 1000))),
        offsets=offsets,
        scores=scores,
        fresh=column(st.booleans()).astype(bool),
        new=column(st.integers(0, 3)).astype(int) == 0,
        values={
            "seller": column(st.integers(-1, 3)).astype(np.int64),
            "category": column(st.integers(-1, 2)).astype(np.int64),
        },
    )


caps = st.dictionaries(st.sampled_from(["seller", "category"]), st.integers(1, 3))
shares = st.sampled_from([None, 0.1, 0.25, 0.34, 0.5])
lambdas = st.sampled_from([None, 0.0, 0.25, 0.5, 1.0])


def make_rules(
    caps: dict[str, int], fresh: float | None, new: float | None, boost: float, relevance: float | None, **more: Any
) -> Rerank:
    return Rerank.model_validate(
        {
            "caps": caps,
            "freshness": {"days": 7, "share": fresh, "boost": boost} if fresh or boost else None,
            "new_items": {"share": new} if new else None,
            "diversity": None if relevance is None else {"by": ("seller", "category"), "relevance": relevance},
            **more,
        }
    )


def of_user(lists: RankedItems, reranked: Reranked, user: int) -> tuple[list[int], list[int], list[float]]:
    """Rows, rules and propensities of one user."""
    span = slice(*reranked.offsets[user : user + 2].tolist())
    assert all(lists.offsets[user] <= r < lists.offsets[user + 1] for r in reranked.rows[span])
    return reranked.rows[span].tolist(), reranked.rule[span].tolist(), reranked.propensity[span].tolist()


def only(lists: RankedItems, user: int) -> RankedItems:
    """The lists of one user alone."""
    span = slice(*lists.offsets[user : user + 2].tolist())
    return RankedItems(
        users=lists.users[user : user + 1],
        offsets=np.array([0, span.stop - span.start]),
        scores=lists.scores[span],
        fresh=None if lists.fresh is None else lists.fresh[span],
        new=None if lists.new is None else lists.new[span],
        values={name: column[span] for name, column in lists.values.items()},
    )
