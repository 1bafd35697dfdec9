"""Users to arms by a salted hash: the same every day, independent between experiments, stable while shares grow.

A user's place in an experiment is a hash of the experiment's salt and the user's key, not stored anywhere. Whether he
takes part and which arm he has are hashes of their own: who took part at 10 % takes part at 50 %, in the same arm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.udfs.xxhash64 import xxhash64_integers, xxhash64_strings

I64 = npt.NDArray[np.int64]
#: Shares are multiples of 1 / BUCKETS.
BUCKETS = 10_000


def bucket(users: pa.Array, salt: str) -> I64:
    """The place of each user in [0, BUCKETS): `pmod(xxhash64(salt, user), BUCKETS)` of Spark.

    Args:
        users: whole numbers or texts without nulls, [n].
        salt: other salts give places that have nothing to do with these.
    """
    seed = np.repeat(xxhash64_strings(pa.array([salt])), len(users))
    if pa.types.is_integer(users.type):
        return xxhash64_integers(users.cast(pa.int64()).to_numpy(), seed) % BUCKETS
    return xxhash64_strings(users.cast(pa.string()), seed) % BUCKETS


def arms(users: pa.Array, salt: str, shares: Mapping[str, float], percent: float) -> npt.NDArray[np.int64]:
    """The position of each user's arm in `shares`, -1 of those who take no part. int64 [n].

    Args:
        users: whole numbers or texts without nulls, [n].
        salt: of the experiment.
        shares: of the arms among those who take part, above 0; their sum is 1.
        percent: of all users who take part, in [0, 100]. Raising it takes nobody out of his arm.
    """
    edges = np.round(np.cumsum(list(shares.values())) * BUCKETS).astype(np.int64)
    found = np.searchsorted(edges[:-1], bucket(users, f"{salt}/arm"), side="right")
    takes_part = bucket(users, f"{salt}/part") < round(percent * BUCKETS / 100)
    return np.where(takes_part, found, -1)


def text_of(arms_of_user: Sequence[tuple[str, str]]) -> str:
    """The column `arms` of a score: `experiment=arm`, several with commas between."""
    return ",".join(f"{name}={arm}" for name, arm in arms_of_user)
