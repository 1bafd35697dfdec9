"""The weights of a run's samples: `train.sample_weight`, times those of their days (`retrain.half_life_days`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.config import Train
from headrace.errors import UserError
from headrace.schema import DatasetSchema
from headrace.train.day_decay import DayDecay, decay_of


class SampleWeights:
    """What each row's loss is multiplied by.

    Args:
        train: with `sample_weight`, or without.
        schema: the dataset's.
        decay: of the days; None: they count alike.

    Raises:
        UserError: a column is of another type, or not carried.
    """

    def __init__(self, train: Train, schema: DatasetSchema, decay: DayDecay | None = None) -> None:
        self._column = next(iter(carried_weight(train, schema)), None)
        self._decay, self._time = decay, None if decay is None else decay.carried_name(schema)

    @property
    def carried(self) -> tuple[str, ...]:
        """The carried columns that weights are made of, by the dataset's names; empty: all rows count alike."""
        return tuple(dict.fromkeys(c for c in (self._column, self._time) if c is not None))

    def of(self, carried: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float32] | None:
        """The weights of a batch: float32 [B]; None: all rows count alike.

        Args:
            carried: the columns `carried`, [B].

        Raises:
            UserError: a weight is no number of at least 0, or a row has no time.
        """
        found = None if self._column is None else checked_weights(carried[self._column], self._column)
        if self._decay is None or self._time is None:
            return found
        of_day = decay_of(carried, self._decay, self._time)
        return of_day if found is None else found * of_day


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
