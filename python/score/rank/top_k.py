"""The best of each row, with ties broken the same way every time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def top_k(scores: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Columns of the k highest scores of each row, best first; of equal scores, the lower column first.

    A score and its column become one int64 that sorts as wanted: no two are equal, so a partition (linear in the
    number of columns) finds the same k every time.

    Args:
        scores: float32 [n, m], no NaN; minus infinity sorts last.
        k: at most m are found.

    Returns:
        int64 [n, min(k, m)].
    """
    m = scores.shape[1]
    k = min(k, m)
    # Adding 0 makes -0 a 0. As integers, floats of IEEE 754 sort like their values once negatives are flipped.
    bits = np.ascontiguousarray(scores + np.float32(0)).view(np.int32)
    ordered = (bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))).astype(np.int64)
    keys = (-ordered << 32) | np.arange(m, dtype=np.int64)
    if k < m:
        keys = np.partition(keys, k - 1, axis=1)[:, :k]
    return np.sort(keys, axis=1) & 0xFFFFFFFF
