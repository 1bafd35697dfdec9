"""Ranked items of some users, as rectangles that NumPy works on for all users at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]


class Rule(IntEnum):
    """What put an item into a list."""

    SCORE = 0
    FRESH = 1
    NEW_ITEM = 2
    EXPLORE = 3


@dataclass(frozen=True)
class RankedLists:
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
    there: Bools

    @staticmethod
    def of(offsets: I64) -> Rectangle:
        """Rows beyond the end of a list are 0 and not `there`."""
        lengths = np.diff(offsets)
        columns = np.arange(int(lengths.max(initial=0)))
        there = columns < lengths[:, None]
        return Rectangle(np.where(there, offsets[:-1, None] + columns, 0), there)

    def bools(self, values: Bools | None) -> Bools:
        """Of each cell, False beyond the end: bool [n, m]."""
        return self.there & values[self.rows] if values is not None else np.zeros_like(self.there)

    def values(self, values: I64) -> I64:
        """Of each cell, -1 beyond the end: int64 [n, m]."""
        return np.where(self.there, values[self.rows], -1)
