"""A row's fold: from other bits of its identity's hash than those that place it in the dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from pyspark.sql import Column


def folds_of(identity: npt.NDArray[np.int64], folds: int) -> npt.NDArray[np.int32]:
    """The fold of each row, 0 to folds - 1. int64 [n] -> int32 [n]."""
    return ((identity >> 20) % folds).astype(np.int32)


def spark_fold(identity: Column, folds: int) -> Column:
    """The same as an int column, of the hash of a row's identity as bigint."""
    from pyspark.sql import functions as F

    return F.pmod(F.shiftright(identity, 20), F.lit(folds).cast("bigint")).cast("int")
