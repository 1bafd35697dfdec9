"""The lists of some users, from their ranked items: the rules one after the other."""

from __future__ import annotations

import numpy as np

from headrace.config.score import Rerank
from headrace.score.rerank.explore import explore, pool_of, protected
from headrace.score.rerank.lists import RankedLists, Rectangle, Reranked
from headrace.score.rerank.sample import Softmax
from headrace.score.rerank.select import select, shares_of
from headrace.score.rerank.unmet import unmet_rules


def rerank(lists: RankedLists, rules: Rerank, k: int, ds: str) -> Reranked:
    """At most k items for each user: a function of the user's own items, its key, the day and the rules.

    Args:
        lists: the ranked items. What the rules look at must be there.
        rules: the section `score.rerank`.
        k: `score.top_k`.
        ds: the day, YYYY-MM-DD: others are drawn on another.
    """
    grid = Rectangle.of(lists.offsets)
    asked = rules.explore
    draw = None if asked is None or asked.temperature is None else Softmax.of(asked, ds, lists.users, grid, k)
    selected, caps = select(lists, grid, rules, k, draw)
    shown, rule, propensity = selected.chosen, selected.rule, selected.propensity
    if rules.explore is not None and rules.explore.epsilon is not None:
        pool = pool_of(selected, grid, caps, rules.explore.pool)
        kept = protected(selected, shares_of(lists, grid, rules, k))
        shown, propensity, rule = explore(selected, pool, kept, rules.explore, ds, lists.users)
    unmet = unmet_rules(shown, grid, caps, shares_of(lists, grid, rules, k), k)
    there = shown >= 0
    offsets = np.zeros(len(lists.offsets), np.int64)
    np.cumsum(there.sum(1), out=offsets[1:])
    rows = np.take_along_axis(grid.rows, np.maximum(shown, 0), 1)[there]
    return Reranked(offsets, rows, propensity[there], rule[there], unmet)
