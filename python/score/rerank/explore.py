"""Exploration with known probabilities: by epsilon, or by a temperature.

**Epsilon.** Every position that no share protects is drawn with probability epsilon, independently. Let S be the drawn
ones. They are filled, in random order and without replacement, from the pool and the items that stood in S, each
equally likely. With m items in the pool and u positions that may be drawn, an item stands at such a position with
probability

    an item of the pool:                  eps E[1 / (m + 1 + B)],           B of Binomial(u - 1, eps)
    the item that stood there:            1 - eps + eps E[1 / (m + 1 + B)]
    the item of another such position:    eps^2 E[1 / (m + 2 + B')],        B' of Binomial(u - 2, eps)

These are positive for each item of list and pool at each position, and sum to 1 over them. So inverse propensity scores
(Horvitz and Thompson, 1952) of any policy that chooses among these items are unbiased.

**Temperature.** Each position is drawn by a softmax over the items that may stand there. Without other rules this is
the model of Plackett (1975) and Luce (1959), and the same as taking the greatest scores with Gumbel noise. The recorded
propensity is that of the item at this position, given the items above it. It is exact under all rules, because caps,
shares and diversity look only at the items above. So inverse propensity scores at a position are unbiased for any
policy that chooses among the same items below the same items, and at the first position for any policy. The product of
a list's propensities is the probability of the list.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from headrace.compute.counter_random import scatter_64, stream, uniform
from headrace.config.score import Explore
from headrace.score.rerank.select import F64, I64, Bools, Caps, Rectangle, Rule, Selected, Share


def draws(seed: int, purpose: str, users: NDArray[np.uint64], columns: int) -> F64:
    """Return uniform numbers in [0, 1) by the seed, the purpose and each user's hash: float64 [n, columns]."""
    key = stream(seed, purpose)
    return uniform(key, scatter_64(key, users)[:, None] + np.arange(columns, dtype=np.uint64))


def pool_of(selected: Selected, grid: Rectangle, caps: Caps, size_limit: int | None) -> Bools:
    """Return the items that may be drawn, the best behind the list first: bool [n, m].

    With caps: only so many of a value that any choice among the list and the pool keeps them.
    """
    free = grid.is_item & ~selected.taken
    n, m = free.shape
    size_limit = m if size_limit is None else size_limit
    if not caps.limits:
        return free & (free.cumsum(1) <= size_limit)
    pool = np.zeros_like(free)
    size = np.zeros(n, np.int64)
    for column in range(m):
        can = free[:, column] & (size < size_limit)
        for limit, values, counts in zip(caps.limits, caps.values, caps.counts, strict=True):
            can &= (counts[:, column] < limit) | (values[:, column] < 0)
        users = np.flatnonzero(can)
        if len(users):
            pool[users, column] = True
            size[users] += 1
            caps.add(users, np.full(len(users), column))
    return pool


def protected(selected: Selected, shares: list[Share]) -> Bools:
    """Return the positions that are not drawn: bool [n, k]. The first of each share, as many as it requires."""
    filled = selected.chosen >= 0
    is_protected = np.zeros_like(filled)
    for share in shares:
        served = filled & np.take_along_axis(share.members, np.maximum(selected.chosen, 0), 1)
        is_protected |= served & (served.cumsum(1) <= share.least[-1])
    return is_protected


def explore(
    selected: Selected, pool: Bools, fixed: Bools, settings: Explore, ds: str, users: NDArray[np.uint64]
) -> tuple[I64, F64, NDArray[np.uint8]]:
    """Draw positions and fill them.

    Args:
        selected: the lists.
        pool: of `pool_of`.
        fixed: positions that are not drawn.
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
    may_be_drawn = (chosen >= 0) & ~fixed
    drawn = may_be_drawn & (draws(settings.seed, f"rerank/position/{ds}", users, k) < eps)
    order = draws(settings.seed, f"rerank/item/{ds}", users, m)
    drawable = pool.copy()
    rows, places = np.nonzero(drawn)
    drawable[rows, chosen[rows, places]] = True
    first = np.where(drawable, order, np.inf).argsort(1, kind="stable")
    draw_number = np.maximum(drawn.cumsum(1) - 1, 0)
    placed = np.where(drawn, np.take_along_axis(first, draw_number, 1), chosen)

    size, positions = pool.sum(1)[:, None], may_be_drawn.sum(1)[:, None]
    inverse_one_more = _mean_inverse(size + 1, positions - 1, eps)
    inverse_two_more = _mean_inverse(size + 2, positions - 2, eps)
    from_pool = np.take_along_axis(pool, np.maximum(placed, 0), 1)
    moved_probability = np.where(from_pool, eps * inverse_one_more, eps * eps * inverse_two_more)
    probability = np.where(
        may_be_drawn, np.where(placed == chosen, 1 - eps + eps * inverse_one_more, moved_probability), 1.0
    )
    propensity = np.minimum(probability, 1.0)  # sums may be rounded up
    rule = np.where(placed == chosen, selected.rule, np.uint8(Rule.EXPLORE)).astype(np.uint8)
    return placed, propensity, rule


def _mean_inverse(base: I64, trials: I64, p: float) -> F64:
    """Return E[1 / (base + B)] with B of Binomial(trials, p); trials below 0 count as 0. float64 of base's shape."""
    trials = np.maximum(trials, 0)
    table = _binomial(int(trials.max(initial=0)), p)
    means: F64 = (table[trials] / (base[..., None] + np.arange(table.shape[1]))).sum(-1)
    return means


@lru_cache(maxsize=8)
def _binomial(max_trials: int, p: float) -> F64:
    """Return the probability of b successes in t trials: float64 [t, b], each of 0 to max_trials."""
    table = np.zeros((max_trials + 1, max_trials + 1))
    table[0, 0] = 1.0
    for t in range(max_trials):
        table[t + 1] = table[t] * (1 - p)
        table[t + 1, 1:] += table[t, :-1] * p
    return table


@dataclass(frozen=True)
class Softmax:
    """A `Draw` of `select`. numbers: float64 [n, k], uniform in [0, 1). reach: bool [n, m], or None: all."""

    temperature: float
    numbers: F64
    reach: Bools | None

    @staticmethod
    def for_day(settings: Explore, ds: str, users: NDArray[np.uint64], grid: Rectangle, k: int) -> Softmax:
        """Return the draw of a day and users, by their hashes [n]; with a pool, of the first k + pool ranked items."""
        assert settings.temperature is not None, "asked for where there is one"
        reach = None if settings.pool is None else grid.is_item.cumsum(1) <= k + settings.pool
        return Softmax(settings.temperature, draws(settings.seed, f"rerank/softmax/{ds}", users, k), reach)

    def __call__(self, place: int, values: F64, allowed: Bools) -> tuple[I64, F64]:
        """See `Draw`."""
        if self.reach is not None:
            near = allowed & self.reach
            allowed = np.where(near.any(1, keepdims=True), near, allowed)
        scaled = np.where(allowed, values / self.temperature, -np.inf)
        greatest = scaled.max(1, keepdims=True, initial=-np.inf)
        weights = np.exp(scaled - np.where(np.isfinite(greatest), greatest, 0.0))
        sums = weights.cumsum(1)
        total = sums[:, -1]
        # Stay below the total, even if the product is rounded up.
        thresholds = np.minimum(self.numbers[:, place] * total, np.nextafter(total, 0.0))
        columns = (sums > thresholds[:, None]).argmax(1)
        with np.errstate(invalid="ignore"):
            return columns, weights[np.arange(len(columns)), columns] / total
