"""How far two distributions over the same bins are apart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import log

#: Shares below this count as this: a bin that is empty on one side would make the index infinite. One in ten thousand,
#: as is usual.
EPSILON = 1e-4


def psi(expected: Sequence[int], actual: Sequence[int]) -> float | None:
    """Population stability index: the sum over bins of (a - e) * ln(a / e), of shares e and a, each EPSILON or more.

    Symmetric, 0 for equal shares. Below 0.1 is read as stable, above 0.25 as another population (Siddiqi, "Credit Risk
    Scorecards", 2006). By chance alone it is about (B - 1) * (1/n + 1/m) for B bins and samples of n and m (Yurdakul,
    "Statistical Properties of Population Stability Index", 2018).

    Args:
        expected: counts by bin in the training range.
        actual: counts in the same bins today.

    Returns:
        the index, nats; None where one side has no value at all.
    """
    shares = _shares(expected), _shares(actual)
    if shares[0] is None or shares[1] is None:
        return None
    pairs = ((max(e, EPSILON), max(a, EPSILON)) for e, a in zip(shares[0], shares[1], strict=True))
    return sum((a - e) * log(a / e) for e, a in pairs)


def ks(expected: Sequence[int], actual: Sequence[int]) -> float | None:
    """Kolmogorov-Smirnov: the largest difference of the two cumulative shares, at the bins' edges.

    Bins in order. The distance at the edges is at most that of the samples themselves; None as of `psi`.
    """
    shares = _shares(expected), _shares(actual)
    if shares[0] is None or shares[1] is None:
        return None
    return max(abs(e - a) for e, a in zip(accumulate(shares[0]), accumulate(shares[1]), strict=True))


def _shares(counts: Sequence[int]) -> list[float] | None:
    total = sum(counts)
    return [c / total for c in counts] if total else None
