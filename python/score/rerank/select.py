"""Selection of lists, position by position: boosts, diversity, caps and least shares.

Ranked items of several users are rectangles (users by items), on which NumPy works for all users at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headrace.config.score import Rerank

Bools = NDArray[np.bool_]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]


class Rule(IntEnum):
    """Rule that put an item into a list."""

    SCORE = 0
    FRESH = 1
    NEW_ITEM = 2
    EXPLORE = 3


@dataclass(frozen=True)
class RankedItems:
    """The ranked items of n users, N in all, those of a user one after the other, best first.

    users: uint64 [n], a hash of each user's key. offsets: int64 [n + 1], where each user's items begin. scores:
    float32 [N], finite, none above the one before it. fresh, new: bool [N]; None: nobody asks. values: by column of
    items int64 [N], equal where values are equal, -1 without a value. vectors: float32 [N, D] of length 1, or None.
    """

    users: NDArray[np.uint64]
    offsets: I64
    scores: NDArray[np.float32]
    fresh: Bools | None = None
    new: Bools | None = None
    values: Mapping[str, I64] = field(default_factory=dict)
    vectors: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Reranked:
    """The users' lists, position by position, those of a user one after the other: M rows.

    offsets: int64 [n + 1], where each user's list begins. rows: int64 [M], which of the N items. propensity:
    float64 [M] in (0, 1], the probability that this item stands at this position. rule: uint8 [M], a `Rule`. unmet: see
    `unmet_rules`.
    """

    offsets: I64
    rows: I64
    propensity: F64
    rule: NDArray[np.uint8]
    unmet: Mapping[tuple[str, str], int]


@dataclass(frozen=True)
class Rectangle:
    """Users by items, [n, m] with m the longest list: column j of a user is its j-th best item."""

    rows: I64
    is_item: Bools

    @staticmethod
    def from_offsets(offsets: I64) -> Rectangle:
        """Return the rectangle of lists; rows beyond the end of a list are 0 and not `is_item`."""
        lengths = np.diff(offsets)
        columns = np.arange(int(lengths.max(initial=0)))
        is_item = columns < lengths[:, None]
        return Rectangle(np.where(is_item, offsets[:-1, None] + columns, 0), is_item)

    def bools(self, values: Bools | None) -> Bools:
        """Return values of each cell, False beyond the end: bool [n, m]."""
        return self.is_item & values[self.rows] if values is not None else np.zeros_like(self.is_item)

    def values(self, values: I64) -> I64:
        """Return values of each cell, -1 beyond the end: int64 [n, m]."""
        return np.where(self.is_item, values[self.rows], -1)


#: Added before a share of a list is rounded down: 0.29 of 100 is 28.999... in floats.
_ROUNDING = 1e-9


def least_counts(share: float | None, k: int) -> I64:
    """Return how many of the first 0, 1, ..., k of a list a share requires: int64 [k + 1]."""
    counts: I64 = np.floor((share or 0.0) * np.arange(k + 1) + _ROUNDING).astype(np.int64)
    return counts


@dataclass(frozen=True)
class Share:
    """A share that items of a kind have of every prefix of a list. members: bool [n, m]; least: `least_counts`."""

    rule: Rule
    members: Bools
    least: I64


@dataclass(frozen=True)
class Selected:
    """Lists before positions of them are drawn by epsilon.

    chosen: int64 [n, min(k, m)], columns of the rectangle, -1 beyond a list's end. rule: uint8, as
    long. taken: bool [n, m]. propensity: float64, as long as chosen, of `Draw`; 1 where there is none.
    """

    chosen: I64
    rule: NDArray[np.uint8]
    taken: Bools
    propensity: F64


#: (position, values float64 [n, m], those that may stand there bool [n, m]) -> (columns int64 [n], the probability of
#: each float64 [n]), of anything where none may.
Draw = Callable[[int, F64, Bools], tuple[I64, F64]]


@dataclass
class Caps:
    """Counts of each item's values in its user's list so far, by capped column: int64 [n, m]."""

    limits: list[int]
    values: list[I64]
    counts: list[I64] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = [np.zeros_like(values) for values in self.values]

    @staticmethod
    def from_rules(rules: Rerank, lists: RankedItems, grid: Rectangle) -> Caps:
        return Caps(list(rules.caps.values()), [grid.values(lists.values[column]) for column in rules.caps])

    def allowed(self) -> Bools | None:
        """Return the items that the caps still allow, bool [n, m]; None: all."""
        allowed: Bools | None = None
        for limit, values, counts in zip(self.limits, self.values, self.counts, strict=True):
            free = (counts < limit) | (values < 0)
            allowed = free if allowed is None else allowed & free
        return allowed

    @cached_property
    def _groups(self) -> list[tuple[I64, I64]]:
        """Return by column each item's group, int64 [n, m] (its user's items of its value), and the users of groups."""
        grouped = []
        for values in self.values:
            n, m = values.shape
            user_values = np.arange(n)[:, None] * (values.max(initial=0) + 2) + values + 1
            _, first, groups = np.unique(user_values, return_index=True, return_inverse=True)
            grouped.append((groups.reshape(n, m), first // max(m, 1)))
        return grouped

    def without_reserved(self, shares: list[Share], placed_counts: I64, eligible: Bools, ends: I64) -> Bools:
        """Return eligible items except those that would take a share's last room, bool [n, m]; all if none remains.

        Of a share that lacks as many items as a cap still lets into the list, or more, none can be missed: where its
        items of a value fill the room that is left to the value, an item of that value that is not of the share waits.
        ends: how long each user's list can be, int64 [n].
        """
        n, m = eligible.shape
        reserved = np.zeros((n, m), bool)
        for limit, values, counts, (groups, owners) in zip(
            self.limits, self.values, self.counts, self._groups, strict=True
        ):
            room = np.full(len(owners), m)
            capped = values >= 0
            room[groups[capped]] = limit - counts[capped]
            for i, share in enumerate(shares):
                size = np.bincount(groups[share.members & eligible], minlength=len(owners))
                possible = np.bincount(owners, np.minimum(size, room), minlength=n)
                shortage = share.least[ends] - placed_counts[i]
                scarce = (shortage > 0) & (possible <= shortage)
                reserved |= scarce[:, None] & ((size > 0) & (size >= room))[groups] & ~share.members
        remaining = eligible & ~reserved
        return np.where(remaining.any(1, keepdims=True), remaining, eligible)

    def at_most(self, members: Bools) -> I64:
        """Return how many of some items no list exceeds, by each cap alone: int64 [n]. members: bool [n, m]."""
        bound: I64 = members.sum(1)
        for limit, values, (groups, owners) in zip(self.limits, self.values, self._groups, strict=True):
            size = np.bincount(groups[members & (values >= 0)], minlength=len(owners))
            capped = np.bincount(owners, np.minimum(size, limit), minlength=len(members)).astype(np.int64)
            bound = np.minimum(bound, capped + (members & (values < 0)).sum(1))
        return bound

    def add(self, users: I64, columns: I64) -> None:
        """Put an item each into the lists of some users."""
        for values, counts in zip(self.values, self.counts, strict=True):
            counts[users] += values[users] == values[users, columns][:, None]


@dataclass(frozen=True)
class _Likeness:
    """Similarity of items, 0 to 1 (cosines: -1 to 1)."""

    lists: RankedItems
    grid: Rectangle
    columns: tuple[str, ...] | None

    @cached_property
    def _values(self) -> list[I64]:
        return [self.grid.values(self.lists.values[c]) for c in self.columns or ()]

    @cached_property
    def _vectors(self) -> NDArray[np.float32]:
        assert self.lists.vectors is not None
        return self.lists.vectors[self.grid.rows]

    def to(self, users: I64, columns: I64) -> F64:
        """Return the similarity of all items of some users to one of each: float64 [users, m]."""
        if self.columns is None:
            # Copying all users' vectors would cost more than the products.
            vectors = self._vectors if len(users) == len(self._vectors) else self._vectors[users]
            cosines: F64 = np.matmul(vectors, vectors[np.arange(len(users)), columns][:, :, None])[:, :, 0].astype(
                np.float64
            )
            return cosines
        equal = np.zeros((len(users), self.grid.rows.shape[1]))
        for values in self._values:
            one_value = values[users, columns][:, None]
            equal += (values[users] == one_value) & (one_value >= 0)
        return equal / len(self.columns)


def select(
    lists: RankedItems, grid: Rectangle, rules: Rerank, k: int, draw: Draw | None = None
) -> tuple[Selected, Caps]:
    """Return the first k items of each list by the deterministic rules, and the caps' counts with them.

    With `draw`, an item is drawn at each position, of those among which the best would be taken without it.

    At each position, of the items that the caps allow: the one with the greatest (boosted) score, or with diversity the
    greatest marginal relevance; of equal ones the one that was ranked higher. Where a share would not be reached
    otherwise, by this prefix of the list or a longer one, only items of that share are looked at; what would take the
    room that a cap leaves to them is not. With one cap and one share the list has the share, or all that the cap and
    the ranked items allow; with more of them, which take each other's room, it may have less.
    """
    n, m = grid.rows.shape
    users = np.arange(n)
    positions, ends = min(k, m), np.minimum(k, grid.is_item.sum(1))
    value = _boosted(lists, grid, rules)
    caps, shares = Caps.from_rules(rules, lists, grid), shares_of(lists, grid, rules, k)
    diversity = rules.diversity
    likeness = None
    most_alike = np.zeros((n, m))
    if diversity is not None:
        value = diversity.relevance * _scaled(value, grid.is_item)
        likeness = _Likeness(lists, grid, None if diversity.by == "vectors" else diversity.by)
    chosen, rule = np.full((n, positions), -1), np.zeros((n, positions), np.uint8)
    propensity = np.ones((n, positions))
    taken, placed_counts = np.zeros((n, m), bool), np.zeros((len(shares), n), np.int64)
    boosted = grid.bools(lists.fresh) if rules.freshness is not None and rules.freshness.boost else None
    for place in range(positions):
        eligible = grid.is_item & ~taken
        if (allowed := caps.allowed()) is not None:
            eligible &= allowed
        if caps.limits and shares:
            eligible = caps.without_reserved(shares, placed_counts, eligible, ends)
        position_value = value
        if diversity is not None:
            position_value = value - (1 - diversity.relevance) * most_alike
        best = np.where(eligible, position_value, -np.inf).argmax(1)
        picked, reason, allowed_items = best, np.zeros(n, np.uint8), eligible
        if boosted is not None:
            reason[boosted[users, best] & (best >= k)] = Rule.FRESH
        if shares:
            due = _due(shares, placed_counts, eligible, place, k)
            due_items = np.zeros((n, m), bool)
            for share, is_due in zip(shares, due, strict=True):
                due_items |= share.members & is_due[:, None]
            due_items &= eligible
            forced = due_items.any(1)
            allowed_items = np.where(forced[:, None], due_items, eligible)
            picked = np.where(forced, np.where(due_items, position_value, -np.inf).argmax(1), best)
            for share, is_due in zip(shares, due, strict=True):
                reason[is_due & forced & (picked != best) & share.members[users, picked]] = share.rule
        if draw is not None:
            drawn, propensity[:, place] = draw(place, position_value, allowed_items)
            picked, reason = drawn, np.where(drawn == picked, reason, np.uint8(Rule.EXPLORE))
        served = np.flatnonzero(eligible.any(1))
        column = picked[served]
        chosen[served, place], rule[served, place] = column, reason[served]
        taken[served, column] = True
        caps.add(served, column)
        for i, share in enumerate(shares):
            placed_counts[i, served] += share.members[served, column]
        if likeness is not None and place + 1 < positions:
            alike = likeness.to(served, column)
            most_alike[served] = np.maximum(most_alike[served], alike) if place else alike
    return Selected(chosen, rule, taken, propensity), caps


def shares_of(lists: RankedItems, grid: Rectangle, rules: Rerank, k: int) -> list[Share]:
    """Return the shares of lists of k that the rules require."""
    shares = []
    if rules.freshness is not None and rules.freshness.share is not None:
        shares.append(Share(Rule.FRESH, grid.bools(lists.fresh), least_counts(rules.freshness.share, k)))
    if rules.new_items is not None:
        shares.append(Share(Rule.NEW_ITEM, grid.bools(lists.new), least_counts(rules.new_items.share, k)))
    return shares


def _boosted(lists: RankedItems, grid: Rectangle, rules: Rerank) -> F64:
    """Return the scores with those of fresh items raised: float64 [n, m], 0 beyond the ends."""
    scores: F64 = np.where(grid.is_item, lists.scores[grid.rows].astype(np.float64), 0.0)
    if rules.freshness is None or not rules.freshness.boost:
        return scores
    # A boost raises a negative score, too.
    return scores + rules.freshness.boost * np.abs(scores) * grid.bools(lists.fresh)


def _scaled(value: F64, is_item: Bools) -> F64:
    """Scale values to 0 to 1 within each user's items; 0 if all are equal."""
    low = np.where(is_item, value, np.inf).min(1, keepdims=True, initial=np.inf)
    width = np.where(is_item, value, -np.inf).max(1, keepdims=True, initial=-np.inf) - low
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(is_item & (width > 0), (value - low) / width, 0.0)


def _due(shares: list[Share], placed_counts: I64, eligible: Bools, place: int, k: int) -> list[Bools]:
    """Return which shares must be served now, for each user: bool [n] each.

    A share lacks so many items of a prefix, of those that there still are. Where all shares together lack, of some
    prefix, as many as it has free positions, those that lack any are due. (One item may serve two: then less is due.)
    """
    remaining = [(share.members & eligible).sum(1) for share in shares]
    due = [np.zeros(eligible.shape[0], bool) for _ in shares]
    settled = np.zeros(eligible.shape[0], bool)
    for end in range(place + 1, k + 1):
        shortages = [
            np.minimum(np.maximum(share.least[end] - placed_counts[i], 0), remaining[i])
            for i, share in enumerate(shares)
        ]
        full = ~settled & (sum(shortages) >= end - place)
        for is_due, shortage in zip(due, shortages, strict=True):
            is_due |= full & (shortage > 0)
        settled |= full
    return due
