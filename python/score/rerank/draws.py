"""Random numbers of users: the same in every run of a day."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.counter_random import scatter_64, stream, uniform
from headrace.score.rerank.lists import F64


def draws(seed: int, purpose: str, users: NDArray[np.uint64], columns: int) -> F64:
    """Uniform in [0, 1), a function of the seed, the purpose and each user's hash: float64 [n, columns]."""
    key = stream(seed, purpose)
    return uniform(key, scatter_64(key, users)[:, None] + np.arange(columns, dtype=np.uint64))
