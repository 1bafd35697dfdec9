"""Users to arms by a salted hash: the same every day, independent between experiments, stable while shares grow.

A user's place in an experiment is a hash of the experiment's salt and the user's key, not stored anywhere. Whether he
takes part and which arm he has are hashes of their own: who took part at 10 % takes part at 50 %, in the same arm.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.config.experiments import PARTS
from headrace.udfs.xxhash64 import xxhash64_integers, xxhash64_strings

I64 = npt.NDArray[np.int64]
#: What is hashed behind an experiment's salt: for the arm, and for whether a user takes part.
ARM, PART = "arm", "part"


def bucket(users: pa.Array, salt: str) -> I64:
    """The place of each user in [0, PARTS): `pmod(xxhash64(salt, user), PARTS)` of Spark.

    Args:
        users: whole numbers or texts without nulls, [n].
        salt: other salts give places that have nothing to do with these.
    """
    seed = np.repeat(xxhash64_strings(pa.array([salt])), len(users))
    if pa.types.is_integer(users.type):
        return xxhash64_integers(users.cast(pa.int64()).to_numpy(), seed) % PARTS
    return xxhash64_strings(users.cast(pa.string()), seed) % PARTS


def arms(users: pa.Array, salt: str, shares: Mapping[str, float], percent: float) -> I64:
    """The position of each user's arm in `shares`, -1 of those who take no part. int64 [n].

    Args:
        users: whole numbers or texts without nulls, [n].
        salt: of the experiment.
        shares: of the arms among those who take part, above 0; their sum is 1.
        percent: of all users who take part, in [0, 100]. Raising it takes nobody out of his arm.
    """
    found = np.searchsorted(edges(shares)[:-1], bucket(users, f"{salt}/{ARM}"), side="right")
    return np.where(bucket(users, f"{salt}/{PART}") < parts_of(percent), found, -1)


def edges(shares: Mapping[str, float]) -> I64:
    """The places at which the arms end, by their shares. int64 [arms]."""
    found: I64 = np.round(np.cumsum(list(shares.values())) * PARTS).astype(np.int64)
    return found


def parts_of(percent: float) -> int:
    """How many of the PARTS places a percentage is."""
    return round(percent * PARTS / 100)
