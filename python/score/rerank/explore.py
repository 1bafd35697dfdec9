"""Exploration by epsilon, with known probabilities: which positions are drawn, and what comes to stand there.

Every position that no share protects is drawn with probability epsilon, independently. Let S be the drawn ones. They
are filled, in random order and without replacement, from the pool and the items that stood in S, each equally likely.
With m items in the pool and u positions that may be drawn, the probability that an item stands at such a position is

    an item of the pool:                  eps E[1 / (m + 1 + B)],           B of Binomial(u - 1, eps)
    the item that stood there:            1 - eps + eps E[1 / (m + 1 + B)]
    the item of another such position:    eps^2 E[1 / (m + 2 + B')],        B' of Binomial(u - 2, eps)

which are positive for each item of list and pool at each position, and sum to 1 over them: inverse propensity scores
(Horvitz and Thompson, 1952) of any policy that chooses among these are unbiased.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from headrace.config.score import Explore
from headrace.score.rerank.draws import draws
from headrace.score.rerank.lists import F64, I64, Bools, Rectangle, Rule
from headrace.score.rerank.select import Caps, Selected, Share


def pool_of(selected: Selected, grid: Rectangle, caps: Caps, most: int | None) -> Bools:
    """The items that may be drawn, the best behind the list first: bool [n, m].

    With caps: only so many of a value that any choice among the list and the pool keeps them.
    """
    free = grid.there & ~selected.taken
    n, m = free.shape
    most = m if most is None else most
    if not caps.most:
        return free & (free.cumsum(1) <= most)
    pool = np.zeros_like(free)
    size = np.zeros(n, np.int64)
    for column in range(m):
        can = free[:, column] & (size < most)
        for limit, values, counts in zip(caps.most, caps.values, caps.counts, strict=True):
            can &= (counts[:, column] < limit) | (values[:, column] < 0)
        users = np.flatnonzero(can)
        if len(users):
            pool[users, column] = True
            size[users] += 1
            caps.add(users, np.full(len(users), column))
    return pool


def protected(selected: Selected, shares: list[Share]) -> Bools:
    """Positions that are not drawn: the first of each share, as many as it asks for, so that it holds: bool [n, k]."""
    filled = selected.chosen >= 0
    found = np.zeros_like(filled)
    for share in shares:
        mine = filled & np.take_along_axis(share.members, np.maximum(selected.chosen, 0), 1)
        found |= mine & (mine.cumsum(1) <= share.least[-1])
    return found


def explore(
    selected: Selected, pool: Bools, kept: Bools, settings: Explore, ds: str, users: NDArray[np.uint64]
) -> tuple[I64, F64, NDArray[np.uint8]]:
    """Draw positions and fill them.

    Args:
        selected: the lists.
        pool: of `pool_of`.
        kept: positions that are not drawn.
        settings: epsilon and seed.
        ds: the day.
        users: hashes of the users' keys, [n].

    Returns:
        What stands at each position: int64 [n, k], -1 beyond a list's end; the probability of that: float64 [n, k];
        and the rules: uint8 [n, k].
    """
    chosen, eps = selected.chosen, settings.epsilon
    assert eps is not None, "of a temperature, lists are drawn as they are made: see sample"
    k, m = chosen.shape[1], pool.shape[1]
    may = (chosen >= 0) & ~kept
    drawn = may & (draws(settings.seed, f"rerank/position/{ds}", users, k) < eps)
    order = draws(settings.seed, f"rerank/item/{ds}", users, m)
    among = pool.copy()
    rows, places = np.nonzero(drawn)
    among[rows, chosen[rows, places]] = True
    first = np.where(among, order, np.inf).argsort(1, kind="stable")
    turn = np.maximum(drawn.cumsum(1) - 1, 0)
    shown = np.where(drawn, np.take_along_axis(first, turn, 1), chosen)

    size, positions = pool.sum(1)[:, None], may.sum(1)[:, None]
    one = _mean_inverse(size + 1, positions - 1, eps)
    two = _mean_inverse(size + 2, positions - 2, eps)
    from_pool = np.take_along_axis(pool, np.maximum(shown, 0), 1)
    moved = np.where(from_pool, eps * one, eps * eps * two)
    found = np.where(may, np.where(shown == chosen, 1 - eps + eps * one, moved), 1.0)
    propensity = np.minimum(found, 1.0)  # a sum that is rounded up
    rule = np.where(shown == chosen, selected.rule, np.uint8(Rule.EXPLORE)).astype(np.uint8)
    return shown, propensity, rule


def _mean_inverse(base: I64, trials: I64, p: float) -> F64:
    """E[1 / (base + B)], B of Binomial(trials, p), of each; trials below 0 are none. float64 of base's shape."""
    trials = np.maximum(trials, 0)
    table = _binomial(int(trials.max(initial=0)), p)
    found: F64 = (table[trials] / (base[..., None] + np.arange(table.shape[1]))).sum(-1)
    return found


@lru_cache(maxsize=8)
def _binomial(most: int, p: float) -> F64:
    """The probability of b successes in t trials: float64 [t, b], each of 0 to most."""
    table = np.zeros((most + 1, most + 1))
    table[0, 0] = 1.0
    for t in range(most):
        table[t + 1] = table[t] * (1 - p)
        table[t + 1, 1:] += table[t, :-1] * p
    return table
