"""Row lookup of 64-bit ids with the operators that graphs have: ids in buckets by their remainder, each compared.

A graph has no search in sorted numbers and no hash table. An id's bucket is its remainder by a prime; rows are in the
order of buckets. A lookup reads as many ids from the bucket's start on as the fullest bucket has, and takes the one
that is equal: an id is in no bucket but its own, so those of the next bucket are never taken for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

#: Beyond so many ids in a bucket other primes are tried, so many.
_MANY, _TRIES = 16, 4


@dataclass(frozen=True)
class Buckets:
    """Ids in the order of buckets.

    Attributes:
        keys: the ids: int64 [N].
        order: the place that each had before: int64 [N].
        starts: the first id of each bucket: int64 [buckets], a prime number of them.
        most: ids of a bucket at most, at least 1.
    """

    keys: NDArray[np.int64]
    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    most: int


def bucketed(ids: NDArray[np.int64]) -> Buckets:
    """Put ids int64 [N] in buckets, about one in each; N is at least 1, and no id is there twice."""
    best: Buckets | None = None
    buckets = len(ids)
    for _ in range(_TRIES):
        buckets = next_prime(buckets)
        found = _divided(ids, buckets)
        if best is None or found.most < best.most:
            best = found
        if best.most <= _MANY:
            break
        buckets += len(ids) // 8 + 1
    assert best is not None
    return best


def _divided(ids: NDArray[np.int64], buckets: int) -> Buckets:
    bucket = ids % buckets  # of a negative id not negative, as in ONNX's Mod and torch's remainder
    order = np.argsort(bucket, kind="stable")
    sizes = np.bincount(bucket, minlength=buckets)
    starts = np.cumsum(sizes) - sizes
    return Buckets(ids[order], order, starts.astype(np.int64), int(sizes.max()))


def next_prime(n: int) -> int:
    """Return the smallest prime that is not below n."""
    return next(p for p in count(max(n, 2)) if all(p % d for d in range(2, int(p**0.5) + 1)))
