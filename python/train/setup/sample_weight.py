"""The column of the samples' weights (`train.sample_weight`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.config import Train
from headrace.errors import UserError
from headrace.schema import DatasetSchema


def carried_weight(train: Train, schema: DatasetSchema) -> tuple[str, ...]:
    """The carried column that holds the weights, in the dataset's name; empty without one.

    Raises:
        UserError: it is text.
    """
    if train.sample_weight is None:
        return ()
    feature = schema.carried_columns.get(train.sample_weight)
    if feature is not None and feature.dtype == "string":
        raise UserError(f"train.sample_weight: the column '{train.sample_weight}' is text; weights are numbers")
    return (schema.carried_name(train.sample_weight),)


def checked_weights(values: npt.NDArray[Any], column: str) -> npt.NDArray[np.float32]:
    """A batch's weights: [B] -> float32 [B].

    Raises:
        UserError: one is null, not finite or below 0.
    """
    found = values.astype(np.float32)
    bad = ~(np.isfinite(found) & (found >= 0))
    if bad.any():
        raise UserError(
            f"train.sample_weight: '{column}' is {found[bad][0]} in {int(bad.sum())} of {len(found)} rows of a batch; "
            f"weights are numbers of at least 0: let ingest quarantine such rows (required: true, "
            f"table.expectations.ranges)"
        )
    return found
