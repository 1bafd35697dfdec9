"""How late outcomes are known: the share of a served day's that has come after so many days, and what is still to come.

The share is that of days whose labels are ripe, all their events taken together: the distribution of reporting delays
that actuaries complete the newest accident years by (chain ladder; Mack, 1993).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date


@dataclass(frozen=True)
class Delays:
    """Events of ripe days by age: `counts[a]` were known a days after the day they were served, not before."""

    counts: Mapping[int, int]

    @staticmethod
    def of(by_day: Mapping[str, Mapping[int, int]], last_ripe: str) -> Delays:
        """Of served days -> age -> events, those up to a day."""
        total: dict[int, int] = {}
        for served, ages in by_day.items():
            if served <= last_ripe:
                for age, count in ages.items():
                    total[age] = total.get(age, 0) + count
        return Delays(total)

    def known(self, age: int) -> float | None:
        """The share that is known after so many days, in [0, 1]; None where no ripe day had an event."""
        total = sum(self.counts.values())
        return sum(n for a, n in self.counts.items() if a <= age) / total if total else None

    def curve(self) -> list[float]:
        """`known` by age, from 0 up to the last age that has events; empty without any."""
        return [self.known(age) or 0.0 for age in range(max(self.counts, default=-1) + 1)]


def age_of(served: str, ds: str) -> int:
    """Days from a served day to another day."""
    return (date.fromisoformat(ds) - date.fromisoformat(served)).days


def final_rate(rate: float | None, known: float | None, shown: float | None) -> float | None:
    """What a rate will be when all has come, if the newest days come in as the ripe ones did.

    Args:
        rate: positives over rows, so far.
        known: the share of the positives that has come by now.
        shown: the share of the rows that has.
    """
    if rate is None or not known or not shown:
        return None
    return rate * shown / known
