"""Whether as many users came to each arm as were sent there: the check of the sample ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence


def sample_ratio_p(users: Sequence[int], shares: Sequence[float]) -> float:
    """The p-value of Pearson's chi-square test of the users of each arm against the arms' shares.

    A small one (below 0.001, say) means that users are lost on their way to an arm or from it, and that no difference
    between the arms can be believed (Fabijan et al., *Diagnosing sample ratio mismatch*, KDD 2019).

    Args:
        users: that were seen in each arm, at least two arms.
        shares: of the arms, above 0; their sum is 1.
    """
    total = sum(users)
    if total == 0:
        return 1.0
    statistic = sum((n - total * share) ** 2 / (total * share) for n, share in zip(users, shares, strict=True))
    return chi_square_tail(statistic, len(users) - 1)


def chi_square_tail(x: float, degrees: int) -> float:
    """P(a chi-square variable of so many degrees of freedom, from 1, is above x)."""
    half = x / 2
    if half <= 0:
        return 1.0
    if degrees % 2 == 0:
        first, terms = 0.0, [i + 1.0 for i in range(degrees // 2)]
    else:
        first, terms = math.erfc(math.sqrt(half)), [i + 0.5 for i in range(1, (degrees + 1) // 2)]
    # half^(t-1) e^-half / Gamma(t) of t = 1, 2, ... or of t = 3/2, 5/2, ..., in logarithms.
    return first + sum(math.exp((t - 1) * math.log(half) - half - math.lgamma(t)) for t in terms)
