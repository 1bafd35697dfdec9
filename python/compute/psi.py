"""Distances between two distributions over the same bins: population stability index, Kolmogorov-Smirnov."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import log

#: The smallest share, as is usual: an empty bin on one side would make the index infinite.
EPSILON = 1e-4


def psi(expected: Sequence[int], actual: Sequence[int]) -> float | None:
    """Compute the population stability index: the sum over bins of (a - e) * ln(a / e), shares e and a >= EPSILON.

    Symmetric, 0 for equal shares. Below 0.1 is read as stable, above 0.25 as another population (Siddiqi, "Credit Risk
    Scorecards", 2006). By chance alone it is about (B - 1) * (1/n + 1/m) for B bins and samples of n and m (Yurdakul,
    "Statistical Properties of Population Stability Index", 2018).

    Args:
        expected: counts by bin in the training range.
        actual: counts in the same bins today.

    Returns:
        the index in nats; None where one side has no values.
    """
    shares = _shares(expected), _shares(actual)
    if shares[0] is None or shares[1] is None:
        return None
    pairs = ((max(e, EPSILON), max(a, EPSILON)) for e, a in zip(shares[0], shares[1], strict=True))
    return sum((a - e) * log(a / e) for e, a in pairs)


def ks(expected: Sequence[int], actual: Sequence[int]) -> float | None:
    """Compute the Kolmogorov-Smirnov distance: the largest difference of the cumulative shares at the bins' edges.

    Bins are in order. The result is at most the distance of the samples themselves; None as for `psi`.
    """
    shares = _shares(expected), _shares(actual)
    if shares[0] is None or shares[1] is None:
        return None
    return max(abs(e - a) for e, a in zip(accumulate(shares[0]), accumulate(shares[1]), strict=True))


def _shares(counts: Sequence[int]) -> list[float] | None:
    total = sum(counts)
    return [c / total for c in counts] if total else None
