"""Popularity of a table's rows, and the expected number of distinct rows in a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Rows with a group of their own; later groups grow by a few percent.
_HEAD = 1_024
_GROWTH = 1.02


@dataclass(frozen=True)
class Popularity:
    """Rows in groups of equal popularity, most popular first."""

    #: Rows of each group: float64 [G].
    rows: NDArray[np.float64]
    #: Probability that a lookup is of one given row of the group: float64 [G].
    chance: NDArray[np.float64]

    @staticmethod
    def zipf(rows: int, exponent: float) -> Popularity:
        """Create a Zipf distribution: row i (from 0) in proportion to (i + 1) ** -exponent; 0: uniform."""
        if exponent == 0:
            return Popularity(np.array([float(rows)]), np.array([1.0 / rows]))
        head = min(rows, _HEAD)
        steps = max(0, int(np.ceil(np.log(max(rows, 1) / head) / np.log(_GROWTH))))
        edges = np.unique(np.concatenate([np.arange(head + 1), np.floor(head * _GROWTH ** np.arange(1, steps + 1))]))
        edges = np.minimum(edges, rows)
        edges = np.unique(np.append(edges, rows)).astype(np.float64)
        counts = np.diff(edges)
        # The rank in the middle of a group stands for all of it.
        weight = ((edges[:-1] + edges[1:] + 1) / 2) ** -exponent
        return Popularity(counts, weight / float((counts * weight).sum()))

    @staticmethod
    def sampled(counts: NDArray[np.int64], rows: int) -> Popularity:
        """Estimate from the counts of rows in a sample of lookups; `counts` may be shorter than the table.

        What the sample did not see is as likely together as the share of lookups whose row was seen once, and those
        seen once as the share of those seen twice (Good and Turing; Good, 1953); rows of one kind are alike.
        """
        times, seen = np.unique(counts[counts > 0], return_counts=True)
        times, seen = times[::-1].astype(np.float64), seen[::-1].astype(np.float64)
        total, rest = float((times * seen).sum()), rows - int(seen.sum())
        once = float(seen[-1]) if times[-1] == 1 else 0.0
        unseen = min(once / total, 0.999) if rest > 0 else 0.0
        mass = times * seen / total
        if unseen and len(times) > 2 and times[-2] == 2:
            mass[-1] = min(mass[-1], 2 * seen[-2] / total)
        mass *= (1 - unseen) / mass.sum()
        chance = mass / seen
        if rest <= 0:
            return Popularity(seen, chance)
        return Popularity(np.append(seen, float(rest)), np.append(chance, unseen / rest))

    def chance_of_lookup(self, lookups: float) -> NDArray[np.float64]:
        """Return the probability that at least one of `lookups` lookups is of a row, by group: float64 [G]."""
        result: NDArray[np.float64] = -np.expm1(lookups * np.log1p(-np.minimum(self.chance, 1 - 1e-12)))
        return result

    def distinct(self, lookups: float) -> float:
        """Return the expected number of distinct rows among `lookups` lookups."""
        return float((self.rows * self.chance_of_lookup(lookups)).sum())

    def distinct_beyond(self, lookups: float, most: float) -> float:
        """Return the expected number of distinct rows among `lookups` lookups outside the `most` popular ones."""
        left = np.clip(np.cumsum(self.rows) - most, 0.0, self.rows)
        return float((left * self.chance_of_lookup(lookups)).sum())

    def distinct_by_shard(self, lookups: float, ranks: int) -> NDArray[np.float64]:
        """Return the expected number of distinct rows on each of `ranks` shards, row i on shard i % ranks: float64
        [ranks].
        """
        return self._by_shard(self.chance_of_lookup(lookups), ranks)

    def share_by_shard(self, ranks: int) -> NDArray[np.float64]:
        """Return the probability that a lookup is on each of `ranks` shards, row i on shard i % ranks: float64
        [ranks].
        """
        return self._by_shard(self.chance, ranks)

    def _by_shard(self, chance_of_lookup: NDArray[np.float64], ranks: int) -> NDArray[np.float64]:
        """Sum a number by group over the rows of each shard."""
        single = int(np.argmin(self.rows == 1)) if (self.rows != 1).any() else len(self.rows)
        shards = np.bincount(np.arange(single) % ranks, weights=chance_of_lookup[:single], minlength=ranks).astype(
            np.float64
        )
        total = float(self.rows.sum())
        tail = float((self.rows[single:] * chance_of_lookup[single:]).sum())
        if tail and total >= ranks:
            shards += tail / ranks
        elif tail:
            shards[: int(total)] += tail / total
        return shards
